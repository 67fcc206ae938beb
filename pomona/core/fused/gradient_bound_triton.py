"""Triton kernels that bound the gradients of weak outputs, as `BoundedFeedback` defines it, for all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_types import ROW, TRITON_DTYPES

MAX_OUTPUTS = 4096  # of a layer: one program ranks the gradient norms of a layer


def can_bound(counts: Sequence[int]) -> bool:
    """Return whether the kernels can bound the gradients of layers with so many outputs, 0 for unsuitable layouts."""
    return all(0 < count <= MAX_OUTPUTS for count in counts)


class BoundedGradients:
    """A flat buffer for the gradients of all targets, whose outputs are contiguous rows, and the kernels on it."""

    def __init__(
        self,
        gradient: Tensor,
        slots: Sequence[int],  # of each target: its place among the addresses of `bound`
        counts: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self.gradient, device = gradient, gradient.device
        starts, outputs_before = ([0, *accumulate(numbers)][:-1] for numbers in (sizes, counts))
        lengths = [size // count for size, count in zip(sizes, counts, strict=True)]
        columns = torch.tensor([slots, starts, outputs_before, counts, lengths], dtype=torch.int64).to(device)
        self.slots, self.starts, self.outputs_before, self.counts, self.lengths = columns  # of each target
        self.targets = torch.arange(len(sizes)).repeat_interleave(torch.tensor(counts)).to(device)  # of each output
        self.norms = torch.empty(2, sum(counts), dtype=torch.float32, device=device)  # of weights, of gradients
        self.factors = torch.empty(sum(counts), dtype=torch.float32, device=device)
        self.ranked = triton.next_power_of_2(max(counts))

    def bound(self, addresses: Tensor, feedback: float, weak: float) -> None:
        """Multiply the gradients of weak outputs in the buffer; `addresses` are those of the projected weights."""
        dtype, outputs = TRITON_DTYPES[self.gradient.dtype], len(self.targets)
        table = self.targets, self.starts, self.outputs_before, self.lengths
        with torch.cuda.device_of(self.gradient):
            _measure_norms[(outputs,)](
                addresses, self.slots, self.gradient, self.norms, *table, outputs, DTYPE=dtype, ROW=ROW
            )
            _compute_factors[(len(self.counts),)](
                self.norms, self.factors, self.outputs_before, self.counts, outputs, feedback, weak, RANKED=self.ranked
            )
            _scale[(outputs,)](self.gradient, self.factors, *table, DTYPE=dtype, ROW=ROW)


@triton.jit
def _measure_norms(
    addresses, slots, gradient, norms, targets, starts, outputs_before, lengths, outputs,
    DTYPE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Measure the norm of one output's projected weights and of its gradient."""
    output = tl.program_id(0)
    target = tl.load(targets + output)
    length = tl.load(lengths + target)
    first = (output - tl.load(outputs_before + target)) * length
    weights = tl.load(addresses + tl.load(slots + target)).to(tl.pointer_type(DTYPE)) + first
    gradient += tl.load(starts + target) + first
    weight_squares = tl.zeros([ROW], tl.float32)
    gradient_squares = tl.zeros([ROW], tl.float32)
    for start in range(0, length, ROW):
        index = start + tl.arange(0, ROW)
        weight = tl.load(weights + index, mask=index < length, other=0.0).to(tl.float32)
        slope = tl.load(gradient + index, mask=index < length, other=0.0).to(tl.float32)
        weight_squares += weight * weight
        gradient_squares += slope * slope
    tl.store(norms + output, tl.sqrt(tl.sum(weight_squares, 0)))
    tl.store(norms + outputs + output, tl.sqrt(tl.sum(gradient_squares, 0)))


@triton.jit
def _compute_factors(
    norms, factors, outputs_before, counts, outputs, feedback, weak, RANKED: tl.constexpr,
):  # fmt: skip
    """Compute the factor of every output of one target: below 1 where its gradient is too long."""
    target = tl.program_id(0)
    count, index = tl.load(counts + target), tl.arange(0, RANKED)
    inside, output = index < count, tl.load(outputs_before + target) + index
    weight_norm = tl.load(norms + output, mask=inside, other=0.0)
    norm = tl.load(norms + outputs + output, mask=inside, other=0.0)
    is_weak = weight_norm < weak * (tl.sum(weight_norm, 0) / count)
    compared = inside & (is_weak == 0) & (norm > 0)
    ranked = tl.sort(tl.where(compared, norm, float("inf")))  # where none is compared the median is inf: no bound
    middle = tl.maximum(tl.sum(compared.to(tl.int32), 0) - 1, 0) // 2
    median = tl.sum(tl.where(index == middle, ranked, 0.0), 0)
    largest = median * tl.where(is_weak, feedback, 1 / weak)
    bounded = norm > largest
    factor = largest / tl.where(bounded, norm, 1.0)  # without a division by zero
    tl.store(factors + output, tl.where(bounded, factor, 1.0), mask=inside)


@triton.jit
def _scale(
    gradient, factors, targets, starts, outputs_before, lengths, DTYPE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Multiply the gradient of one output by its factor."""
    output = tl.program_id(0)
    factor = tl.load(factors + output)
    if factor < 1:
        target = tl.load(targets + output)
        length = tl.load(lengths + target)
        gradient += tl.load(starts + target) + (output - tl.load(outputs_before + target)) * length
        for start in range(0, length, ROW):
            index = start + tl.arange(0, ROW)
            value = tl.load(gradient + index, mask=index < length, other=0.0)
            tl.store(gradient + index, (value.to(tl.float32) * factor).to(DTYPE), mask=index < length)
