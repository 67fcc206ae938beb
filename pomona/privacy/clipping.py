"""Clipping of per-example gradients onto a grid of integers, so that their sum and its noise are exact.

Sums and noise of floating-point numbers leak: the low bits of a sum depend on the data, and not every number can be
the rounded sum of a given number and noise (Mironov, CCS 2012; Haney et al., 2022). Here one unit of the grid is C /
2²¹. The clipped gradient of each example is rounded to integers, the integers are added, and discrete Gaussian noise
is added to them. What is released is a function of these integers.

The integer vector q of an example has a norm of at most 2²¹ units, whatever the rounding errors are. With the factor
s it is q = round(s g), so ‖q‖ ≤ s ‖g‖ (1 + 2⁻²⁴) + √d / 2. The norm of g is summed in float32 over at most 1024
squares, which in any order has a relative error below 2⁻¹⁴, and in float64 over these blocks. The factor s is chosen
such that the bound is 2²¹ with all these errors included. Two margins are included as well: one unit for squares that
underflow, and 2⁻¹⁰ of the norm for the gradients of *other* rows when a row is added.

The assumption about other rows: in a micro-batch of a fixed shape, with deterministic kernels and without TF32
(`fixed_shapes`), the computed gradient of a row depends on the row and the weights, and on its place in the batch and
on the other rows so little that adding a row to a sample changes the sum of the other rows' integers by a norm of at
most 2⁻¹⁰ · 2²¹ units. It was measured as 0 on CPUs and on an H200. A model whose rows mix does not satisfy it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ..errors import require
from ..native import private as native
from .per_example_gradients import Gradients

UNITS = 1 << 21  # of the grid in the clipping norm
NORM_BLOCK = 1024  # squares that are summed in float32
NORM_ERROR = 2.0**-13  # relative: of the norm, of the factor and of their products, together
OTHER_ROWS = 2.0**-10  # of the clipping norm: what the other rows' gradients may change by when a row is added
MAX_ROWS = 512  # whose integers are added in 32 bits: 512 · 2²¹ is half of what they hold
MIN_CLIP, MAX_CLIP = 2.0**-20, 2.0**20  # so that no square of a number that matters underflows
SMOOTHING_VARIANCE = 9  # added to the noise; see `accounting`
MAGIC = 1.5 * 2**23  # added to |x| < 2²² it gives the float32 whose last bits are round(x)
MAGIC_BITS = 0x4B400000
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of which the Triton kernels read gradients


@dataclass(frozen=True)
class GradientGrid:
    """The grid on which clipped gradients of `size` coordinates are added."""

    clip: float  # C
    size: int  # d
    units: int = UNITS  # the norm of an example in these coordinates; less than 2²¹ in a layer that has a part of C

    def __post_init__(self) -> None:
        require(
            MIN_CLIP <= self.clip <= MAX_CLIP,
            f"clip must lie in {MIN_CLIP:.3g} … {MAX_CLIP:.3g} for exact sums, got {self.clip:g}: scale the loss.",
        )
        require(self.norm_limit > 0, f"a gradient of {self.size} coordinates is too long for the grid of private sums.")

    @property
    def norm_limit(self) -> float:
        """Return the largest s ‖g‖ of an example, in units, for which ‖q‖ and all margins are at most `units`."""
        return (self.units * (1 - OTHER_ROWS) - math.sqrt(self.size) / 2 - 1) / (1 + NORM_ERROR)

    def noise_variance(self, sigma: float) -> int:
        """Return the variance of the noise in units², for a noise multiplier σ."""
        return math.ceil((sigma * UNITS) ** 2) + SMOOTHING_VARIANCE

    def add_clipped(self, gradients: list[Tensor], total: Tensor) -> Tensor:
        """Add the clipped gradients of all rows, from parts of shape (rows, n), to the int64 `total` in units.

        An example whose norm is not finite counts as zero. The parts may be overwritten. Returns the squared norms.
        """
        kernels = triton_kernels() if gradients[0].is_cuda and gradients[0].dtype in KERNEL_DTYPES else None
        squares = []
        for parts in zip(*(part.split(MAX_ROWS) for part in gradients), strict=True):
            if kernels is not None:
                parts = [part.contiguous() for part in parts]
                squares.append(kernels.sum_squares(parts))
                kernels.add_rounded_rows(parts, self.scale_rows(squares[-1]), total)
                continue
            floats = [part.float().contiguous() for part in parts]
            squares.append(sum_squares(floats))
            scales = self.scale_rows(squares[-1])
            is_lost = scales == 0
            if is_lost.any():
                for part in floats:
                    part[is_lost] = 0  # NaN · 0 is NaN
            add_rounded_rows(floats, scales, total)
        return torch.cat(squares)

    def scale_rows(self, squares: Tensor) -> Tensor:
        """Return s of each row from its squared norm: min(2²¹ / C, limit / ‖g‖), and 0 where that is not finite."""
        scales = (self.norm_limit / squares.sqrt()).clamp(max=UNITS / self.clip)
        return torch.where(squares.isfinite(), scales, 0.0).float()

    def to_gradient(self, total: Tensor, divisor: float) -> Tensor:
        """Return a sum of units as a float64 gradient, divided by the batch size."""
        return total.double().mul_(self.clip / UNITS / divisor)


def sum_squares(parts: list[Tensor]) -> Tensor:
    """Return the squared norm of each row over all parts in float64, from float32 sums of 1024 squares."""
    squares = torch.zeros(len(parts[0]), dtype=torch.float64, device=parts[0].device)
    if all(native.add_squared_norms(part, squares) for part in parts):
        return squares
    norms = []
    for part in parts:
        whole = part.shape[1] // NORM_BLOCK * NORM_BLOCK
        if whole:
            norms.append(torch.linalg.vector_norm(part[:, :whole].unflatten(1, (-1, NORM_BLOCK)), dim=2))
        if whole < part.shape[1]:
            norms.append(torch.linalg.vector_norm(part[:, whole:], dim=1, keepdim=True))
    return torch.cat(norms, 1).double().square_().sum(1)


def add_rounded_rows(parts: list[Tensor], scales: Tensor, total: Tensor) -> None:
    """Add Σ round(s g) over the rows to `total`; the parts may be overwritten.

    PyTorch adds the bits of the float32 s g + `MAGIC`. Their sum is that of the integers plus a constant, modulo
    2³², and the integers' own sum fits 31 bits.
    """
    places = total.split([part.shape[1] for part in parts])
    if all(native.add_rounded_rows(part, scales, place) for part, place in zip(parts, places, strict=True)):
        return
    bits = [part.mul_(scales[:, None]).add_(MAGIC).view(torch.int32).sum(0, dtype=torch.int32) for part in parts]
    shifted = torch.cat(bits).long().sub_(len(scales) * MAGIC_BITS - (1 << 31))
    total += shifted.bitwise_and_((1 << 32) - 1).sub_(1 << 31)


@cache
def triton_kernels() -> ModuleType | None:
    """Return the module of the Triton kernels, or None where Triton is not installed."""
    try:
        from . import clipping_triton
    except ImportError:
        return None
    return clipping_triton


def flatten(gradients: Gradients) -> Tensor:
    """Return the gradients of all parameters as one flat tensor."""
    return torch.cat([gradient.flatten() for gradient in gradients.values()])
