"""What runs tell about their masks: when entries settle, what pruning costs, and which layers it empties.

Figures 4, 7 and 14 of Lin et al. (2020) show them as curves (`CURVES`); tables print one number of each
(`describe_masks`). All but the sparsity of layers are recorded by runs with `train.track = true`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Summary = Mapping[str, Any]
Curve = list[float | None]

SETTLED_SHARE = 0.95  # of the mask entries, which the paper names too: "only 5% of the mask elements were changing"


@dataclass(frozen=True)
class CurveKind:
    """A kind of curve that each run has: its values from the first x on, and the labels of its chart."""

    values: Callable[[Summary], Curve]
    first_x: int
    x_label: str
    y_label: str
    title: str


def changing_entries(summary: Summary) -> Curve:
    """Return the percentage of mask entries that still change after epoch 0, 1, 2, … (Figure 4)."""
    return [100 * (1 - share) for share in summary.get("settled", ())]


def layer_sparsities(summary: Summary) -> Curve:
    """Return the percentage of weights pruned in each layer, from the input to the output (Figure 14)."""
    return [100 * sparsity for sparsity in summary["stages"][-1].get("layers", {}).values()]


CURVES = {
    "changing": CurveKind(
        changing_entries, 0, "epoch", "mask entries that still change, %", "Mask entries that change after an epoch"
    ),
    "delta": CurveKind(
        lambda summary: list(summary.get("delta", ())),
        1,
        "epoch",
        "δ = ‖w − w̃‖² / ‖w‖²",
        "What pruning takes from the weights",
    ),
    "iou": CurveKind(
        lambda summary: list(summary.get("iou", ())),
        1,
        "epoch",
        "IoU of consecutive masks",
        "How alike two consecutive masks are",
    ),
    "layers": CurveKind(
        layer_sparsities,
        1,
        "layer, from the input to the output",
        "sparsity of the layer, %",
        "Where the pruned weights are",
    ),
}


def mean_curve(kind: str, summaries: Sequence[Summary]) -> Curve:
    """Return the mean over runs of a kind of curve, of those that have it; None where one of them has no value."""
    curves = [curve for summary in summaries if (curve := CURVES[kind].values(summary))]
    return [None if None in values else statistics.mean(values) for values in zip(*curves, strict=True)]


def describe_masks(summaries: Sequence[Summary]) -> dict[str, float | None]:
    """Return one number for each kind of curve, with None for what is not recorded.

    They are the first epoch after which 5 % of the mask entries or fewer change, the last known δ and IoU, and the
    number of layers without any weight.
    """
    changing, delta, iou, layers = (mean_curve(kind, summaries) for kind in ("changing", "delta", "iou", "layers"))
    few = (epoch for epoch, share in enumerate(changing) if share is not None and share <= 100 * (1 - SETTLED_SHARE))
    empty = [sum(sparsity == 100 for sparsity in layer_sparsities(summary)) for summary in summaries]
    return {
        "settled_epoch": next(few, None),
        "delta": last_known(delta),
        "iou": last_known(iou),
        "empty_layers": statistics.mean(empty) if layers else None,
    }


def last_known(curve: Curve) -> float | None:
    """Return the last value of a curve that is known."""
    return next(itertools.dropwhile(lambda value: value is None, reversed(curve)), None)
