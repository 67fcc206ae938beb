"""Products with packed matrices on a CPU, by the C kernels.

The kernels are built with the package, or from a checkout on first use into the user's cache. `POMONA_NATIVE=0`
disables them. The instruction set is the one torch reports for the processor, so that `ATEN_CPU_CAPABILITY=avx2` or
`default` restricts both.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..format import DTYPE_CODES
from .toolchain import (
    INSTRUCTION_SETS,
    LIBRARY_NAME,
    SOURCE,
    X86,
    build_library,
    cached_library_path,
    is_trusted,
    make_private_folder,
)

logger = logging.getLogger(__name__)

NO_MEMORY, NOT_FINITE = 1, 2  # return codes of a kernel that failed; 0 is success
SINGLE_THREAD_PRODUCTS = 1 << 16  # multiplications up to which waking other threads takes longer than they save
MATRIX_ARGTYPES = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 6
# The number of vectors; x; the distance between rows of x, or the offsets of its columns; y; the number of threads.
VECTORS_ARGTYPES = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]


def supported_instruction_sets() -> list[str]:
    """Return the names of the instruction sets this processor has, the best one first."""
    best = torch.backends.cpu.get_cpu_capability()
    names = [capability for capability, _ in INSTRUCTION_SETS.values()]
    return list(INSTRUCTION_SETS)[names.index(best) if X86 and best in names else -1 :]


@cache
def load_library() -> ctypes.CDLL | None:
    """Load the compiled kernels, built first where needed; return None where there are none and PyTorch is used."""
    if os.environ.get("POMONA_NATIVE") == "0":
        return None
    for load in (load_installed_library, load_cached_library):
        try:
            return load()
        except PermissionError as error:
            warnings.warn(f"the CPU kernels are not used: {error}; set XDG_CACHE_HOME to another one.", stacklevel=2)
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def load_installed_library() -> ctypes.CDLL:
    """Load the kernels that the package's install built; raise OSError where there are none."""
    return ctypes.CDLL(str(SOURCE.with_name(LIBRARY_NAME)))


def load_cached_library() -> ctypes.CDLL:
    """Load the kernels from the user's cache; build them where they are missing, damaged or not the user's alone."""
    path = cached_library_path()
    make_private_folder(path.parent)
    if not is_trusted(path):
        logger.warning("compiling the CPU kernels into '%s'; this takes about half a minute, once.", path)
        build_library(path)
    return ctypes.CDLL(str(path))


@cache
def load_kernel(name: str, instruction_set: str | None = None) -> Callable[..., int] | None:
    """Return the kernel "rows" or "columns", for the best instruction set or the one named; None without a library."""
    library = load_library()
    if library is None:
        return None
    function = getattr(library, f"pomona_{instruction_set or supported_instruction_sets()[0]}_{name}")
    function.argtypes = [*MATRIX_ARGTYPES, *VECTORS_ARGTYPES]
    function.restype = ctypes.c_int
    return function


def multiply_packed(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int,
                    block: int, relu: bool, transposed: bool, instruction_set: str | None = None,
                    ) -> Tensor | None:  # fmt: skip
    """Return x Wᵀ + bias, or W x + bias with `transposed`; None where the kernels cannot compute it.

    The kernels skip pruned weights, which gives the dense product only where x is finite: for other inputs they
    decline. `pomona.sparse.ops.product` describes the arguments.
    """
    kernel = load_kernel("columns" if transposed else "rows", instruction_set)
    if kernel is None or x.dtype not in DTYPE_CODES:
        return None
    n, kept = x.shape[-1 if transposed else 0], values.shape[2]
    x32, layout = (locate_columns if transposed else locate_rows)(x if x.dtype is torch.float32 else x.float(), n)
    if bias is not None:
        bias = bias.float().contiguous()
    y = x32.new_empty(rows, n) if transposed else x32.new_empty(n, rows)
    code = kernel(
        values.data_ptr(),
        indices.data_ptr(),
        None if bias is None else bias.data_ptr(),
        rows,
        columns,
        block,
        kept,
        DTYPE_CODES[values.dtype],
        relu,
        n,
        x32.data_ptr(),
        layout if layout.__class__ is int else layout.data_ptr(),  # type: ignore[union-attr]
        y.data_ptr(),
        torch.get_num_threads() if n * values.numel() > SINGLE_THREAD_PRODUCTS else 1,
    )
    if code == NO_MEMORY:
        raise MemoryError("the CPU kernel has no memory for a copy of its input.")
    if code == NOT_FINITE:
        return None
    return y if x.dtype is torch.float32 else y.to(x.dtype)


def locate_rows(x: Tensor, n: int) -> tuple[Tensor, int]:
    """Return x as n contiguous rows, and the distance between them."""
    if x.ndim != 2:
        x = x.reshape(n, -1)
    step, inner = x.stride()
    return (x, step) if inner == 1 else (x.contiguous(), x.shape[1])


def locate_columns(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return x (columns … × n) with its n values of a column contiguous, and the offset at which each column begins."""
    x = x if x.stride(-1) == 1 or n == 1 else x.contiguous()
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")  # whatever the default device is: C reads it
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return x, offsets.flatten()
