"""The measurement of products on a GPU, tried out on a small matrix on the CPU, and its targets."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest


def test_all_sides_of_a_small_matrix(load_script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("gpu_kernels")
    found = script.measure_all([(40, 64)], [0.9], [1, 5], ["warm"], 0.0, "cpu")
    sides = ["dense", "CSR", "balanced", "unstructured", "2:4"]
    cases = [(batch, side) for batch, side in product((1, 5), sides)]
    assert [(row["batch"], row["side"]) for row in found["timings"]] == cases
    assert all(row["error"] < 1e-5 for row in found["timings"] if row["side"] != "2:4")
    assert {row["note"] for row in found["timings"] if row["side"] == "2:4"} == {"needs a GPU"}
    assert found["targets"] == []  # they are about larger matrices
    assert capsys.readouterr().out.count("40x64") == 2


def test_targets(load_script: Any) -> None:
    script = load_script("gpu_kernels")
    timings = [
        script.Timing(8192, 8192, sparsity, 1, "cold", "unstructured", 1e-5, 2.0, 1, 0.0)
        for sparsity in (0.5, 0.9, 0.95)
    ]
    answers = script.compare_with_targets(timings)
    assert answers == [
        {"sparsity": 0.5, "target": 1.5, "reached": 2.0},
        {"sparsity": 0.9, "target": 4.5, "reached": 2.0},
    ]
