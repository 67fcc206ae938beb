"""Interval and linear bounds of two networks: hand-worked cases, random networks, and an exact reference."""

from __future__ import annotations

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exact_maximum import exact_maximum
from hypothesis import given, settings
from hypothesis import strategies as st
from pruned_copies import perturbed_copy
from torch import Tensor, nn

from pomona.errors import PomonaError
from pomona.theory.certificate.forward import interval_bounds
from pomona.theory.certificate.intervals import Interval, PairBounds
from pomona.theory.certificate.linear_bounds import Effort, largest_output, linear_bounds
from pomona.theory.certificate.linear_form import Form
from pomona.theory.certificate.paired_graph import PairedGraph, pair_networks
from pomona.theory.certificate.regions import Ball, Cube, InputSet, box_inputs, neighbourhoods
from pomona.theory.certificate.rules.piecewise import gap_lines
from pomona.theory.certificate.rules.registry import rule_of
from pomona.theory.certificate.rules.relu_pair import find_corners
from pomona.theory.certificate.steps import DENSE, PRUNED, Step

BOUNDS = {"interval": interval_bounds, "linear": linear_bounds}


def draw_points(inputs: InputSet, count: int, draw: torch.Generator) -> Tensor:
    """Return points of each example's inputs, count × examples × 1 × shape; half of them in corners of the box."""
    share = torch.rand(count, *inputs.low.shape, generator=draw, dtype=torch.float64)
    share[::2] = share[::2].round()
    x = inputs.low + (inputs.high - inputs.low) * share
    step = x - inputs.centre
    lengths = step.flatten(2).norm(dim=2).clamp(min=1e-300)
    scale = (inputs.radius * (1 - 1e-12) / lengths).clamp(max=1).view(*lengths.shape, *[1] * (x.ndim - 2))
    return inputs.centre + scale * step


def climb(graph: PairedGraph, inputs: InputSet, x: Tensor, index: int, draw: torch.Generator, steps: int = 5) -> Tensor:
    """Return points after sign-gradient steps that increase a random combination of a step's gap, in the box."""
    direction = torch.randn(graph.steps[index].shape, generator=draw, dtype=torch.float64)
    for _ in range(steps):
        x = x.detach().requires_grad_()
        values = [graph.evaluate(side, x)[index] for side in (DENSE, PRUNED)]
        (gradient,) = torch.autograd.grad(((values[0] - values[1]) * direction).sum(), x)
        x = torch.minimum(
            torch.maximum(x + 0.3 * (inputs.high - inputs.low)[0] * gradient.sign(), inputs.low[0]), inputs.high[0]
        )
    return x.detach()


def assert_holds(graph: PairedGraph, bounds: list[PairBounds], x: Tensor, example: int = 0) -> None:
    """Assert that the values of every step at an input lie in its bounds."""
    sides = [graph.evaluate(side, x) for side in (DENSE, PRUNED)]
    for step, bound, dense, pruned in zip(graph.steps, bounds, *sides, strict=True):
        for value, interval in ((dense, bound.dense), (pruned, bound.pruned), (dense - pruned, bound.gap)):
            slack = 1e-14 * (dense.abs() + pruned.abs())  # of the values themselves, which are rounded
            assert (value >= interval.low[example] - slack).all(), step.name
            assert (value <= interval.high[example] + slack).all(), step.name


def assert_sound(graph: PairedGraph, inputs: InputSet, seed: int = 0, count: int = 8) -> None:
    """Assert that all bounds hold at random points and at those of a gradient attack, for every step."""
    draw = torch.Generator().manual_seed(seed)
    points = draw_points(inputs, count, draw)
    for compute in BOUNDS.values():
        bounds = compute(graph, inputs)
        for point in points:
            for example in range(len(inputs)):
                assert_holds(graph, bounds, point[example], example)
        if bool(inputs.radius[0].isinf()):
            assert_holds(graph, bounds, climb(graph, inputs, points[0, 0], len(graph.steps) - 1, draw))


