"""The tables of docs/balanced.md, and what the page says about them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from pomona.sparse.compress import Compression, LayerReport


def test_tables_of_products_and_workloads(load_script: Any, empty_results: Path) -> None:
    writer, missing = load_script("balanced_page"), load_script("page_helpers").NOT_MEASURED
    states, called = {"seconds": "warm", "cold": "cold"}, {"called": "called"}
    workloads = partial(writer.format_workloads, states)
    formats = writer.format_matrices, writer.format_memory, writer.format_targets, workloads
    assert {format_part() for format_part in formats} == {missing}
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
    (empty_results / "balanced-cpu.json").write_text(json.dumps(record))
    line = "| C, float32 | 8×4 | 1 | cold | 6.0 | 3.0 | 2.0 |  | 1.5 | 4.00× | 2.00× | 25 % |"
    assert writer.format_matrices().splitlines()[2:] == [line]
    assert writer.format_memory() == "- C: 19.1 GB/s"
    assert [row.split(" | ")[-1] for row in writer.format_targets().splitlines()[2:]] == ["missed |", "met |"]
    # A record without convolutions that do ReLUs.
    old = "| C | N | warm | 2,000 |  | 1,500 | 1,000 | 750 | 2.00× |  | 1.31× |"
    assert workloads().splitlines()[2:] == [old]
    assert writer.format_workloads(called) == missing
    speed_up = load_script("balanced_kernels").speed_up
    assert speed_up(seconds, ("dense, fused",)) is None
    seconds |= {"dense, channels last": 1e-3, "compressed, channels last": 42.04e-6}
    seconds |= {"dense, fused": 1.7e-3, "dense, fused, channels last": 84.08e-6}
    ratio, fused = speed_up(seconds), speed_up(seconds, ("dense, fused",))  # the fastest of both layouts
    found = {"seconds": seconds, "called": {**seconds, "dense": 9e-3}, "ratio": ratio, "fused_ratio": fused}
    found |= {"called_ratio": 1.5, "called_fused_ratio": None, "cold": {"compressed": 1e-3}, "cold_ratio": 2.5}
    record["workloads"] = {"N": {**found, "paper_ratio": 1.31}}
    (empty_results / "balanced-cpu.json").write_text(json.dumps(record))
    below = "| C | N, channels last | {} | 1,000 | 84.1 |  |  | 42.0 |  |  |  |"
    first = "| C | N | warm | 2,000 | 1,700 | 1,500 | 1,000 | 750 | 23.79× | 2.00× | 1.31× |"
    cold = "| C | N | cold |  |  |  |  | 1,000 | 2.50× |  | 1.31× |"
    assert workloads().splitlines()[2:] == [first, below.format("warm"), cold]
    plain = "| C | N | called | 9,000 | 1,700 | 1,500 | 1,000 | 750 | 1.50× |  | 1.31× |"
    assert writer.format_workloads(called).splitlines()[2:] == [plain, below.format("called")]


def test_tables_of_kernels_on_a_gpu(load_script: Any, empty_results: Path) -> None:
    writer, missing = load_script("balanced_page"), load_script("page_helpers").NOT_MEASURED
    assert (writer.format_gpu_kernels(), writer.format_gpu_targets()) == (missing, missing)
    place = {"rows": 8, "columns": 4, "sparsity": 0.5, "batch": 1}
    sides = {"dense": (1.0, ""), "CSR": (0.25, "inaccurate"), "2:4": (None, "failed"), "unstructured": (1.5, "")}
    timings = [
        {
            **place,
            "state": state,
            "side": side,
            "seconds": 4e-6 * factor,
            "speedup": found and found * factor,
            "note": note,
        }
        for state, factor in (("cold", 1), ("warm", 0.5))
        for side, (found, note) in sides.items()
    ]
    targets = [{"target": "what", "asked": 1.5, "reached": reached} for reached in (1.499, 1.5)]
    (empty_results / "kernels-h200.json").write_text(json.dumps({"timings": timings, "targets": targets}))
    line = "| 8×4 | 50 % | 1 | 4.0 / 2.0 | 0.25×! / 0.12×! |  |  | 1.50× / 0.75× |  |  |"
    assert writer.format_gpu_kernels().splitlines()[2:] == [line]
    assert [row.split(" | ")[-1] for row in writer.format_gpu_targets().splitlines()[2:]] == ["missed |", "met |"]


def test_table_of_codes(load_script: Any, empty_results: Path) -> None:
    writer, place = load_script("balanced_page"), {"rows": 8, "columns": 4, "batch": 1, "state": "cold"}
    assert writer.format_quantized() == load_script("page_helpers").NOT_MEASURED
    times = {"dense": 8e-6, "dense int4": 3e-6, "dense int8": None, "balanced int8": 1.25e-6, "balanced int4": 1e-6}
    record = {"device": "G", "timings": [{**place, "side": side, "seconds": s} for side, s in times.items()]}
    (empty_results / "quantized-h200.json").write_text(json.dumps(record))
    line = "| G | 8×4 | 1 | cold | 8.0 | 3.0 |  |  | 1.2 | 1.0 | 8.00× | 3.00× |  |"
    assert writer.format_quantized().splitlines()[2:] == [line]


def test_table_of_unstructured_products(load_script: Any, empty_results: Path) -> None:
    writer, place = (
        load_script("balanced_page"),
        {"rows": 8, "columns": 4, "sparsity": 0.9, "batch": 1, "state": "cold"},
    )
    assert writer.format_unstructured() == load_script("page_helpers").NOT_MEASURED
    times = {"dense": 6e-6, "CSR": 3e-6, "balanced": 1e-6, "unstructured": 1.5e-6, "unstructured, float16": 1.25e-6}
    record = {"device": "C", "timings": [{**place, "side": side, "seconds": s} for side, s in times.items()]}
    record["targets"] = [{"batch": 1, "peer": "CSR", "target": 3.0, "reached": r} for r in (3.0, 2.999)]
    (empty_results / "unstructured-cpu.json").write_text(json.dumps(record))
    line = "| C | 8×4 | 90 % | 1 | cold | 6.0 | 3.0 |  | 1.0 | 1.5 | 1.2 | 4.00× | 2.00× |  |"
    assert writer.format_unstructured().splitlines()[2:] == [line]
    reached = ["| C | 1 | CSR | 3× | 3.00× | met |", "| C | 1 | CSR | 3× | 3.00× | missed |"]
    assert writer.format_unstructured_targets().splitlines()[2:] == reached


def test_table_of_matrices_with_a_structure(load_script: Any, empty_results: Path) -> None:
    writer = load_script("balanced_page")
    place = {"rows": 8, "columns": 4, "sparsity": 0.5, "batch": 1, "state": "warm"}
    times = {"dense": 6e-6, "CSR": 3e-6, "unstructured": 1.5e-6, "blocks 8×8": 1e-6, "2:4": 2e-6}
    record = {"device": "C", "timings": [{**place, "side": side, "seconds": s} for side, s in times.items()]}
    (empty_results / "structured-cpu.json").write_text(json.dumps(record))
    assert writer.format_structured().splitlines()[2:] == [
        "| C | 8×4 | 50 % | 1 | warm | 6.0 | 1.5 |  | 1.0 |  |  | 2.0 |"
    ]


def test_dense_networks_are_also_timed_with_fused_relus(load_script: Any) -> None:
    network = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Conv2d(1, 1, 1), nn.ReLU())
    layers = [
        LayerReport(name, "Conv2d", (1, 1, 1, 1), 0.9, False, "", saved=saved) for name, saved in (("0", 0), ("2", 1))
    ]
    found = load_script("balanced_kernels").fuse_dense(network, Compression(tuple(layers), 1))
    assert [type(m).__name__ for m in found["dense, fused"]] == ["Conv2d", "ReLU", "Conv2dReLU", "ReLU"]
    assert type(network[2]) is nn.Conv2d
    assert load_script("balanced_kernels").fuse_dense(network, Compression((layers[0],), 1)) == {}


def test_statements_about_perplexity_hold(trained_cells: Any) -> None:
    lstm, sensitivity = (
        {(cell["column"], cell["sparsity"]): cell for cell in trained_cells(f"balanced-{name}")}
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
