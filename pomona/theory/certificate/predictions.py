"""Certified predictions: the examples whose predicted class provably does not change when a network is pruned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from rich.table import Table
from torch import Tensor, nn

from ...errors import PomonaError, require
from ...table_view import TableView
from .forward import interval_bounds
from .margin_bounds import NetworkPair, bound_margins, class_rows
from .margin_gaps import MarginGaps, margin_gaps
from .prediction_attack import AttackResult, attack_predictions
from .regions import InputSet, Region, neighbourhoods

BATCH = 64  # examples that are bounded at a time


@dataclass(frozen=True)
class CertifiedPredictions(TableView):
    """The result of `certify_predictions`, one entry for each example.

    classes     the class that the dense network predicts at the example
    unchanged   proven: everywhere in the region both networks predict the same class
    robust      proven: everywhere in the region both networks predict `classes`
    margin      a proven lower bound of the smallest margin of that class over another one, in either network
    changed     found by the attack: an input of the region for which the networks predict different classes
    left_class  found by the attack: an input of the region for which one of them predicts another class
    """

    classes: Tensor = field(repr=False)
    unchanged: Tensor = field(repr=False)
    robust: Tensor = field(repr=False)
    margin: Tensor = field(repr=False)
    changed: Tensor = field(repr=False)
    left_class: Tensor = field(repr=False)
    region: str

    @property
    def share(self) -> float:
        """The share of examples whose prediction is proven unchanged."""
        return share_of(self.unchanged)

    @property
    def largest_share(self) -> float:
        """The share of examples that the attack did not change: the true share is at most this."""
        return share_of(~self.changed)

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def summary(self) -> str:
        """The result in a line."""
        return (
            f"{self.share:.1%} of {len(self)} predictions proven unchanged over {self.region}, "
            f"{share_of(self.changed):.1%} changed by an attack"
        )

    def __rich__(self) -> Table:
        table = Table("class", title=self.summary)
        for heading in ("examples", "proven unchanged", "proven robust", "changed by the attack", "undecided"):
            table.add_column(heading, justify="right")
        for label in self.classes.unique().tolist():
            chosen = self.classes == label
            counts = [int((column & chosen).sum()) for column in (self.unchanged, self.robust, self.changed)]
            table.add_row(*map(str, (label, int(chosen.sum()), *counts, int(chosen.sum()) - counts[0] - counts[2])))
        return table


def share_of(rows: Tensor) -> float:
    """Return the share of true entries."""
    return float(rows.double().mean())


def certify_predictions(
    dense: nn.Module,
    pruned: nn.Module | Mapping[str, Tensor],
    x: Tensor,
    *,
    radius: float = 0.0,
    norm: str = "linf",
    low: float | None = None,
    high: float | None = None,
    region: Region | None = None,
    batch: int = BATCH,
    steps: int = 40,
    starts: int = 2,
    seed: int = 0,
) -> CertifiedPredictions:
    """Return for each example whether pruning provably leaves its predicted class, and whether an attack changes it.

    The proof holds in exact arithmetic, with the weights as they are. By default it is about the examples themselves
    (radius 0): both networks are evaluated in float64, and the rounding is bounded. Raise PomonaError for networks that
    cannot be certified.

    Arguments:
        dense: the network before pruning.
        pruned: the network after it, or its state dict.
        x: the examples, one in each row.
        radius: the region around each example: all inputs within this distance.
        norm: of that distance, "linf" or "l2".
        low, high: the range of an input, which the regions are cut to.
        region: one region for all examples, such as `Cube(0, 1)`, in place of those around each. The gap between the
            networks is bounded once over it. An example in it is unchanged where its margin exceeds that bound, so that
            the proof for a new one takes a single evaluation.
        batch: the number of examples that are bounded at a time.
        steps, starts, seed: of the attack; `steps=0` leaves all but the examples themselves out.
    """
    require(len(x) > 0, "there are no examples to certify: give a tensor with one in each row.")
    pair = NetworkPair.of(dense, pruned, x[0])
    if region is not None:
        require(radius == 0, f"radius={radius:g} and region= both choose the inputs: give one of them.")
        return certify_over_region(pair, x, region)
    inputs = neighbourhoods(x, radius, norm=norm, low=low, high=high)
    require_examples_inside(x, low, high)
    where = f"the {norm} radius {radius:g}" if radius else "the examples themselves"
    return certify_pair(pair, inputs, where, batch=batch, steps=steps, starts=starts, seed=seed)


def certify_pair(
    pair: NetworkPair,
    inputs: InputSet,
    where: str,
    *,
    batch: int = BATCH,
    steps: int = 0,
    starts: int = 2,
    seed: int = 0,
) -> CertifiedPredictions:
    """Return the certified predictions of a pair of networks over the inputs around each example."""
    classes = predict(pair.dense, inputs.centre[:, 0])
    attack = attack_predictions(pair.dense, pair.pruned, inputs, classes, steps=steps, starts=starts, seed=seed)
    margin = torch.cat(
        [smallest_margins(pair, inputs[i : i + batch], classes[i : i + batch]) for i in range(0, len(inputs), batch)]
    )
    robust = margin > 0
    unchanged = robust | pair.is_equal
    return checked(CertifiedPredictions(classes, unchanged, robust, margin, attack.changed, attack.left_class, where))


@torch.no_grad()
def smallest_margins(pair: NetworkPair, inputs: InputSet, classes: Tensor) -> Tensor:
    """Return a lower bound of each example's smallest margin over its region, in either network."""
    bounds = bound_margins(pair, inputs, class_rows(classes, pair.classes))
    return torch.minimum(bounds.dense, bounds.pruned).amin(1)


