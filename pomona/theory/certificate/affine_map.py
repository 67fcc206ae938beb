"""Affine layers of a certified network: linear layers, convolutions, batch norms and scalings, with their norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import spectral
from .paired_value import ROUNDING, euclidean_norm
from .steps import Step, Value, Weight

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
PRODUCTS = ("matmul", "mm", "addmm")
SCALINGS = ("mul", "div")
COEFFICIENT_ERROR = 16 * torch.finfo(torch.float64).eps  # relative, of a scale or a shift with a root in it


@dataclass(frozen=True)
class AffineMap:
    """A map x ↦ product(x, W) + b of one network, where the product is linear in x and in W.

    `norm` bounds ‖product(·, W)‖₂ from W. `terms` is the length of the longest sum in one entry of the result, and
    `reach` bounds the norm of the map with |W| in place of W by reach · ‖W‖, as the margin for rounding needs it.
    `channel_axis` is the axis of W for the channels of the result, or None where a batch norm cannot be folded in.
    Where W and b are rounded themselves, `sizes` are what their errors are relative to, and `same` says where the exact
    ones are equal in both networks.
    """

    weight: Tensor
    bias: Tensor
    product: Callable[[Tensor, Tensor], Tensor]
    norm: Callable[[Tensor], float]
    terms: int
    reach: float = 1.0
    channel_axis: int | None = None
    sizes: tuple[Tensor, Tensor] | None = None
    same: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight) + self.bias

    def __sub__(self, other: AffineMap) -> AffineMap:
        removed = replace(self, weight=self.weight - other.weight, bias=self.bias - other.bias)
        if self.sizes is None or other.sizes is None or self.same is None:
            return removed
        pairs = zip(self.same, self.sizes, other.sizes, strict=True)
        weight, bias = (torch.where(same, 0.0, one + two) for same, one, two in pairs)
        return replace(removed, sizes=(weight, bias))

    def __bool__(self) -> bool:
        """Return whether the map is not zero."""
        return bool(self.weight.any() or self.bias.any())

    def then_scale(self, norm: Coefficients, other: AffineMap) -> AffineMap:
        """Return the map followed by a batch norm; `other` is the map of the other network before it."""
        assert self.channel_axis is not None
        trailing = [1] * max(0, self.weight.ndim - 2)  # the axes of an image
        axes = [1] * self.weight.ndim
        axes[self.channel_axis] = -1
        weight, scaled = self.weight * norm.scale.view(axes), self.bias * norm.scale.view(-1, *trailing)
        sizes = weight.abs(), scaled.abs() + norm.size.view(-1, *trailing)
        same = (
            norm.same.view(axes) & (self.weight == other.weight),
            norm.same.view(-1, *trailing) & (self.bias == other.bias),
        )
        return replace(self, weight=weight, bias=scaled + norm.shift.view(-1, *trailing), sizes=sizes, same=same)

    def norm_bound(self) -> float:
        """Return an upper bound of ‖product(·, W)‖₂."""
        return self.norm(self.weight) + self.weight_error

    @property
    def weight_error(self) -> float:
        """A bound of the norm of what is missing in W by its rounding."""
        return 0.0 if self.sizes is None else self.reach * COEFFICIENT_ERROR * euclidean_norm(self.sizes[0])

    def rounding_bound(self, x: Tensor, result: Tensor) -> float:
        """Return an upper bound of the distance between the computed result and the exact one."""
        eps = torch.finfo(torch.float64).eps
        product = self.reach * euclidean_norm(self.weight) * euclidean_norm(x)
        computed = 4 * (self.terms + 4) * eps * (product + euclidean_norm(self.bias.expand_as(result)))
        if self.sizes is None:
            return computed
        of_bias = COEFFICIENT_ERROR * euclidean_norm(self.sizes[1].expand_as(result))
        return computed + self.weight_error * euclidean_norm(x) + of_bias


@dataclass(frozen=True)
class Coefficients:
    """Scale and shift of each channel of a batch norm in evaluation mode.

    `size` is the sum of the absolute values of the shift's terms, and `same` says which channels are equal in both
    networks.
    """

    scale: Tensor
    shift: Tensor
    size: Tensor
    same: Tensor


def affine_map(step: Step, side: int, shape: torch.Size, padding: Step | None = None) -> AffineMap | None:
    """Return a step on inputs of this shape as a map of one network, or None where it is none with a known norm.

    `padding` is a circular padding that comes before a convolution, and is a part of the map.
    """
    if step.op in (*CONVOLUTIONS, *TRANSPOSED):
        return convolution_map(step, side, shape, padding)
    if step.op == "batch_norm":
        return batch_norm_map(batch_norm_coefficients(step, side), [1] * (len(shape) - 2))
    if step.op in SCALINGS:
        return scaling_map(step, side, shape)
    return matrix_map(step, side, shape)


def matrix_map(step: Step, side: int, shape: torch.Size) -> AffineMap | None:
    """Return a linear layer, or the product of a value with a constant matrix."""
    settings = step.settings
    if step.op == "linear":
        value, weight, bias, right = settings["input"], settings["weight"], settings["bias"], False
    elif step.op in PRODUCTS:
        names = ("mat1", "mat2") if step.op == "addmm" else ("self", "mat2" if step.op == "mm" else "other")
        (value, weight), bias, right = (settings[name] for name in names), None, True
        if step.op == "addmm":
            bias = settings["self"]
            if settings["alpha"] != 1 or settings["beta"] != 1:
                return None
    else:
        return None
    known = isinstance(value, Value) and isinstance(weight, Weight) and weight.dense.ndim == 2
    if not known or not (bias is None or isinstance(bias, Weight)):
        return None
    matrix = weight.of(side).T if right else weight.of(side)
    shift = matrix.new_zeros(()) if bias is None else bias.of(side)
    channel = 0 if len(shape) == 2 and shift.ndim <= 1 else None  # with more axes a batch norm scales another one
    return AffineMap(matrix, shift, torch.nn.functional.linear, spectral.bound, matrix.shape[1], 1.0, channel)


def convolution_map(step: Step, side: int, shape: torch.Size, padding: Step | None) -> AffineMap | None:
    """Return a convolution or a transposed convolution, whose operator is the transpose of a convolution."""
    settings = step.settings
    value, weight, bias = settings["input"], settings["weight"], settings["bias"]
    if not isinstance(value, Value) or not isinstance(weight, Weight) or not (bias is None or isinstance(bias, Weight)):
        return None
    kernel = weight.of(side)
    spatial = kernel.ndim - 2
    if len(shape) != spatial + 2:
        return None
    # All arguments but the first three: an input, a weight and a bias.
    options = step.args[3:]
    keywords = {name: given for name, given in step.kwargs.items() if name not in ("weight", "bias")}

    def product(x: Tensor, w: Tensor) -> Tensor:
        x = x if padding is None else padding.call(side, [x])
        return step.function(x, w, None, *options, **keywords)

    shift = kernel.new_zeros(()) if bias is None else bias.of(side).view(-1, *[1] * spatial)
    taps, groups = math.prod(kernel.shape[2:]), int(settings["groups"])
    transposed = step.op in TRANSPOSED
    image = step.shape if transposed else shape
    turns = math.prod(turns_around(padding, step, kernel, shape)) if padding is not None else 1

    def norm(w: Tensor) -> float:
        if spatial == 3:
            return schur_bound(product, w, shape)
        options: dict[str, Any] = {
            "stride": as_plane(settings["stride"], 1),
            "dilation": as_plane(settings["dilation"], 1),
            "groups": groups,
        }
        plane = (1, image[-1]) if spatial == 1 else (image[-2], image[-1])
        w = w[:, :, None] if spatial == 1 else w
        if padding is None:
            return spectral.conv_bound(w, plane, **options)
        return spectral.conv_bound(w, plane, padding="circular", **options) * math.sqrt(turns)

    terms = kernel[:, 0].numel() if transposed else kernel[0].numel()
    channel = 0 if not transposed else 1 if groups == 1 else None
    return AffineMap(kernel, shift, product, norm, terms, math.sqrt(taps * turns), channel)


def turns_around(padding: Step, step: Step, kernel: Tensor, shape: torch.Size) -> list[int]:
    """Return how often circular padding repeats a pixel in the outputs of a convolution, for each axis.

    A pixel that the padding repeats contributes to more outputs, once for each turn around the image.
    """
    edges = padding.settings["pad"]
    dilation = as_list(step.settings["dilation"], kernel.ndim - 2)
    turns = []
    for axis, (size, taps, spacing) in enumerate(zip(shape[2:], kernel.shape[2:], dilation, strict=True)):
        before, after = edges[len(edges) - 2 * axis - 2 :][:2]
        turns.append(max(1, -(-(size + before + after - spacing * (taps - 1)) // size)))
    return turns


def is_circular_padding(padding: Step, step: Step) -> bool:
    """Return whether a step wraps the image of the convolution that follows it around, and nothing else."""
    if padding.op != "pad" or step.op not in CONVOLUTIONS[:2] or padding.settings["mode"] != "circular":
        return False
    own = step.settings["padding"]
    unpadded = own == "valid" or not (isinstance(own, str) or any(as_list(own, 1)))
    edges = padding.settings["pad"]
    return unpadded and len(edges) == 2 * (len(step.shape) - 2) and min(edges) >= 0


def scaling_map(step: Step, side: int, shape: torch.Size) -> AffineMap | None:
    """Return the product of a value with a constant tensor, or its quotient by one."""
    settings = step.settings
    value, factor = settings["self"], settings["other"]
    if step.op == "mul" and isinstance(factor, Value):
        value, factor = factor, value
    if not isinstance(value, Value) or not isinstance(factor, Weight) or settings.get("rounding_mode") is not None:
        return None
    scale = factor.of(side).double()  # whole numbers and truth values too
    if torch.broadcast_shapes(scale.shape, shape) != shape:
        return None
    zero = scale.new_zeros(())
    if step.op == "mul":
        return diagonal_map(scale, zero)
    same = factor.dense == factor.pruned, torch.ones_like(zero, dtype=torch.bool)
    return replace(diagonal_map(scale.reciprocal(), zero), sizes=(scale.reciprocal().abs(), zero), same=same)


def diagonal_map(scale: Tensor, shift: Tensor) -> AffineMap:
    """Return a map that multiplies each entry."""
    return AffineMap(scale, shift, torch.mul, lambda w: float(w.abs().max()), 1)


def batch_norm_coefficients(step: Step, side: int) -> Coefficients:
    """Return the scale and the shift of a batch norm in evaluation mode."""
    settings = step.settings
    mean, variance = settings["running_mean"].of(side), settings["running_var"].of(side)
    weight, bias = settings["weight"], settings["bias"]
    scale = (variance + settings["eps"]).rsqrt()
    scale = scale if weight is None else scale * weight.of(side)
    moved = -mean * scale
    added = torch.zeros_like(moved) if bias is None else bias.of(side)
    tensors = [w for w in (weight, bias, settings["running_mean"], settings["running_var"]) if w is not None]
    same = torch.stack([w.dense == w.pruned for w in tensors]).all(0)
    return Coefficients(scale, moved + added, moved.abs() + added.abs(), same)


def batch_norm_map(norm: Coefficients, trailing: list[int]) -> AffineMap:
    """Return a batch norm as a map, with dimensions for the axes after the channels."""
    scale, shift, size, same = (part.view(-1, *trailing) for part in (norm.scale, norm.shift, norm.size, norm.same))
    return replace(diagonal_map(scale, shift), sizes=(scale.abs(), size), same=(same, same))


def schur_bound(product: Callable[[Tensor, Tensor], Tensor], weight: Tensor, shape: torch.Size) -> float:
    """Return √(‖A‖₁ ‖A‖_∞) of a linear map x ↦ product(x, W), from the row and column sums of |A|."""
    ones = torch.ones(shape, dtype=torch.float64, device=weight.device)
    rows, pull_back = torch.func.vjp(lambda x: product(x, weight.abs()), ones)[:2]
    (columns,) = pull_back(torch.ones_like(rows))
    return math.sqrt(float(rows.max()) * float(columns.max())) * (1 + ROUNDING)


def as_list(numbers: Any, count: int) -> list[int]:
    """Return a setting as a list of one number for each axis."""
    given = [int(n) for n in numbers] if isinstance(numbers, (list, tuple)) else [int(numbers)]
    return given * count if len(given) == 1 else given


def as_plane(numbers: Any, fill: int) -> tuple[int, int]:
    """Return a setting of a convolution along one or two axes as one along two."""
    given = [int(n) for n in numbers] if isinstance(numbers, (list, tuple)) else [int(numbers)]
    return (fill, given[0]) if len(given) == 1 else (given[0], given[1])
