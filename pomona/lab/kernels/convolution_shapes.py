"""The tile sizes and output buffers of the convolution kernels, which need no Triton."""

from __future__ import annotations

from torch import Tensor


def tile_config(weight: Tensor, stride: int) -> tuple[int, int]:
    """Return how many neighbouring output pixels form a patch, and how many patches one program computes."""
    outputs, inputs, size, _ = weight.shape
    channels = max(inputs, outputs)
    return 1 + (stride == 1 and size > 1 and channels < 64), 128 if channels > 16 else 256


def allocate_outputs(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Return buffers for the output of a convolution and for the partial sums of its channels."""
    height, width = (-(-length // stride) for length in x.shape[2:])
    columns, block = tile_config(weight, stride)
    rows = -(-x.shape[0] * height * -(-width // columns) // block) * columns
    y = x.new_empty(x.shape[0], height, width, weight.shape[0]).permute(0, 3, 1, 2)
    return y, weight.new_empty(2, rows, weight.shape[0])
