"""The kernels in C: built with the package, or from a checkout on first use into the user's cache.

`POMONA_NATIVE=0` does without them. Which instructions are used is what torch says of the processor, so
`ATEN_CPU_CAPABILITY=avx2` or `default` chooses less for both.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .toolchain import LEVELS, NAME, SOURCE, X86, build, cached

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DONE, NO_MEMORY, NOT_FINITE = 0, 1, 2  # what a kernel returns
ALONE = 1 << 16  # products below which waking other threads takes longer than they save
MATRIX = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 6
# The product's own: how many vectors, x, and where its columns begin or how long its rows are; then y and threads.
REST = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]


def levels() -> list[str]:
    """The levels this processor has, best first."""
    best = torch.backends.cpu.get_cpu_capability()
    names = [capability for capability, _ in LEVELS.values()]
    return list(LEVELS)[names.index(best) if X86 and best in names else -1 :]


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where there are none: PyTorch does the work then."""
    if os.environ.get("POMONA_NATIVE") == "0":
        return None
    for place in (SOURCE.with_name(NAME), cached()):
        try:
            if not place.exists() and place.name != NAME:
                build(place)
            return ctypes.CDLL(str(place))
        except (OSError, subprocess.SubprocessError):
            continue
    return None


@cache
def kernel(name: str, level: str | None = None) -> Callable[..., int] | None:
    """One of the two kernels, for this processor or for a level of it."""
    found = library()
    if found is None:
        return None
    function = getattr(found, f"pomona_{level or levels()[0]}_{name}")
    function.argtypes = [*MATRIX, *REST]
    function.restype = ctypes.c_int
    return function


def product(
    x: Tensor,
    values: Tensor,
    indices: Tensor,
    bias: Tensor | None,
    rows: int,
    columns: int,
    block: int,
    relu: bool,
    turned: bool,
    level: str | None = None,
) -> Tensor | None:
    """x Wᵀ + bias, or W x + bias where x is turned; None where the kernels cannot do it.

    They leave pruned weights out, which is the dense product only where x is finite.
    """
    call = kernel("columns" if turned else "rows", level)
    if call is None or x.dtype not in KINDS:
        return None
    n, kept = x.shape[-1 if turned else 0], values.shape[2]
    wide, where = (begins if turned else lengthwise)(x if x.dtype is torch.float32 else x.float(), n)
    if bias is not None:
        bias = bias.float().contiguous()
    y = wide.new_empty(rows, n) if turned else wide.new_empty(n, rows)
    failed = call(
        values.data_ptr(),
        indices.data_ptr(),
        None if bias is None else bias.data_ptr(),
        rows,
        columns,
        block,
        kept,
        KINDS[values.dtype],
        relu,
        n,
        wide.data_ptr(),
        where if where.__class__ is int else where.data_ptr(),  # type: ignore[union-attr]
        y.data_ptr(),
        torch.get_num_threads() if n * values.numel() > ALONE else 1,
    )
    if failed == NO_MEMORY:
        raise MemoryError("no memory for a copy of the input")
    if failed == NOT_FINITE:
        return None
    return y if x.dtype is torch.float32 else y.to(x.dtype)


def lengthwise(x: Tensor, n: int) -> tuple[Tensor, int]:
    """The rows of x, each contiguous, and how far they are apart."""
    if x.ndim != 2:
        x = x.reshape(n, -1)
    step, inner = x.stride()
    return (x, step) if inner == 1 else (x.contiguous(), x.shape[1])


def begins(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """x (columns … × n) with contiguous runs of n, and where each column's run begins."""
    x = x if x.stride(-1) == 1 or n == 1 else x.contiguous()
    where = torch.zeros((), dtype=torch.int64, device="cpu")  # whatever the default device is: C reads it
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        where = where.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return x, where.flatten()
