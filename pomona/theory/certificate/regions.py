"""Regions of inputs that a certificate covers: a ball or a cube, or a neighbourhood of each of many examples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from ...errors import require

ROUNDING = 1e-12  # relative, of a computed norm: an input whose computed norm is the radius counts as inside
SPARSE_START_DENSITY = 0.05  # share of the inputs that is nonzero in every second starting point of a ball


@dataclass(frozen=True)
class Ball:
    """The inputs with ‖x‖₂ ≤ radius."""

    radius: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.radius < math.inf, f"radius must be positive and finite, got {self.radius:g}.")

    def centre(self, shape: tuple[int, ...]) -> tuple[Tensor, float]:
        """Return the middle of the region, and the distance to its farthest point, rounded up."""
        return torch.zeros(1, *shape, dtype=torch.float64), self.radius * (1 + ROUNDING)

    def inputs(self, shape: tuple[int, ...]) -> InputSet:
        """Return the region as a set of inputs around one example, with a leading 1 for the batch."""
        centre, radius = self.centre(shape)
        return neighbourhoods(centre, radius, norm="l2")

    def contains(self, x: Tensor) -> Tensor:
        """Return which examples of a batch lie in the region."""
        return sample_norms(x.double()).flatten() <= self.radius

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
        finite = -math.inf < self.low < self.high < math.inf
        require(finite, f"a cube needs finite low < high, got {self.low:g} and {self.high:g}.")

    def centre(self, shape: tuple[int, ...]) -> tuple[Tensor, float]:
        """Return the middle of the region, and the distance to its farthest point, rounded up."""
        middle = self.low / 2 + self.high / 2
        farthest = max(self.high - middle, middle - self.low)
        distance = farthest * math.sqrt(math.prod(shape)) * (1 + ROUNDING)
        return torch.full((1, *shape), middle, dtype=torch.float64), distance

    def contains(self, x: Tensor) -> Tensor:
        """Return which examples of a batch lie in the region."""
        return ((x.double() >= self.low) & (x.double() <= self.high)).flatten(1).all(1)

    def inputs(self, shape: tuple[int, ...]) -> InputSet:
        """Return the region as a set of inputs around one example, with a leading 1 for the batch."""
        return box_inputs(*(torch.full((1, *shape), end, dtype=torch.float64) for end in (self.low, self.high)))

    def step(self, x: Tensor, gradient: Tensor, size: float) -> Tensor:
        """Return x after a step along the gradient's sign, clamped to the region."""
        return (x + size * (self.high - self.low) * gradient.sign()).clamp(self.low, self.high)

    def sample(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return points drawn uniformly from the region."""
        x = torch.rand(count, *shape, generator=generator, dtype=torch.float64)
        return self.low + (self.high - self.low) * x


Region = Ball | Cube


@dataclass(frozen=True)
class InputSet:
    """For each example the inputs x with low ≤ x ≤ high and ‖x − centre‖₂ ≤ radius.

    Tensors are examples × 1 × shape, the 1 being the batch of the exported graph; `radius` has one number for each
    example, infinite for a box.
    """

    low: Tensor
    high: Tensor
    centre: Tensor
    radius: Tensor

    def __len__(self) -> int:
        return len(self.low)

    def __getitem__(self, rows: slice) -> InputSet:
        return InputSet(self.low[rows], self.high[rows], self.centre[rows], self.radius[rows])


register_dataclass(InputSet)


def neighbourhoods(
    examples: Tensor, radius: float | Tensor, *, norm: str = "linf", low: float | None = None, high: float | None = None
) -> InputSet:
    """Return the inputs within a radius of each example (examples × shape), clipped to [low, high] where given.

    The radius is one number, or one for each example; the norm is "linf", for a box, or "l2", for a ball.
    """
    require(norm in ("linf", "l2"), f"norm must be 'linf' or 'l2', got {norm!r}.")
    centre = examples.detach().double().unsqueeze(1)
    radii = torch.as_tensor(radius, dtype=torch.float64, device=centre.device).expand(len(centre))
    require(bool(((radii >= 0) & radii.isfinite()).all()), f"radius must be finite and not negative, got {radius}.")
    reach = radii.view(-1, *[1] * (centre.ndim - 1))
    # Centre ± radius is rounded outward.
    reach = torch.where(reach > 0, reach + torch.finfo(torch.float64).eps * (centre.abs() + reach), 0.0)
    box = [centre - reach, centre + reach]
    if low is not None or high is not None:
        box = [end.clamp(low, high) for end in box]
    return InputSet(box[0], box[1], centre, radii if norm == "l2" else torch.full_like(radii, math.inf))


def box_inputs(low: Tensor, high: Tensor) -> InputSet:
    """Return the inputs between two tensors, for each example (examples × shape)."""
    require(bool((low <= high).all()), "a box needs low ≤ high.")
    ends = [end.detach().double().unsqueeze(1) for end in (low, high)]
    return InputSet(ends[0], ends[1], (ends[0] + ends[1]) / 2, ends[0].new_full((len(low),), math.inf))


def sample_norms(x: Tensor) -> Tensor:
    """Return the norm of each sample of a batch, shaped to multiply with the batch."""
    return torch.linalg.vector_norm(x.reshape(len(x), -1), dim=1).view(-1, *[1] * (x.ndim - 1))


def normalize_samples(x: Tensor) -> Tensor:
    """Return the batch with each sample divided by its norm; a sample of zeros stays zero."""
    return x / sample_norms(x).clamp(min=torch.finfo(x.dtype).tiny)
