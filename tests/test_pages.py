"""The pages of docs/ that are written from records are what the records give, and what is said of them is so."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from pomona.sparse.compress import Compression, LayerReport

ROOT = Path(__file__).parents[1]
WRITERS = {
    "page": "page.py",
    "results": "results.py",
    "private_page": "private_cifar.py page",
    "errata": "errata.py --page",
    "qian": "qian.py --page",
    "iterand_page": "iterand_page.py",
    "balanced_page": "balanced_page.py",
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # where scripts find their neighbours
    return importlib.import_module


@pytest.fixture
def empty(script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder of records."""
    monkeypatch.setattr(script("pages"), "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", WRITERS)
def test_a_page_is_what_its_records_give(name: str, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = script(name)
    if name == "private_page":
        monkeypatch.delitem(writer.PARTS, "shares")  # not of a record, and the accountant takes its time
    written = writer.PAGE.read_text(encoding="utf-8")
    assert writer.page() == written, f"write it anew with python benchmarks/{WRITERS[name]}"


# ---- what they share


def test_records_come_in_order_with_what_they_have(script: Any, empty: Path) -> None:
    for name, kept in (("b", {"rows": [3]}), ("a", {"rows": [1, 2]}), ("c", {"other": [4]})):
        (empty / f"x-{name}.json").write_text(json.dumps(kept))
    pages = script("pages")
    assert [row for _, row in pages.rows("x-*.json", "rows")] == [1, 2, 3]
    assert [kept for kept, _ in pages.rows("x-*.json", "other")] == [{"other": [4]}]
    assert pages.records("y-*.json") == []


def test_the_machine_is_the_one_that_was_used(script: Any) -> None:
    machine = script("pages").machine
    both = {"machine": {"cpu": "C", "gpus": [{"name": "G"}]}}
    assert [machine(both), machine(both, "cuda:0"), machine(both, "cpu")] == ["G", "G", "C"]
    assert machine({"machine": {"cpu": "C", "gpus": []}}) == "C"


def test_a_grid_has_a_head_a_rule_and_rows(script: Any) -> None:
    grid = script("pages").grid
    assert grid(["a", "b"], [["1", ""], ["2", "3"]]) == "| a | b |\n|---|---|\n| 1 |  |\n| 2 | 3 |"
    assert grid(["a", "b"], iter([["1", "2"]]), rule="| --- ").splitlines()[1] == "| --- | --- |"
    assert grid(["a"], []) == script("pages").MISSING


def test_a_page_is_filled_between_its_markers(script: Any, tmp_path: Path) -> None:
    filled, page = script("pages").filled, tmp_path / "p.md"
    page.write_text("A\n<!-- one -->\nold\n<!-- end -->\nB\n<!-- two -->\n<!-- end -->\n")
    text = filled(page, {"two": "2\n", "one": "1"})
    assert text == "A\n<!-- one -->\n1\n<!-- end -->\nB\n<!-- two -->\n2\n<!-- end -->\n"
    page.write_text(text)
    assert filled(page, {"two": "2\n", "one": "1"}) == text
    with pytest.raises(SystemExit, match="docs/p.md has no <!-- three -->"):
        filled(page, {"three": "3"})
    page.write_text("<!-- one -->\nold\n")
    with pytest.raises(SystemExit, match="<!-- one --> … <!-- end -->"):
        filled(page, {"one": "1"})


def test_the_times_of_balanced_products_are_laid_out(script: Any, empty: Path) -> None:
    writer = script("balanced_page")
    assert {writer.matrices(), writer.memory(), writer.targets(), writer.workloads()} == {script("pages").MISSING}
    place = {"rows": 8, "columns": 4, "batch": 1, "state": "cold"}
    times = {"dense": 6e-6, "CSR": 3e-6, "block-sparse 8×8": 2e-6, "balanced": 1.5e-6, "2:4": None}
    sides = [{**place, "side": side, "seconds": s, "limit": 0.25} for side, s in times.items()]
    reached = [{"size": 8, "batch": 1, "peer": "CSR", "target": 3, "reached": r} for r in (2.999, 3.0)]
    seconds = {"dense": 2e-3, "plain": 1.5e-3, "all packed": 1e-3, "compressed": 0.75e-3}
    record = {
        "bench": {"device": "C", "dtype": "float32", "rows": sides, "bandwidth": 19.06e9},
        "targets": reached,
        "workloads": {"N": {"seconds": seconds, "ratio": 2.0, "paper_ratio": 1.31}},
    }
    (empty / "balanced-cpu.json").write_text(json.dumps(record))
    line = "| C, float32 | 8×4 | 1 | cold | 6.0 | 3.0 | 2.0 |  | 1.5 | 4.00× | 2.00× | 25 % |"
    assert writer.matrices().splitlines()[2:] == [line]
    assert writer.memory() == "- C: 19.1 GB/s"
    assert [row.split(" | ")[-1] for row in writer.targets().splitlines()[2:]] == ["missed |", "met |"]
    old = "| C | N | 2,000 |  | 1,500 | 1,000 | 750 | 2.00× |  | 1.31× |"  # a record without convolutions that do ReLUs
    assert writer.workloads().splitlines()[2:] == [old]
    assert writer.workloads("called", "called_") == script("pages").MISSING
    gain = script("balanced").gain
    assert gain(seconds, ("dense, fused",)) is None
    seconds |= {"dense, channels last": 1e-3, "compressed, channels last": 42.04e-6}
    seconds |= {"dense, fused": 1.7e-3, "dense, fused, channels last": 84.08e-6}
    ratio, fused = gain(seconds), gain(seconds, ("dense, fused",))  # the fastest of both layouts
    found = {"seconds": seconds, "called": {**seconds, "dense": 9e-3}, "ratio": ratio, "fused_ratio": fused}
    found |= {"called_ratio": 1.5, "called_fused_ratio": None}
    record["workloads"] = {"N": {**found, "paper_ratio": 1.31}}
    (empty / "balanced-cpu.json").write_text(json.dumps(record))
    below = "| C | N, channels last | 1,000 | 84.1 |  |  | 42.0 |  |  |  |"
    first = "| C | N | 2,000 | 1,700 | 1,500 | 1,000 | 750 | 23.79× | 2.00× | 1.31× |"
    assert writer.workloads().splitlines()[2:] == [first, below]
    called = "| C | N | 9,000 | 1,700 | 1,500 | 1,000 | 750 | 1.50× |  | 1.31× |"
    assert writer.workloads("called", "called_").splitlines()[2:] == [called, below]


def test_a_dense_network_is_also_timed_with_its_relus_in_one_kernel(script: Any) -> None:
    network = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Conv2d(1, 1, 1), nn.ReLU())
    layers = [
        LayerReport(name, "Conv2d", (1, 1, 1, 1), 0.9, False, "", saved=saved) for name, saved in (("0", 0), ("2", 1))
    ]
    found = script("balanced").fused(network, Compression(tuple(layers), 1))
    assert [type(m).__name__ for m in found["dense, fused"]] == ["Conv2d", "ReLU", "Conv2dReLU", "Fused"]
    assert type(network[2]) is nn.Conv2d
    assert script("balanced").fused(network, Compression((layers[0],), 1)) == {}


