"""The demo: its runs, its table and its chart."""

from __future__ import annotations

import io
import json
import re
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from pomona.cli import main
from pomona.errors import PomonaError
from pomona.lab import demo
from pomona.lab.demo import FULL, METHODS, QUICK, DemoGrid

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a quick demo, which the command line made beside other files."""
    out = tmp_path_factory.mktemp("demo")
    (out / "notes.txt").write_text("mine")
    (out / "my-run").mkdir()
    assert main(["demo", "--quick", "--out", str(out), "--seed", "3"]) == 0
    return out


@pytest.fixture
def result(quick: Path) -> dict:
    return json.loads((quick / "demo.json").read_text())


def make_summary(accuracy: float, **values) -> dict:
    """Return the part of a run's summary that the demo reads."""
    counts = {"params": 100, "nonzeros": 20, "macs": 1000, "macs_left": 300}
    return {"model": "m", "data": "d", "epoch": 4, "seed": 0, "accuracy": accuracy, "seconds": 1.0} | counts | values


def print_text(table) -> str:
    console = Console(file=io.StringIO(), width=140, color_system=None)
    console.print(table)
    return console.file.getvalue()


def test_all_runs_have_the_same_training():
    recipes = FULL.recipes()
    assert len(recipes) == (1 + 4 * 4) * FULL.seeds
    cells = {(r.method["name"], r.method.get("sparsity")) for r in recipes}
    assert cells == {("dense", None)} | {(m, s) for m in METHODS for s in (0.8, 0.9, 0.95, 0.98)}
    assert set(METHODS) == {"oneshot", "incremental", "random", "dpf"}
    first = recipes[0]
    for recipe in recipes:
        changed = {difference.split(":")[0].split(".")[0] for difference in recipe.differences(first)}
        assert changed <= {"method", "seed"}
    assert len({recipe.name for recipe in recipes}) == len(recipes)


def test_cells_are_means_of_runs(quick, result):
    assert len(result["cells"]) == 1 + len(QUICK.sparsities) * len(METHODS)
    for cell in result["cells"]:
        share = f"-{100 * cell['sparsity']:g}" if cell["sparsity"] else ""
        run = json.loads((quick / f"{cell['method']}{share}-seed3" / "summary.json").read_text())
        assert (cell["mean"], cell["seconds"], cell["macs_left"]) == (run["accuracy"], run["seconds"], run["macs_left"])
        assert (cell["std"], cell["runs"], cell["paper"]) == (None, 1, None)
        assert cell["setting"] == {"data": "digits", "epochs": QUICK.epochs, "seeds": [3]}
        # 32,400 weights are to be pruned; a few more parameters may be zero: biases of norms after a dead filter.
        zeros = cell["params"] - cell["params_left"]
        assert 0 <= zeros - round(cell["sparsity"] * 32_400) <= 144
        assert cell["macs_left"] <= cell["macs"]


def test_dense_and_pruned_networks_learn(result):
    accuracy = {(cell["method"], cell["sparsity"]): cell["mean"] for cell in result["cells"]}
    assert accuracy["dense", 0.0] > 95
    assert all(value > 90 for (_, sparsity), value in accuracy.items() if sparsity == 0.8)


def test_a_second_demo_replaces_only_runs_of_the_first(quick, capsys):
    stale = quick / "dense-seed3" / "stale"
    stale.write_text("of the first demo")
    grid = DemoGrid(sparsities=(), epochs=1, seeds=1)
    demo.remove_earlier_runs(quick, [recipe.name for recipe in grid.recipes(3)])
    assert not stale.parent.exists()
    assert (quick / "notes.txt").read_text() == "mine"
    assert (quick / "my-run").is_dir()
    assert (quick / "dpf-80-seed3").is_dir()


def test_folders_of_other_runs_are_not_removed(tmp_path):
    (tmp_path / "random-80-seed0").mkdir()
    (tmp_path / "random-80-seed0" / "recipe.toml").write_text(QUICK.recipes()[0].to_toml())  # of another run
    own = tmp_path / "dense-seed0"
    own.mkdir()
    (own / "recipe.toml").write_text(QUICK.recipes()[0].to_toml())
    with pytest.raises(PomonaError, match=r"random-80-seed0' exists and is no run of a demo"):
        demo.run_demo(tmp_path, QUICK)
    assert own.is_dir()


def test_cells_average_over_seeds_and_mark_the_best():
    grid = DemoGrid(sparsities=(0.8,), epochs=4, seeds=2)
    accuracies = {"dense": (99, 98), "oneshot": (90, 94), "incremental": (95, 97), "random": (80, 80), "dpf": (96, 96)}
    recipes = grid.recipes()
    runs = [make_summary(accuracies[r.method["name"]][r.seed], seed=r.seed, seconds=1.0 + r.seed) for r in recipes]
    cells = {cell["method"]: cell for cell in demo.make_cells(recipes, runs)}
    assert [method for method, cell in cells.items() if cell["best"]] == ["dense", "incremental", "dpf"]  # a tie
    assert (cells["oneshot"]["mean"], cells["oneshot"]["std"]) == (92, statistics.stdev([90, 94]))
    assert (cells["oneshot"]["runs"], cells["oneshot"]["setting"]["seeds"]) == (2, [0, 1])
    assert cells["oneshot"]["seconds"] == 1.5
    text = print_text(demo.render_table(list(cells.values())))
    dense, row = (next(line for line in text.splitlines() if word in line) for word in ("dense: ", "80%"))
    assert "98.50" in dense
    assert "100 parameters · 1,000 MACs" in dense
    assert re.findall(r"(★?) ([\d.]+) ±", row) == [("", "92.00"), ("★", "96.00"), ("", "80.00"), ("★", "96.00")]
    assert all(text.count(words) == len(METHODS) for words in ("20.0% params", "30.0% MACs", " 1.5 s │"))


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    with demo.single_cpu_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_the_chart_has_a_curve_per_method_and_a_dashed_line_for_dense(quick, result):
    root = ElementTree.fromstring((quick / "demo.svg").read_text())
    lines = root.findall(f"{SVG}polyline")
    assert len(lines) == len(METHODS)
    dashed = [line for line in root.findall(f"{SVG}line") if line.get("stroke-dasharray")]
    assert len(dashed) == 1
    words = [element.text for element in root.findall(f"{SVG}text")]
    for method in METHODS:
        last = next(c for c in result["cells"] if (c["method"], c["sparsity"]) == (method, 0.95))
        assert f"{method}  {last['mean']:.1f}" in words
    # Height in the picture is accuracy: the affine map through all points must be one and the same.
    points = [float(pair.split(",")[1]) for line in lines for pair in line.get("points").split()]
    values = [c["mean"] for method in METHODS for c in result["cells"] if c["method"] == method]
    points, values = [*points, float(dashed[0].get("y1"))], [*values, result["cells"][0]["mean"]]
    low, high = min(range(len(values)), key=values.__getitem__), max(range(len(values)), key=values.__getitem__)
    slope = (points[high] - points[low]) / (values[high] - values[low])
    assert slope < 0
    for point, value in zip(points, values, strict=True):
        assert point == pytest.approx(points[low] + slope * (value - values[low]), abs=0.11)
