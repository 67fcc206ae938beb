"""Masks of attention: an entry is hidden only where it is hidden in both networks."""

from __future__ import annotations

import math

import pytest
import torch
from rule_checks import assert_inside, make_step, value
from torch import Tensor, nn

from pomona.errors import PomonaError
from pomona.theory.certificate import Cube, certify
from pomona.theory.certificate.domains import bound_by_intervals
from pomona.theory.certificate.intervals import Interval, PairBounds
from pomona.theory.certificate.paired_graph import pair_networks
from pomona.theory.certificate.rules import rule_of

ATEN = torch.ops.aten


class Filled(nn.Module):
    """A softmax whose last entry is replaced by a weight."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = nn.Parameter(torch.tensor(fill))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.where(torch.arange(3) < 2, x, self.fill), -1)


class Shifted(nn.Module):
    """A softmax of scores plus a weight."""

    def __init__(self, *shift: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(shift))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x + self.shift, -1)


@pytest.mark.parametrize(
    ("dense", "pruned"),
    [
        (Filled(-math.inf), Filled(0.0)),  # certified 0 and found 0.9: the dense network's mask counted for both
        (Filled(0.0), Filled(-1e38)),
        (Shifted(0.0, 0.0, -math.inf), Shifted(0.0, 0.0, 0.0)),
        (Shifted(0.0, 0.0, 0.0), Shifted(0.0, 0.0, -math.inf)),
    ],
    ids=["fill of the dense network", "fill of the pruned network", "dense shift", "pruned shift"],
)
def test_masks_of_one_network_are_refused(dense: nn.Module, pruned: nn.Module) -> None:
    with pytest.raises(PomonaError, match="different masks at 'softmax"):
        certify(dense, pruned.state_dict(), (3,), region=Cube(0, 1))


def test_a_fill_that_hides_in_both_networks_is_a_mask() -> None:
    found = certify(Filled(-1e38), Filled(-math.inf), (3,), region=Cube(0, 1), steps=5)
    assert found.found <= found.error <= 1e-12


def test_a_mask_may_have_more_rows_than_the_scores() -> None:
    class Rows(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(scale))
            self.register_buffer("keep", torch.ones(3, 3, dtype=torch.bool).tril())

        def forward(self, x: Tensor) -> Tensor:
            scores = (self.scale * x).unsqueeze(1)
            return torch.softmax(torch.where(self.keep, scores, -1e38), -1).flatten(1)

    graph = pair_networks(Rows(1.0), Rows(0.9), torch.zeros(1, 3))
    assert bound_by_intervals(graph, Cube(0, 1)).error >= 0.1


@pytest.mark.parametrize("op", ["softmax", "_log_softmax"])
@pytest.mark.parametrize("hidden", [0, 1])
def test_an_entry_that_one_network_hides_has_a_gap(op: str, hidden: int) -> None:
    """Softmax gave a gap of zero for a probability that is zero in one network alone."""
    sides = [torch.tensor([[0.5, 1.0, 2.0]]).double() for _ in range(2)]
    sides[hidden][0, 2] = -math.inf
    x = PairBounds(*(Interval(end, end) for end in (*sides, sides[0] - sides[1])))
    function = ATEN.softmax.int if op == "softmax" else ATEN._log_softmax.default
    step = make_step(op, function, [value(0), -1, *([] if op == "softmax" else [False])], (1, 3))
    bounds = rule_of(step).bounds(step, [x])
    results = [torch.softmax(side, -1) if op == "softmax" else torch.log_softmax(side, -1) for side in sides]
    assert_inside((results[0] - results[1])[..., :2], bounds.gap.map(lambda end: end[..., :2]), "gap", 1e-15)
    if op == "softmax":
        assert_inside(results[0] - results[1], bounds.gap, "gap", 1e-15)
