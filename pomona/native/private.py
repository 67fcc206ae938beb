"""The work of a private step on a CPU by C kernels; without them `pomona.privacy` computes the same with PyTorch.

A function returns False where the kernels cannot do its work: without a compiler or on another device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .library import load_library, supported_instruction_sets
from .toolchain import PRIVATE_SOURCE

POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: dict[str, list[Any]] = {
    "chacha20": [POINTER] * 2 + [INTEGER] * 2,
    "propose_noise": [POINTER, INTEGER, *[POINTER] * 3, *[INTEGER] * 3, *[POINTER] * 2, INTEGER],
    "add_squared_norms": [POINTER] * 2 + [INTEGER] * 3,
    "add_rounded_rows": [POINTER] * 3 + [INTEGER] * 3,
    "sum_blocks": [POINTER] * 3 + [INTEGER] * 2,
}
SINGLE_THREAD_VALUES = 1 << 14  # values up to which waking other threads takes longer than they save


@cache
def load_kernel(name: str, instruction_set: str | None = None) -> Callable[..., None] | None:
    """Return a function of private_kernels.c, for the best instruction set or the one named; None without a library."""
    library = load_library(PRIVATE_SOURCE)
    if library is None:
        return None
    function = getattr(library, f"pomona_{instruction_set or supported_instruction_sets()[0]}_{name}")
    function.argtypes, function.restype = SIGNATURES[name], None
    return function


def fill_chacha20(state: Tensor, out: Tensor, instruction_set: str | None = None) -> bool:
    """Write the ChaCha20 blocks from a state of 16 words on into `out`, of shape (blocks, 16)."""
    kernel = usable_kernel("chacha20", instruction_set, state, out)
    if kernel is None:
        return False
    kernel(state.data_ptr(), out.data_ptr(), len(out), thread_count(out.numel()))
    return True


def propose_noise(
    words: Tensor,
    slots: Tensor,
    limits: tuple[Tensor, Tensor],
    bits: tuple[int, int],
    first_block: int,
    values: Tensor,
    verdicts: Tensor,
    instruction_set: str | None = None,
) -> bool:
    """Write the discrete Gaussian proposal of each word into `values` and its verdict into `verdicts`."""
    kernel = usable_kernel("propose_noise", instruction_set, words, slots, *limits, values, verdicts)
    if kernel is None:
        return False
    tables = (tensor.data_ptr() for tensor in (slots, *limits))
    places = (values.data_ptr(), verdicts.data_ptr())
    kernel(words.data_ptr(), words.numel(), *tables, *bits, first_block, *places, thread_count(words.numel()))
    return True


def add_squared_norms(values: Tensor, squares: Tensor, instruction_set: str | None = None) -> bool:
    """Add the squared norm of each row of a float32 matrix to the float64 `squares`."""
    kernel = usable_kernel("add_squared_norms", instruction_set, values, squares)
    if kernel is None:
        return False
    kernel(values.data_ptr(), squares.data_ptr(), *values.shape, thread_count(values.numel()))
    return True


def add_rounded_rows(values: Tensor, scales: Tensor, totals: Tensor, instruction_set: str | None = None) -> bool:
    """Add Σ round(scale · value) over the rows of a float32 matrix to the int64 `totals`."""
    kernel = usable_kernel("add_rounded_rows", instruction_set, values, scales, totals)
    if kernel is None:
        return False
    kernel(*(tensor.data_ptr() for tensor in (values, scales, totals)), *values.shape, thread_count(values.numel()))
    return True


def sum_blocks(words: Tensor, multipliers: Tensor, sums: Tensor, instruction_set: str | None = None) -> bool:
    """Write the sums of int32 words (blocks, 1024) times multipliers (4, 1024) into the int64 `sums` (blocks, 4)."""
    kernel = usable_kernel("sum_blocks", instruction_set, words, multipliers, sums)
    if kernel is None:
        return False
    kernel(words.data_ptr(), multipliers.data_ptr(), sums.data_ptr(), len(words), thread_count(words.numel()))
    return True


def usable_kernel(name: str, instruction_set: str | None, *tensors: Tensor) -> Callable[..., None] | None:
    """Return a kernel for tensors that are contiguous on the CPU, or None."""
    usable = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
    return load_kernel(name, instruction_set) if usable else None


def thread_count(values: int) -> int:
    """Return the number of threads for a pass over so many values."""
    return torch.get_num_threads() if values > SINGLE_THREAD_VALUES else 1