class Residual(nn.Module):
    """Convolutions, batch norm, a skip connection, pooling, slices, concatenation and scaling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=2)
        self.up, self.last = nn.ConvTranspose2d(4, 3, 2, stride=2), nn.Linear(20, 3)
        self.slope = nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        x = F.relu6(2 * x) - self.slope(self.second(F.leaky_relu(x, 0.2))) / 3
        y = F.max_pool2d(x, 2)
        x = self.up(F.avg_pool2d(x, 2)).mean((2, 3))
        y = torch.cat([y[:, :2].flatten(1), 1 - y[:, 2:].flatten(1).clamp(-1, 0.5)], 1)
        return self.last(torch.cat([y, x.abs(), x[:, :1]], 1))


def sequence() -> nn.Module:
    """Return a network on sequences."""
    return nn.Sequential(nn.Conv1d(2, 3, 3, stride=2), nn.Hardtanh(), nn.Flatten(), nn.Linear(9, 2))


def volume() -> nn.Module:
    """Return a network on volumes."""
    return nn.Sequential(nn.Conv3d(1, 2, 2), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten())


def upsampling() -> nn.Module:
    """Return a network that makes its input longer."""
    return nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(2), nn.Upsample(scale_factor=2))


NETWORKS = {
    "residual": (Residual, (2, 4, 4)),
    "sequence": (sequence, (2, 8)),
    "volume": (volume, (1, 3, 3, 3)),
    "upsampling": (upsampling, (2, 4)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_bounds_of_every_step_hold(name: str, norm: str) -> None:
    """Assert soundness for networks that use every kind of rule."""
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model = build().double().eval()
    graph = pair_networks(model, perturbed_copy(model, 1, 0.3), torch.zeros(1, *shape, dtype=torch.float64))
    for radius in (0.0, 0.05, 1.0):
        x = torch.rand(2, *shape, dtype=torch.float64)
        assert_sound(graph, neighbourhoods(x, radius, norm=norm, low=0.0, high=1.0), count=6)


def perceptron(widths: list[int], seed: int, scale: float = 1.0) -> nn.Sequential:
    """Return a network of linear layers and ReLU."""
    torch.manual_seed(seed)
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=scale)
    return nn.Sequential(*layers[:-1]).double()


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=5),
    st.integers(0, 2**20),
    st.sampled_from([0.0, 1e-3, 0.1, 1.0, 10.0]),
    st.sampled_from(["linf", "l2"]),
    st.floats(0.0, 0.9),
)
def test_bounds_of_random_perceptrons_hold(
    widths: list[int], seed: int, radius: float, norm: str, share: float
) -> None:
    """Assert soundness for random widths, weights, radii and sparsities."""
    model = perceptron(widths, seed)
    x = torch.randn(2, widths[0], dtype=torch.float64)
    graph = pair_networks(model, perturbed_copy(model, seed, share), x[:1])
    assert_sound(graph, neighbourhoods(x, radius, norm=norm), seed)


def numpy_box(inputs: InputSet) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the first example's box."""
    return inputs.low[0].flatten().numpy(), inputs.high[0].flatten().numpy()


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([0.02, 0.3, 1.0]))
def test_linear_bounds_are_above_the_exact_maximum(seed: int, radius: float) -> None:
    """Compare with linear programs over all activation patterns: never below, and not above the intervals."""
    dense = perceptron([2, 3, 2, 1], seed)
    pruned = perturbed_copy(dense, seed, 0.3)
    inputs = neighbourhoods(torch.randn(1, 2, dtype=torch.float64), radius)
    graph = pair_networks(dense, pruned, inputs.centre[0])
    bounds = linear_bounds(graph, inputs)[-1]
    one = np.ones(1)
    box = numpy_box(inputs)
    for sign, end in ((1, bounds.gap.high), (-1, -bounds.gap.low)):
        exact = exact_maximum((dense, pruned), *box, (sign * one, -sign * one))
        assert float(end) >= exact - 1e-7
    assert float(bounds.dense.high) >= exact_maximum((dense, pruned), *box, (one, 0 * one)) - 1e-7
    assert float(-bounds.pruned.low) >= exact_maximum((dense, pruned), *box, (0 * one, -one)) - 1e-7


def test_linear_bounds_are_exact_where_no_neuron_changes_its_sign() -> None:
    """A small box around an input where all neurons keep their sign: both networks are affine, and so is the gap."""
    dense = perceptron([3, 4, 4, 2], 5)
    pruned = perturbed_copy(dense, 5, 0.3)
    inputs = neighbourhoods(torch.tensor([[0.7, -0.2, 1.1]], dtype=torch.float64), 1e-3)
    graph = pair_networks(dense, pruned, inputs.centre[0])
    bounds = linear_bounds(graph, inputs)
    for step, bound in zip(graph.steps, bounds, strict=True):
        if step.op == "linear" and step is not graph.steps[-1]:
            for side in (bound.dense, bound.pruned):
                assert not ((side.low < 0) & (side.high > 0)).any()
    for k in range(2):
        unit = np.eye(2)[k]
        exact = exact_maximum((dense, pruned), *numpy_box(inputs), (unit, -unit))
        assert float(bounds[-1].gap.high[0, 0, k]) == pytest.approx(exact, rel=1e-9, abs=1e-12)


