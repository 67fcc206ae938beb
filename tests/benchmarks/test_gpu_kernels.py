"""The measurement of products on a GPU, tried out on a small matrix on the CPU, and its targets."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest


def test_all_sides_of_a_small_matrix(load_script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("gpu_kernels")
    found = script.measure_all([(40, 64), (1, 8)], [0.9], [1, 5], ["warm"], 0.0, "cpu", -1.0)
    assert found["timings"] == []  # the time was up at once
    assert "1x8 at 90% is left out" in capsys.readouterr().out
    found = script.measure_all([(40, 64)], [0.9], [1, 5], ["warm"], 0.0, "cpu", 1e9)
    sides = ["dense", "CSR", "balanced", "unstructured", "compress, balanced", "compress, unstructured", "2:4"]
    cases = [(batch, side) for batch, side in product((1, 5), sides)]
    assert [(row["batch"], row["side"]) for row in found["timings"]] == cases
    assert all(row["error"] < 1e-5 for row in found["timings"] if row["side"] != "2:4")
    assert {row["note"] for row in found["timings"] if row["side"] == "2:4"} == {"needs a GPU"}
    kinds = {row["side"]: row["kind"] for row in found["timings"]}
    assert (kinds["dense"], kinds["balanced"], kinds["unstructured"]) == (None, "balanced", "unstructured")
    assert kinds["compress, balanced"] in (None, "balanced")
    assert found["targets"] == []  # they are about larger matrices and cold caches
    assert capsys.readouterr().out.count("40x64") == 2


def test_targets(load_script: Any) -> None:
    script = load_script("gpu_kernels")
    timings = [
        script.Timing(8192, 8192, sparsity, 1, state, side, "gaps", 1e-5, speedup, 1, 0.0)
        for state, speedup in (("cold", 2.0), ("warm", 0.5))
        for side in ("unstructured", "compress, unstructured")
        for sparsity in (0.5, 0.9, 0.95)
    ]
    answers = script.compare_with_targets(timings)
    assert answers == [
        {"target": "unstructured 8192×8192, 50% zeros, batch 1", "asked": 1.5, "reached": 2.0},
        {"target": "unstructured 8192×8192, 90% zeros, batch 1", "asked": 4.5, "reached": 2.0},
        {"target": "the slowest that compress chose", "asked": 1.0, "reached": 2.0},
    ]