# ---- what docs/iterand.md and docs/balanced.md say in words


def trained(script: Any, name: str) -> Iterator[dict[str, Any]]:
    """The cells of a table that were trained."""
    results = script("results")
    return (cell for cell in results.compare(name, results.store())["cells"] if cell["runs"])


def test_what_is_said_of_random_weights_is_so(script: Any) -> None:
    table3, table10 = (list(trained(script, f"iterand-{name}")) for name in ("table3", "table10"))
    assert {cell["runs"] for cell in table3 + table10} == {1}
    for cell in table3:
        apart = cell["mean"] - cell["paper"]
        assert abs(apart) <= cell["paper_std"] if cell["label"] == "Conv6" else 0.3 < apart < 0.45
    ours, paper = (
        {(cell["label"], cell["row"], *cell["column"].split()): cell[key] for cell in table3 + table10}
        for key in ("mean", "paper")
    )
    pairs = [(*where, kind) for *where, method, kind in (key for key in ours if len(key) == 4) if method == "IteRand"]
    assert len(pairs) == 4
    for label, row, kind in pairs:
        gap, theirs = (
            found[label, row, "IteRand", kind] - found[label, row, "edge-popup", kind] for found in (ours, paper)
        )
        assert gap > 0
        assert gap == pytest.approx(theirs, abs=0.25)
    assert all(4 < cell["paper"] - cell["mean"] < 6 for cell in table10)
    order = [[cell[key] for cell in table10] for key in ("mean", "paper")]
    assert all(values == sorted(values, reverse=True) for values in order)


def test_what_is_said_of_tickets_is_so(script: Any) -> None:
    """They are of runs whose records are here, and a sign takes a bit whether trained or not."""
    [tickets], [h200] = (script("pages").records(f"iterand-{name}.json") for name in ("tickets", "h200"))
    runs = script("results").store().runs
    for row in tickets["trained"]:
        assert runs[row["fingerprint"]].recipe.name == row["run"]
    for rows in (tickets["trained"], h200["tickets"]):
        popup, signs = rows[:2]
        assert 8 * (signs["bytes"] - popup["bytes"]) / (0.4 * popup["state_bytes"] / 4) == pytest.approx(1, abs=0.02)


def test_what_is_said_of_balanced_sparsity_is_so(script: Any) -> None:
    lstm, sensitivity = (
        {(cell["column"], cell["sparsity"]): cell for cell in trained(script, f"balanced-{name}")}
        for name in ("lstm", "sensitivity")
    )
    every = [*lstm.values(), *sensitivity.values()]
    assert {(cell["runs"], cell["setting"]["epochs"]) for cell in every} == {(1, 12)}
    coarse = ("block 4×4", "vector 16")
    for s in (0.6, 0.7, 0.8, 0.9):
        random, balanced, *others = (lstm[kind, s]["mean"] for kind in ("random", "balanced", *coarse))
        assert abs(balanced - random) < 0.15
        assert all(other < random for other in others) if s < 0.8 else min(others) > max(balanced, random)
    assert all(lstm[kind, 0.9]["mean"] - lstm["balanced", 0.9]["mean"] > 0.2 for kind in coarse)
    assert [round(lstm["balanced", s]["reached"], 3) for s in (0.6, 0.7, 0.8, 0.9)] == [0.6, 0.72, 0.8, 0.92]
    for s in (0.6, 0.7, 0.8):
        blocks, ranges = (
            [sensitivity[f"{kind} {size}", s]["mean"] for size in sizes]
            for kind, sizes in (("block", ("4×4", "8×8", "16×16")), ("range", (25, 50, 100)))
        )
        assert blocks == sorted(blocks)
        assert max(ranges) - min(ranges) < 0.1
