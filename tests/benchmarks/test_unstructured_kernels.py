"""The measurement of unstructured products: all sides of a small matrix, and the targets."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest


def test_all_sides_of_a_small_matrix(load_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("unstructured_kernels")
    monkeypatch.setattr(script, "FLUSH_BYTES", 1 << 20)
    found = script.measure_all([(40, 64)], [0.9], [1, 5], None, 0.0)
    sides = ["dense", "CSR", "balanced", "unstructured", "unstructured, float16"]
    cases = [(batch, state, side) for batch, state in product((1, 5), ("warm", "cold")) for side in sides]
    assert [(row["batch"], row["state"], row["side"]) for row in found["timings"]] == cases
    assert all(0 < row["fastest"] <= row["seconds"] for row in found["timings"])
    assert all(row["error"] < 1e-5 for row in found["timings"])
    assert found["targets"] == []  # they are about larger matrices


def test_matrices_with_a_structure(load_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("unstructured_kernels")
    monkeypatch.setattr(script, "FLUSH_BYTES", 1 << 20)
    found = script.measure_all([(32, 64)], [0.5, 0.75], [3], None, 0.0, structured=True)["timings"]
    blocks = ["blocks 4×4", "blocks 8×8", "blocks 16×16", "blocks 1×16"]
    sides = {sparsity: [r["side"] for r in found if r["sparsity"] == sparsity] for sparsity in (0.5, 0.75)}
    assert sides[0.5][5:10] == [*blocks, "2:4"]
    assert sides[0.75][5:9] == blocks
    assert all(row["error"] < 1e-5 for row in found)
    sizes = {row["side"]: row["nbytes"] for row in found if row["sparsity"] == 0.75}
    assert sizes["blocks 8×8"] == 32 * 64 * 4 // 4 + 8 * 4 + 5 * 4  # values, a column for each block, and starts


def test_targets(load_script: Any) -> None:
    script = load_script("unstructured_kernels")
    times = {(1, "CSR"): 6.0, (1, "unstructured"): 2.0, (64, "CSR"): 3.0, (64, "unstructured"): 2.0}
    timings = [
        script.Timing(4096, 4096, 0.9, batch, "warm", side, seconds, seconds / 2, None, 0.0)
        for (batch, side), seconds in times.items()
    ]
    answers = script.compare_with_targets(timings)
    assert [(one["batch"], one["peer"], one["target"], one["reached"]) for one in answers] == [
        (1, "CSR", 3.0, 3.0),
        (64, "CSR", 2.0, 1.5),
    ]
