"""Figures of a stage over its epochs: its best epoch, and how pruning and the mask change."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SPARSITY_TOLERANCE = 1e-4  # epochs this much less sparse than the last one count as equally sparse
TRACKED_FIGURES = ("settled", "delta", "iou")  # keys that a run with `train.track` adds to its summary


def best_epoch(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the best result of a stage and its epoch, given the lines of the stage's epochs in the metrics.

    Epochs at which the model was less sparse than at the end do not count. Nothing is returned unless every epoch was
    evaluated (`train.eval_every = 1`).
    """
    measure = "perplexity" if rows and "perplexity" in rows[-1] else "accuracy"
    if not rows or any(measure not in row for row in rows):
        return {}
    final = [row for row in rows if row["sparsity"] >= rows[-1]["sparsity"] - SPARSITY_TOLERANCE]
    best = (min if measure == "perplexity" else max)(final, key=lambda row: row[measure])
    return {f"{measure}_best": best[measure], "epoch_best": best["epoch"]}


def mean_by_epoch(
    history: Sequence[Mapping[str, Any]], key: str, steps_per_epoch: int, epochs: int
) -> list[float | None]:
    """Return the mean of a figure over the mask updates of each epoch; None for an epoch without updates.

    An update before the first step belongs to the first epoch.
    """
    found: list[list[float]] = [[] for _ in range(epochs)]
    for entry in history:
        found[max(entry["step"] - 1, 0) // steps_per_epoch].append(entry[key])
    return [float(f"{statistics.mean(values):.6g}") if values else None for values in found]