def test_identical_networks_have_no_gap() -> None:
    """Two equal networks are apart by exactly zero."""
    model = perceptron([3, 5, 5, 2], 0)
    inputs = Ball(1.0).inputs((3,))
    graph = pair_networks(model, copy.deepcopy(model), inputs.centre[0])
    for compute in BOUNDS.values():
        gap = compute(graph, inputs)[-1].gap
        assert not gap.low.any()
        assert not gap.high.any()


@functools.cache
def relu_step() -> Step:
    """Return a ReLU as a step of two networks."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU()).double()
    return pair_networks(model, model, torch.zeros(1, 1, dtype=torch.float64)).steps[-1]


def bounds_of(dense: tuple[float, float], pruned: tuple[float, float], gap: tuple[float, float]) -> PairBounds:
    """Return the bounds of one number."""
    return PairBounds(
        *(Interval(*(torch.tensor([end], dtype=torch.float64) for end in ends)) for ends in (dense, pruned, gap))
    )


RELU_CASES = {
    "both active": ((1, 2), (0.5, 1), (0.2, 1.0), (0.2, 1.0)),
    "both inactive": ((-2, -1), (-3, -0.5), (-1, 0.5), (0, 0)),
    "dense active, pruned inactive": ((1, 2), (-2, -1), (2, 3), (1, 2)),
    "dense inactive, pruned active": ((-2, -1), (1, 2), (-3, -2), (-2, -1)),
    "both open, gap positive": ((-1, 2), (-2, 1), (0.5, 1.5), (0, 1.5)),
    "both open, gap negative": ((-2, 1), (-1, 2), (-1.5, -0.5), (-1.5, 0)),
    "both open, gap open": ((-1, 1), (-1, 1), (-0.25, 0.5), (-0.25, 0.5)),
    "dense open, pruned inactive": ((-1, 2), (-3, -1), (0.5, 4), (0, 2)),
    "dense active, pruned open": ((1, 2), (-1, 1.5), (-0.5, 2), (-0.5, 2)),
}


@pytest.mark.parametrize("name", RELU_CASES)
def test_relu_of_two_networks_by_hand(name: str) -> None:
    """Compare the interval of the gap with the one worked out by hand, and planes with a fine grid of both inputs."""
    dense, pruned, gap, expected = RELU_CASES[name]
    relu = relu_step()
    x = bounds_of(dense, pruned, gap)
    after = rule_of(relu).bounds(relu, [x]).gap
    assert (float(after.low), float(after.high)) == pytest.approx(expected, abs=1e-12)
    assert_planes_hold(x)


def assert_planes_hold(x: PairBounds) -> None:
    """Assert that forms on the ReLU of one number are above it on a grid, and touch it in a corner at least."""
    relu = relu_step()
    c, d = (v.flatten() for v in torch.meshgrid(*[torch.linspace(-1, 1, 5, dtype=torch.float64)] * 2, indexing="ij"))
    result = rule_of(relu).substitution(relu, Form(c[:, None], d[:, None]), [x])
    assert result is not None
    a = torch.linspace(float(x.dense.low), float(x.dense.high), 61, dtype=torch.float64)
    b = torch.linspace(float(x.pruned.low), float(x.pruned.high), 61, dtype=torch.float64)
    a, b = (v.flatten() for v in torch.meshgrid(a, b, indexing="ij"))
    allowed = (a - b >= x.gap.low) & (a - b <= x.gap.high)
    a, b = a[allowed], b[allowed]
    true = c[:, None] * (a.relu() - b.relu()) + d[:, None] * b.relu()
    above = result.forms[0].gap * (a - b) + result.forms[0].pruned * b + result.constant[:, None]
    assert (above >= true - 1e-12).all()


@settings(max_examples=60, deadline=None)
@given(*[st.tuples(st.floats(-2, 2), st.floats(0, 2)) for _ in range(2)], st.floats(0, 1), st.floats(0, 1))
def test_relu_planes_hold_on_random_polygons(dense: tuple, pruned: tuple, start: float, width: float) -> None:
    """Assert soundness of the planes for random intervals of both inputs and of their gap."""
    a, b = ((low, low + size) for low, size in (dense, pruned))
    least, most = a[0] - b[1], a[1] - b[0]
    low = least + start * (most - least)
    assert_planes_hold(bounds_of(a, b, (low, low + width * (most - low))))


def test_planes_use_the_pruned_input() -> None:
    """With a gap of exactly 1 and inputs around zero, relu(b + 1) − relu(b) is below a plane that rises with b."""
    x = bounds_of((-3, 5), (-4, 4), (1, 1))
    corners = find_corners(x, torch.relu)
    assert float(corners.constant(torch.zeros(1), torch.tensor([0.125]), 1)) == pytest.approx(1.0)
    assert float(corners.constant(torch.zeros(1), torch.tensor([0.125]), -1)) == pytest.approx(0.125)
    lines = Interval(torch.zeros(1), torch.ones(1))
    gap = gap_lines(x.gap, lines)
    assert float(gap.high_slope * 1 + gap.high_constant) == pytest.approx(1.0)


def test_margins_of_classes_are_rows_of_each_example() -> None:
    """Rows that differ between examples give the same bounds as each example alone; parts give the same as all."""
    dense = perceptron([3, 6, 4], 2)
    pruned = perturbed_copy(dense, 2, 0.3)
    x = torch.randn(3, 3, dtype=torch.float64)
    inputs = neighbourhoods(x, 0.2)
    graph = pair_networks(dense, pruned, inputs.centre[0])
    bounds = linear_bounds(graph, inputs)
    gap, side = (torch.randn(3, 5, 1, 4, dtype=torch.float64) for _ in range(2))
    together = largest_output(graph, inputs, bounds, Form(gap, side))
    parts = largest_output(graph, inputs, bounds, Form(gap, side), Effort(entries=1))
    torch.testing.assert_close(together, parts)
    for k in range(3):
        alone = neighbourhoods(x[k : k + 1], 0.2)
        single = largest_output(graph, alone, linear_bounds(graph, alone), Form(gap[k], side[k]))
        torch.testing.assert_close(together[k : k + 1], single)
    for point in draw_points(inputs, 20, torch.Generator().manual_seed(0)):
        for k in range(3):
            values = [graph.evaluate(s, point[k])[-1] for s in (DENSE, PRUNED)]
            form = (gap[k] * (values[0] - values[1]) + side[k] * values[1]).sum((1, 2))
            assert (form <= together[k] + 1e-12).all()


def test_fewer_refined_neurons_are_sound_and_wider() -> None:
    """With fewer neurons refined the bounds hold, and are not tighter."""
    dense = perceptron([3, 12, 12, 2], 3)
    pruned = perturbed_copy(dense, 3, 0.3)
    inputs = neighbourhoods(torch.randn(2, 3, dtype=torch.float64), 0.3)
    graph = pair_networks(dense, pruned, inputs.centre[0])
    few, all_of_them = (linear_bounds(graph, inputs, Effort(neurons=n)) for n in (2, 4096))
    for point in draw_points(inputs, 20, torch.Generator().manual_seed(0)):
        for k in range(2):
            assert_holds(graph, few, point[k], k)
    assert few[-1].gap.radius.sum() >= all_of_them[-1].gap.radius.sum()


def test_regions_as_sets_of_inputs() -> None:
    """A ball has its radius and box; a cube has infinite radius; examples may each have their own radius."""
    ball, cube = Ball(2.0).inputs((3,)), Cube(-1, 2).inputs((3,))
    assert ball.low.shape == (1, 1, 3)
    assert 2 < float(ball.radius) <= 2 * (1 + 1e-11)  # rounded outward
    assert float(cube.radius) == float("inf")
    assert float(cube.high[0, 0, 0]) == 2
    each = neighbourhoods(torch.full((2, 3), 0.5), torch.tensor([0.1, 0.7]), low=0.0, high=1.0)
    assert float(each.high[0, 0, 0]) == pytest.approx(0.6)
    assert (float(each.low[1, 0, 0]), float(each.high[1, 0, 0])) == (0.0, 1.0)
    with pytest.raises(PomonaError, match="norm must be"):
        neighbourhoods(torch.zeros(1, 3), 0.1, norm="l1")
    with pytest.raises(PomonaError, match="low ≤ high"):
        box_inputs(torch.ones(1, 3), torch.zeros(1, 3))


def test_ball_of_linear_layer_is_exact() -> None:
    """Over a ball, an entry of a linear layer is its row's norm away from the centre; intervals do not know that."""
    model = nn.Sequential(nn.Linear(4, 2)).double()
    pruned = perturbed_copy(model, 0, 0.3)
    inputs = Ball(1.0).inputs((4,))
    graph = pair_networks(model, pruned, inputs.centre[0])
    gap = linear_bounds(graph, inputs)[-1].gap
    removed = model[0].weight - pruned[0].weight
    expected = removed.norm(dim=1) + (model[0].bias - pruned[0].bias)
    torch.testing.assert_close(gap.high.flatten(), expected.detach())


def test_operation_without_rule_is_named() -> None:
    """An unknown operation is refused by its name."""

    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sort(1).values

    graph = pair_networks(Sorted(), Sorted(), torch.zeros(1, 3, dtype=torch.float64))
    with pytest.raises(PomonaError, match="'sort'"):
        interval_bounds(graph, Ball(1.0).inputs((3,)))
