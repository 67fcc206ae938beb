"""Lipschitz constants of activations and pooling, and the refusal of operations without a bound."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pomona.errors import PomonaError
from pomona.theory.certificate import Ball, certify
from pomona.theory.certificate.lipschitz import jump, lipschitz_constant, sum_constants
from pomona.theory.certificate.norm_bounds import norm_bounds
from pomona.theory.certificate.paired_graph import Step, pair_networks


def spectral_norm(matrix: Tensor) -> float:
    """Return ‖W‖₂ by a singular value decomposition."""
    return float(torch.linalg.matrix_norm(matrix.double(), 2))


class Branches(nn.Module):
    """Several modules on the same input, with their outputs side by side."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x).flatten(1) for branch in self.branches], 1)


def steps_of(modules: list[nn.Module], shape: tuple[int, ...]) -> list[Step]:
    """Return the steps of several modules of one operation each, on the same input."""
    model = Branches(modules)
    steps = pair_networks(model, model.state_dict(), torch.zeros(shape)).steps
    return [step for step in steps if step.inputs == [0] and step.op != "view"][: len(modules)]


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.1), nn.LeakyReLU(-3.0), nn.ELU(0.5), nn.ELU(2.0), nn.SELU(), nn.CELU(2.0),
    nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Hardsigmoid(), nn.Sigmoid(), nn.Tanh(),
    nn.Softplus(), nn.Softplus(3.0, 5.0), nn.LogSigmoid(), nn.Hardtanh(), nn.Hardtanh(-0.2, 3.0), nn.PReLU(init=1.7),
]  # fmt: skip


@functools.cache
def activation_steps() -> list[Step]:
    return steps_of(ACTIVATIONS, (1, 3))


@pytest.mark.parametrize("position", range(len(ACTIVATIONS)), ids=[str(module) for module in ACTIVATIONS])
def test_lipschitz_constant_of_activations_is_the_largest_slope(position: int) -> None:
    step, module = activation_steps()[position], ACTIVATIONS[position].double()
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    y = module(x).detach()
    constant, size = lipschitz_constant(step, torch.Size((1, 3))), jump(step)
    assert constant is not None
    changes = y.diff().abs()
    smooth = torch.ones_like(changes, dtype=torch.bool)
    if isinstance(module, nn.Softplus):  # without the pair of points on both sides of the threshold
        smooth = (x[:-1] * module.beta > module.threshold) == (x[1:] * module.beta > module.threshold)
    steepest = float(changes[smooth].max() / (x[1] - x[0]))
    assert 0.98 * constant <= steepest <= constant * (1 + 1e-6)
    # No pair of points is farther apart than the constant and the jump allow.
    assert float(changes.max()) <= (constant * (x[1] - x[0]) + size) * (1 + 1e-6)


def test_jump_of_softplus_at_its_threshold() -> None:
    """Softplus is x above x·beta = threshold, which is a jump of log(1 + e^−threshold) / beta."""
    steps = steps_of([nn.Softplus(2.0, 0.0), nn.Softplus(1.0, 20.0), nn.Softplus(1.0, -3.0)], (1, 3))
    assert [jump(step) for step in steps] == pytest.approx(
        [math.log(2) / 2, math.log1p(math.exp(-20)), math.log1p(math.exp(3))]
    )


def test_softsign_has_the_slope_of_its_formula() -> None:
    graph = pair_networks(nn.Softsign(), {}, torch.zeros(1, 4))
    assert norm_bounds(graph, Ball(0.5)).output.dense_spread == pytest.approx(0.5)


MAX_POOLS = [
    nn.MaxPool2d(2), nn.MaxPool2d(3, 1), nn.MaxPool2d(3, 2, padding=1), nn.MaxPool2d((2, 3), (1, 2), dilation=(2, 1)),
    nn.AdaptiveMaxPool2d(5), nn.AdaptiveMaxPool2d((7, 3)),
]  # fmt: skip


def test_lipschitz_constant_of_max_pooling_is_reached_by_one_pixel() -> None:
    """One pixel of an image of zeros: the norm grows by the root of the number of windows that contain it."""
    pixels = torch.eye(49, dtype=torch.float64).view(49, 1, 7, 7)
    for pool, step in zip(MAX_POOLS, steps_of(MAX_POOLS, (1, 1, 7, 7)), strict=True):
        expected = float(pool(pixels).flatten(1).norm(dim=1).max())
        assert lipschitz_constant(step, torch.Size((1, 1, 7, 7))) == pytest.approx(expected), str(pool)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[operator]


SUMS = [
    nn.AvgPool2d(7), nn.AvgPool2d(2), nn.AvgPool2d(3, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(3), Function(lambda x: x.mean(3)), Function(lambda x: x.sum((2, 3))),
    Function(lambda x: x[:, :, (0, 0, 3, 0)]), Function(lambda x: x.repeat(1, 3, 1, 1)), nn.ReflectionPad2d(2),
    nn.CircularPad2d(3), nn.ConstantPad2d(1, 2.0), nn.Upsample(scale_factor=2), Function(lambda x: x.flip(2)),
    Function(lambda x: x.cumsum(2)),
]  # fmt: skip


def test_lipschitz_constants_of_sums_of_entries_bound_the_exact_norm() -> None:
    basis = torch.eye(49, dtype=torch.float64).view(49, 1, 7, 7)
    for module, step in zip(SUMS, steps_of(SUMS, (1, 1, 7, 7)), strict=True):
        at_zero = module(torch.zeros(1, 1, 7, 7, dtype=torch.float64))
        exact = spectral_norm((module(basis) - at_zero).flatten(1).T)
        constants = sum_constants(step, [torch.zeros(1, 1, 7, 7, dtype=torch.float64)])
        assert constants is not None
        assert exact <= constants[1] * (1 + 1e-9) <= 1.6 * exact, step.op
        assert constants[0] == pytest.approx([constants[1]])


# ---- refusals


class ValueDependentBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(1).values


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Sorted(), "no bound for the operation 'sort'"),
        (Function(torch.fft.rfft), "the output has the type"),
        (Function(lambda x: torch.floor(x)), "no bound for the operation 'floor'"),
        (ValueDependentBranch(), "cannot be exported"),
        (TwoOutputs(), "one output, a tensor"),
        (nn.BatchNorm2d(4, track_running_stats=False), "without running statistics"),
        (Function(lambda x: F.dropout(x, 0.5)), "random"),
    ],
    ids=["sort", "fft", "floor", "branch", "two outputs", "batch statistics", "dropout"],
)
def test_unsupported_operations_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(PomonaError, match=message):
        certify(model, model, (4, 7, 7))
