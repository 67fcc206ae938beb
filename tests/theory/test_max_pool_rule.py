"""Max pooling of two networks: forms go back to the largest entry of a window, with a remainder for the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pomona.theory.certificate.forward import interval_bounds
from pomona.theory.certificate.linear_bounds import linear_bounds
from pomona.theory.certificate.paired_graph import pair_networks
from pomona.theory.certificate.regions import neighbourhoods
from pomona.theory.certificate.steps import DENSE, PRUNED

POOLS = {
    "plain": nn.MaxPool2d(2),
    "padded and overlapping": nn.MaxPool2d(3, 2, 1),
    "dilated": nn.MaxPool2d((2, 3), stride=(1, 2), dilation=(2, 1)),
    "rounded up": nn.MaxPool2d(3, 2, ceil_mode=True),
}


@pytest.mark.parametrize("name", POOLS)
def test_bounds_of_max_pooling_hold(name: str) -> None:
    """Assert soundness of all steps at corners of the box, and that linear forms are never above the intervals."""
    torch.manual_seed(0)
    dense, pruned = (nn.Sequential(nn.Conv2d(2, 3, 3), POOLS[name], nn.Conv2d(3, 2, 2)).double() for _ in range(2))
    graph = pair_networks(dense, pruned, torch.zeros(1, 2, 8, 8, dtype=torch.float64))
    examples = torch.rand(2, 2, 8, 8, dtype=torch.float64)
    for radius in (0.0, 0.01, 0.3):
        inputs = neighbourhoods(examples, radius)
        bounds = linear_bounds(graph, inputs)
        assert (bounds[-1].gap.radius <= interval_bounds(graph, inputs)[-1].gap.radius + 1e-12).all()
        for _ in range(5):
            share = torch.rand_like(inputs.low).round()
            x = inputs.low + share * (inputs.high - inputs.low)
            for k in range(len(examples)):
                for one, other, bound in zip(*(graph.evaluate(s, x[k]) for s in (DENSE, PRUNED)), bounds, strict=True):
                    gap = one - other
                    assert ((gap >= bound.gap.low[k] - 1e-14) & (gap <= bound.gap.high[k] + 1e-14)).all()
                    assert ((other >= bound.pruned.low[k] - 1e-14) & (other <= bound.pruned.high[k] + 1e-14)).all()


def test_max_pooling_is_exact_where_the_largest_entry_is_known() -> None:
    """With one entry of each window far above the others, pooling selects it: the gap is that of a linear network."""
    dense, pruned = (nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 1)).double() for _ in range(2))
    graph = pair_networks(dense, pruned, torch.zeros(1, 1, 4, 4, dtype=torch.float64))
    x = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    x[..., ::2, 1::2] = 1
    gap = linear_bounds(graph, neighbourhoods(x, 0.1))[-1].gap
    removed = (dense[2].weight - pruned[2].weight).detach().abs().sum()
    torch.testing.assert_close(gap.radius.squeeze(), 0.1 * removed)
