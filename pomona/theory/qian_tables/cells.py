"""Cells of the tables of Qian & Klabjan (2021), in the layout of `pomona table --json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

PAPER = "Qian & Klabjan, ICML 2021"
PRINT_ROUNDING = 0.0005  # half of the last printed digit

Progress = Callable[[int, int], None]  # called with (done, total)
Cell = dict[str, Any]


def make_cell(
    model: str,
    method: str,
    setting: Mapping[str, Any],
    mean: float,
    std: float | None,
    runs: int,
    paper: float | None,
    paper_std: float | None = None,
    sparsity: float = 0.0,
) -> Cell:
    """Return one table cell with the keys that `pomona table --json` uses."""
    return {
        "model": model,
        "method": method,
        "sparsity": sparsity,
        "setting": dict(setting),
        "mean": mean,
        "std": std,
        "runs": runs,
        "paper": paper,
        "paper_std": paper_std,
    }


def standard_errors_off(cell: Mapping[str, Any], rounding: float = PRINT_ROUNDING) -> float | None:
    """Return the distance between a cell's mean and the printed value, in combined standard errors.

    The part of the distance that rounding in print explains is not counted. The paper used the same number of
    matrices. Where it gives no standard deviation, the measured one stands in for it. Return None for a cell that has
    no standard deviation or no printed value.
    """
    if cell["std"] is None or cell["paper"] is None:
        return None
    error = math.hypot(cell["std"], cell["paper_std"] or cell["std"]) / math.sqrt(cell["runs"])
    return max(0.0, abs(cell["mean"] - cell["paper"]) - rounding) / error
