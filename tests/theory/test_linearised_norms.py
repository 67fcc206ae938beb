"""Norms of the linearised network: sound for every layer, exact where nothing is open, and below products of norms."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pomona.theory.certificate import prune_by_magnitude
from pomona.theory.certificate.linear_bounds import linear_bounds
from pomona.theory.certificate.linearised_norms import is_supported, linearised_norms
from pomona.theory.certificate.norm_bounds import norm_bounds
from pomona.theory.certificate.paired_graph import PairedGraph, pair_networks
from pomona.theory.certificate.regions import Ball, Cube, InputSet, Region
from pomona.theory.certificate.steps import DENSE, PRUNED


def perceptron(widths: list[int], seed: int) -> nn.Sequential:
    """Return a network of linear layers and ReLU, as PyTorch initialises it."""
    torch.manual_seed(seed)
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


def assert_sound(graph: PairedGraph, inputs: InputSet, points: torch.Tensor) -> None:
    """Assert that the norm of the output's gap, and the bounds of every step, hold at all points."""
    for known in (None, linear_bounds(graph, inputs)):
        spread, bounds = linearised_norms(graph, inputs, known)
        for x in points.split(1):
            dense, pruned = (graph.evaluate(side, x) for side in (DENSE, PRUNED))
            assert float((dense[-1] - pruned[-1]).norm()) <= spread.gap
            for one, other, bound in zip(dense, pruned, bounds, strict=True):
                assert ((one - other >= bound.gap.low[0]) & (one - other <= bound.gap.high[0])).all()
                assert ((other >= bound.pruned.low[0]) & (other <= bound.pruned.high[0])).all()
                assert ((one >= bound.dense.low[0]) & (one <= bound.dense.high[0])).all()


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(0, 2**20), st.sampled_from([0.01, 1.0, 10.0]))
def test_norms_of_random_perceptrons_hold(widths: list[int], seed: int, radius: float) -> None:
    """Assert soundness on a ball and a cube, at random points of them."""
    model = perceptron(widths, seed)
    graph = pair_networks(model, perceptron(widths, seed + 1), torch.zeros(1, widths[0], dtype=torch.float64))
    regions: tuple[Region, Region] = Ball(radius), Cube(-radius, 2 * radius)
    for region in regions:
        points = region.sample(20, (widths[0],), torch.Generator().manual_seed(seed))
        assert_sound(graph, region.inputs((widths[0],)), points * (1 - 1e-12))


def test_norm_of_linear_layers_is_that_of_their_product() -> None:
    """Without a function between them, two layers have the norm of their product, not the product of their norms."""
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False)).double()
    pruned = copy.deepcopy(model)
    pruned[1].weight.data.zero_()
    graph = pair_networks(model, pruned, torch.zeros(1, 4, dtype=torch.float64))
    spread, _ = linearised_norms(graph, Ball(2.0).inputs((4,)))
    product = float(torch.linalg.matrix_norm((model[1].weight @ model[0].weight).detach(), 2))
    assert spread.gap == pytest.approx(2 * product, rel=1e-6)


def test_deep_networks_are_bounded_more_tightly_than_by_products_of_norms() -> None:
    """At depth 4 and 30 % sparsity, the bound is less than half that of the norms."""
    model = perceptron([16, 32, 32, 32, 4], 0)
    graph = pair_networks(model, prune_by_magnitude(model, 0.3), torch.zeros(1, 16, dtype=torch.float64))
    assert is_supported(graph)
    spread, _ = linearised_norms(graph, Ball(1.0).inputs((16,)))
    assert spread.gap < norm_bounds(graph, Ball(1.0)).output.gap / 2


def test_other_functions_are_not_supported() -> None:
    """Smooth functions and large values are left to other bounds."""
    smooth = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double()
    assert not is_supported(pair_networks(smooth, smooth, torch.zeros(1, 2, dtype=torch.float64)))
    wide = nn.Sequential(nn.Linear(2, 2000)).double()
    assert not is_supported(pair_networks(wide, wide, torch.zeros(1, 2, dtype=torch.float64)))
