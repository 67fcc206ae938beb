"""Lipschitz constants of activations and pooling, and the refusal of operations without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pomona.errors import PomonaError
from pomona.theory.certificate import certify
from pomona.theory.certificate.lipschitz import module_lipschitz


def spectral_norm(matrix: Tensor) -> float:
    """Return ‖W‖₂ by a singular value decomposition."""
    return float(torch.linalg.matrix_norm(matrix.double(), 2))


def lipschitz(module: nn.Module, shape: tuple[int, ...] = (1, 1)) -> float:
    """Return the Lipschitz constant that the certificate uses for a module."""
    return module_lipschitz(module, None, torch.Size(shape))


@pytest.mark.parametrize(
    "module",
    [
        nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.1), nn.LeakyReLU(-3.0), nn.ELU(0.5), nn.ELU(2.0), nn.SELU(), nn.CELU(2.0),
        nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Hardsigmoid(), nn.Sigmoid(), nn.Tanh(),
        nn.Softplus(), nn.Softsign(), nn.LogSigmoid(), nn.Hardtanh(),
    ],
    ids=str,
)  # fmt: skip
def test_lipschitz_constant_of_activations_is_the_largest_slope(module: nn.Module) -> None:
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    steepest = float((module(x).diff() / x.diff()).abs().max())
    assert 0.98 * lipschitz(module) <= steepest <= lipschitz(module) * (1 + 1e-9)


@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2), nn.MaxPool2d(3, 1), nn.MaxPool2d(3, 2, padding=1), nn.MaxPool2d((2, 3), (1, 2), dilation=(2, 1)),
     nn.AdaptiveMaxPool2d(5), nn.AdaptiveMaxPool2d((7, 3))],
    ids=str,
)  # fmt: skip
def test_lipschitz_constant_of_max_pooling_is_reached_by_one_pixel(pool: nn.Module) -> None:
    """One pixel of an image of zeros: the norm grows by the root of the number of windows that contain it."""
    pixels = torch.eye(49, dtype=torch.float64).view(49, 1, 7, 7)
    assert lipschitz(pool, (1, 1, 7, 7)) == pytest.approx(float(pool(pixels).flatten(1).norm(dim=1).max()))


@pytest.mark.parametrize(
    "pool",
    [nn.AvgPool2d(7), nn.AvgPool2d(2), nn.AvgPool2d(3, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False),
     nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(3)],
    ids=str,
)  # fmt: skip
def test_lipschitz_constant_of_average_pooling_bounds_the_exact_norm(pool: nn.Module) -> None:
    matrix = pool(torch.eye(49, dtype=torch.float64).view(49, 1, 7, 7)).flatten(1).T
    assert spectral_norm(matrix) <= lipschitz(pool, (1, 1, 7, 7)) * (1 + 1e-12) <= 1.4 * spectral_norm(matrix)


class ValueDependentBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class ProductOfValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)), "cannot bound GroupNorm at '_0_1'"),
        (nn.Sequential(nn.LayerNorm((4, 7, 7))), "cannot bound LayerNorm"),
        (ValueDependentBranch(), "cannot be traced"),
        (TwoOutputs(), "one output, a tensor"),
        (ProductOfValues(), "cannot bound mul"),
        (nn.BatchNorm2d(4, track_running_stats=False), "without running statistics"),
    ],
)
def test_unsupported_operations_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(PomonaError, match=message):
        certify(model, model, (4, 7, 7))