def checked(found: CertifiedPredictions) -> CertifiedPredictions:
    """Return a result, or raise PomonaError where the attack refutes its proof."""
    wrong = (found.unchanged & found.changed) | (found.robust & found.left_class)
    if bool(wrong.any()):
        raise PomonaError(
            f"the prediction of example {int(wrong.nonzero()[0])} is proven, and yet the attack changes it: a rule of "
            "the certificate is wrong; please report this network."
        )
    return found


@torch.no_grad()
def predict(model: nn.Module, x: Tensor) -> Tensor:
    """Return the class with the largest output for each example, the first of several."""
    return model(x).flatten(1).argmax(1)


def require_examples_inside(x: Tensor, low: float | None, high: float | None) -> None:
    """Raise PomonaError where an example is outside of the range of an input."""
    least, most = float(x.min()), float(x.max())
    require(
        (low is None or least >= low) and (high is None or most <= high),
        f"the examples have inputs from {least:g} to {most:g}, outside of low={low} to high={high}: widen the range.",
    )


# ---- one region for all examples


def certify_over_region(pair: NetworkPair, x: Tensor, region: Region) -> CertifiedPredictions:
    """Return the certified predictions of examples from the gap of the networks over one region that contains them."""
    require_inside(x, region)
    points = neighbourhoods(x, 0.0)
    classes = predict(pair.dense, points.centre[:, 0])
    found: AttackResult = attack_predictions(pair.dense, pair.pruned, points, classes, steps=0)
    gaps = margin_gaps(pair, region)
    margin = torch.cat([margins_by_gaps(pair, points[i : i + BATCH], gaps) for i in range(0, len(points), BATCH)])
    unchanged = margin > 0
    return checked(
        CertifiedPredictions(classes, unchanged, unchanged, margin, found.changed, found.left_class, repr(region))
    )


@torch.no_grad()
def margins_by_gaps(pair: NetworkPair, points: InputSet, gaps: MarginGaps) -> Tensor:
    """Return a lower bound of the margins at some points in one network, from those of the other and the gaps."""
    output = interval_bounds(pair.graph, points)[-1]
    sides = []
    for of, side in (("dense", output.dense), ("pruned", output.pruned)):
        outputs = side.map(lambda end: end.flatten(1))
        sides.append(gaps.smallest_margins(outputs, outputs.centre.argmax(1), of))
    return torch.maximum(*sides)


def require_inside(x: Tensor, region: Region) -> None:
    """Raise PomonaError where an example is outside of a region."""
    outside = ~region.contains(x)
    require(
        not bool(outside.any()),
        f"{int(outside.sum())} of {len(x)} examples lie outside of {region}, where nothing is proven: "
        "choose a region that contains them.",
    )


# ---- the largest radius


def largest_radius(
    dense: nn.Module,
    pruned: nn.Module | Mapping[str, Tensor],
    x: Tensor,
    *,
    norm: str = "linf",
    low: float | None = None,
    high: float | None = None,
    limit: float = 1.0,
    halvings: int = 8,
    batch: int = BATCH,
) -> Tensor:
    """Return for each example the largest radius found, up to `limit`, at which its prediction is proven unchanged.

    The radius is found by bisection, to limit · 2^−halvings. It is NaN where not even the example itself is proven.
    """
    require(limit > 0, f"limit must be positive, got {limit:g}.")
    pair = NetworkPair.of(dense, pruned, x[0])
    require_examples_inside(x, low, high)

    def proven(radii: Tensor | float) -> Tensor:
        return certify_pair(pair, neighbourhoods(x, radii, norm=norm, low=low, high=high), "", batch=batch).unchanged

    valid, reaches_limit = proven(0.0), proven(limit)
    least, most = torch.zeros_like(valid, dtype=torch.float64), torch.full_like(valid, limit, dtype=torch.float64)
    for _ in range(halvings):
        middle = (least + most) / 2
        held = proven(middle)
        least, most = torch.where(held, middle, least), torch.where(held, most, middle)
    return torch.where(valid, torch.where(reaches_limit, limit, least), torch.nan)
