"""The ways to store the weights of a layer that "sparse or fewer bits?" compares: their bytes, and what they change.

A form is a layout, dense, balanced or unstructured, and a type of values. Codes of 8 bits share a float32 scale in a
row. Codes of 4 bits share one among about 32 stored values. Weights are rounded to the nearest code after training,
without calibration. Dense bytes are those of ONNX Runtime's `MatMulNBits`; sparse ones those of our packed formats. No
format of ours has codes in an unstructured layout: its bytes are the positions of `UnstructuredTensor`, plus codes and
scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pomona as pm
from pomona.core.targets import Target
from pomona.sparse import BalancedTensor, QuantizedBalancedTensor, UnstructuredTensor

BLOCK = 32  # columns of a balanced block
VALUES = ("fp32", "fp16", "int8", "int4")
VALUE_BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5}
LEVELS = {"int8": 127, "int4": 7}
SCALE_VALUES = 32  # stored values that share a scale at 4 bits
SCALE_BYTES = 4


@dataclass(frozen=True)
class Layout:
    """Where the weights of a network are zero."""

    name: str  # dense, balanced or unstructured
    sparsity: float = 0.0

    @property
    def kept(self) -> int:
        """The weights of a balanced block that are kept."""
        return BLOCK - round(self.sparsity * BLOCK)

    @property
    def group(self) -> int:
        """The columns whose stored values share a scale at 4 bits: whole blocks with about 32 of these values."""
        return max(1, round(SCALE_VALUES / self.kept)) * BLOCK


LAYOUTS = (
    Layout("dense"),
    *(Layout("balanced", sparsity) for sparsity in (0.5, 0.75, 0.90625)),
    *(Layout("unstructured", sparsity) for sparsity in (0.5, 0.75, 0.90625)),
)


def prune_matrix(matrix: Tensor, layout: Layout) -> Tensor:
    """Return a matrix without its smallest weights, to a layout."""
    if layout.name == "dense":
        return matrix
    pattern = pm.Balanced(BLOCK, pad=True) if layout.name == "balanced" else pm.Unstructured()
    return torch.where(pattern.select_masks([matrix.abs()], layout.sparsity)[0], matrix, 0)


def pack_balanced(matrix: Tensor, layout: Layout, values: str, activations: str | None = None) -> BalancedTensor:
    """Return a matrix in the balanced format with values of a type; products round activations where asked."""
    if values in LEVELS:
        group = layout.group if values == "int4" else None
        return QuantizedBalancedTensor.from_dense(matrix, BLOCK, values, group, activations)
    return BalancedTensor.from_dense(matrix.half() if values == "fp16" else matrix, BLOCK)


def round_to_codes(matrix: Tensor, values: str) -> tuple[Tensor, int]:
    """Return the nonzeros of a matrix rounded to codes, and the number of scales.

    A scale is for a row at 8 bits, and at 4 bits for 32 nonzeros of a row that follow each other.
    """
    rows = len(matrix)
    place = (matrix != 0).cumsum(1).sub(1).clamp(min=0)
    group = place // SCALE_VALUES if values == "int4" else torch.zeros_like(place)
    groups = int(group.max()) + 1
    largest = matrix.new_zeros(rows, groups).scatter_reduce_(1, group, matrix.abs(), "amax")
    scales = (largest / LEVELS[values]).gather(1, group)
    codes = (matrix / torch.where(scales > 0, scales, 1)).round()
    return codes * scales, int((largest > 0).sum())


def store_matrix(matrix: Tensor, layout: Layout, values: str) -> tuple[Tensor, float]:
    """Return a matrix as a form restores it, and the bytes that the form takes."""
    if layout.name == "balanced":
        packed = pack_balanced(matrix, layout, values)
        return packed.dense().float(), packed.nbytes
    if values in LEVELS:
        restored, scales = round_to_codes(matrix, values)
    else:
        restored, scales = (matrix.half().float() if values == "fp16" else matrix), 0
    stored, positions = matrix.numel(), 0
    if layout.name == "unstructured":
        packed_matrix = UnstructuredTensor.from_dense(matrix)
        stored, positions = packed_matrix.values.numel(), packed_matrix.nbytes - packed_matrix.values.nbytes
    return restored, stored * VALUE_BYTES[values] + scales * SCALE_BYTES + positions


@contextmanager
@torch.no_grad()
def stored_weights(targets: list[Target], layout: Layout, values: str) -> Iterator[float]:
    """Replace the weights of a network by what a form restores, yield the bytes of all, and put the weights back."""
    before = [target.parameter.detach().clone() for target in targets]
    total = 0.0
    for target, weight in zip(targets, before, strict=True):
        first = weight.movedim(target.output_dim, 0)
        restored, nbytes = store_matrix(first.flatten(1).contiguous(), layout, values)
        target.parameter.copy_(restored.view(first.shape).movedim(0, target.output_dim))
        total += nbytes
    try:
        yield total
    finally:
        for target, weight in zip(targets, before, strict=True):
            target.parameter.copy_(weight)


def round_vectors(x: Tensor, whole: bool) -> Tensor:
    """Return x rounded to 8 bits with one scale for each vector, its last dimension, or for each `whole` sample."""
    dims = tuple(range(1, x.ndim)) if whole else (-1,)
    scale = x.abs().amax(dims, keepdim=True) / LEVELS["int8"]
    return (x / torch.where(scale > 0, scale, 1)).round() * scale


@contextmanager
def rounded_inputs(targets: list[Target]) -> Iterator[None]:
    """Round the inputs of the layers to 8 bits in the block, with a scale for each vector or image."""

    def round_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (round_vectors(inputs[0], isinstance(module, nn.Conv2d)), *inputs[1:])

    hooks = [target.module.register_forward_pre_hook(round_input) for target in targets]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
