"""Regions of inputs that a certificate covers: a Euclidean ball or a cube."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import require

SPARSE_START_DENSITY = 0.05  # share of the inputs that is nonzero in every second starting point of a ball


@dataclass(frozen=True)
class Ball:
    """The inputs with ‖x‖₂ ≤ radius."""

    radius: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.radius < math.inf, f"radius must be positive and finite, got {self.radius:g}.")

    def centre(self, shape: tuple[int, ...]) -> tuple[Tensor, float]:
        """Return the middle of the region, and the distance to its farthest point."""
        return torch.zeros(1, *shape, dtype=torch.float64), self.radius

    def step(self, x: Tensor, gradient: Tensor, size: float) -> Tensor:
        """Return x after a step along the gradient, projected back into the region."""
        x = x + size * self.radius * normalize_samples(gradient)
        return x * (self.radius / sample_norms(x)).clamp(max=1)

    def sample(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return random points on the sphere, every second one with few nonzero inputs.

        Where all inputs are small, many ReLU units are inactive; sparse points reach the others.
        """
        x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        x[1::2] *= torch.rand(x[1::2].shape, generator=generator) < SPARSE_START_DENSITY
        return self.radius * normalize_samples(x)


@dataclass(frozen=True)
class Cube:
    """The inputs with low ≤ x_i ≤ high."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        require(self.low < self.high, f"a cube needs low < high, got {self.low:g} and {self.high:g}.")

    def centre(self, shape: tuple[int, ...]) -> tuple[Tensor, float]:
        """Return the middle of the region, and the distance to its farthest point."""
        middle = torch.full((1, *shape), (self.low + self.high) / 2, dtype=torch.float64)
        return middle, (self.high - self.low) / 2 * math.sqrt(math.prod(shape))

    def step(self, x: Tensor, gradient: Tensor, size: float) -> Tensor:
        """Return x after a step along the gradient's sign, clamped to the region."""
        return (x + size * (self.high - self.low) * gradient.sign()).clamp(self.low, self.high)

    def sample(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return points drawn uniformly from the region."""
        x = torch.rand(count, *shape, generator=generator, dtype=torch.float64)
        return self.low + (self.high - self.low) * x


Region = Ball | Cube


def sample_norms(x: Tensor) -> Tensor:
    """Return the norm of each sample of a batch, shaped to multiply with the batch."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1).view(-1, *[1] * (x.ndim - 1))


def normalize_samples(x: Tensor) -> Tensor:
    """Return the batch with each sample divided by its norm; a sample of zeros stays zero."""
    return x / sample_norms(x).clamp(min=torch.finfo(x.dtype).tiny)
