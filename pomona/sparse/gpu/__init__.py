"""The kernels for CUDA: one in CUDA C++ for a few vectors, one in Triton for more."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..balanced import LANES

SOURCE = Path(__file__).with_name("few.cu")
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NARROW = 32  # the columns of a block that a warp holds
FEW = 16  # vectors up to which shuffles beat the tensor cores
REGISTERS = 96  # of a thread, that values, words and sums may fill


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
) -> Tensor | None:
    """x Wᵀ + bias, or W x + bias where x is turned; None where there is no kernel for it."""
    flat = x.reshape(columns, -1).T if turned else x.reshape(x.shape[0], columns)
    y = None
    with torch.cuda.device_of(x):
        if block <= NARROW and len(flat) <= FEW and x.dtype == values.dtype and values.shape[2] <= NARROW:
            y = multiply_few(flat, values, indices, bias, rows, columns, block, relu)
        if y is None and (kernels := many()) is not None and block <= kernels.WIDEST and x.dtype in KINDS:
            y = kernels.product(flat, values, indices, bias, rows, columns, block, relu)
    return y if y is None or not turned else y.T.contiguous()


@cache
def many() -> ModuleType | None:
    """The kernel for more vectors, where there is a Triton."""
    try:
        from . import many as kernels
    except ImportError:
        return None
    return kernels


def multiply_few(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int, block: int, relu: bool
) -> Tensor | None:
    """By the kernel in CUDA C++; None where it cannot be compiled here."""
    n, (groups, blocks, kept, _) = len(x), values.shape
    plan = shape(n, kept, groups, blocks)
    kernel = few(KINDS[values.dtype], kept, *plan, torch.cuda.current_device())
    if kernel is None:
        return None
    batch, together, warps, _ = plan
    turned = x.contiguous() if n == 1 else torch.nn.functional.pad(x.T, (0, batch - n)).contiguous()
    y = torch.empty(n, rows, dtype=x.dtype, device=x.device)
    wide = torch.empty(0, device=x.device) if bias is None else bias.float().contiguous()  # a null pointer where empty
    kernel(
        (-(-groups // together), 1, 1),
        (warps * LANES, 1, 1),
        [values, indices, turned, wide, y, rows, columns, block, blocks, n, int(relu)],
    )
    return y


def shape(n: int, kept: int, groups: int, blocks: int) -> tuple[int, int, int, int]:
    """How many vectors and groups of rows a warp works on, how many warps share them, and blocks in flight."""
    batch = 1 << (n - 1).bit_length()
    together = 2 if batch >= 8 and groups >= 256 else 1
    warps = min(16 if batch <= 2 else 8, 1 << (blocks - 1).bit_length())
    spare = REGISTERS - batch * together
    unroll = max(1, min(4, spare // (together * (kept + -(-kept // 3)) + batch)))
    return batch, together, warps, unroll


@cache
def few(
    kind: int, kept: int, batch: int, together: int, warps: int, unroll: int, device: int
) -> Callable[..., Any] | None:
    """The compiled kernel for a device, or None where torch has no compiler for it."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        return None
    macros = {"KIND": kind, "KEPT": kept, "BATCH": batch, "GROUPS": together, "WARPS": warps, "UNROLL": unroll}
    source = "".join(f"#define {name} {value}\n" for name, value in macros.items()) + SOURCE.read_text()
    try:
        return compile_kernel(source, "few")
    except (RuntimeError, OSError):
        return None
