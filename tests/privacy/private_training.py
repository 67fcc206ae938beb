"""A small private training setup for the tests: budget, network, data, step and reference gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pomona.privacy import Budget, PrivateStep, Source
from pomona.privacy.clipping import UNITS, GradientGrid

ROWS = 40


class UncheckedBudget(Budget):
    """A budget that the accountant does not verify, so that tests can choose any noise."""

    def verify(self) -> None: ...


def make_budget(steps: int = 8, share: float = 0.0, index: float = 0.0, sigma: float = 1.0, batch: int = 20) -> Budget:
    """Return a budget whose numbers need not meet its target."""
    return UncheckedBudget(2.0, 1e-5, ROWS, batch, steps, share, sigma, index, ((steps // 2, 1.0), (steps, 2.0)))


def make_network(seed: int = 0) -> nn.Module:
    """Return a small network with a convolution, a group norm and a linear layer, in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 5)
    ).double()


def make_data(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ROWS random images and labels for `make_network`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 2, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (ROWS,), generator=generator)


class NoiselessSource(Source):
    """A random source whose noise is all zero."""

    def discrete_gaussian(self, count: int, variance: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.device)


def make_step(seed: int = 0, *, budget: Budget | None = None, noiseless: bool = False, lr: float = 1.0, **options):
    """Return a network and its private step, by default of DP-SGD."""
    model = make_network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    source = options.pop("source", None) or (NoiselessSource if noiseless else Source)(seed=3)
    return model, PrivateStep(
        model, optimizer, budget or make_budget(), source=source, **{"method": "dpsgd", **options}
    )


def flat_parameters(model: nn.Module) -> torch.Tensor:
    """Return all parameters of a model as one flat tensor."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients_one_by_one(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the gradients of all rows, (rows, d), by a separate backward pass for each row."""
    rows = []
    for row, target in zip(x, y, strict=True):
        grads = torch.autograd.grad(F.cross_entropy(model(row[None]), target[None]), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def mean_of_clipped(gradients: torch.Tensor, clip: float, batch: int = 20) -> torch.Tensor:
    """Return Σ g min(1, C′ / ‖g‖) / B in float64, where C′ is the clipping norm less the margins of the grid."""
    limit = GradientGrid(clip, gradients.shape[1]).norm_limit * clip / UNITS
    return (gradients * (limit / gradients.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0) / batch


def assert_close_on_grid(found: torch.Tensor, expected: torch.Tensor, clip: float) -> None:
    """Assert that two mean gradients differ by less than a unit of the grid in every coordinate."""
    torch.testing.assert_close(found, expected, rtol=0, atol=clip / UNITS)
