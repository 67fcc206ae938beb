"""Kernels in CUDA C++: compiled by torch when they are first wanted, and launched with little ado.

torch's own launch looks for the driver at every call, which takes longer than most products.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
BUFFER, SIZE, END = 1, 2, 0  # how the driver is told of arguments that lie in one buffer
Extra = ctypes.c_void_p * 5


def source(name: str, **macros: int) -> str:
    """The text of a kernel, for one set of its parameters."""
    lines = [f"#define {macro} {value}\n" for macro, value in macros.items()]
    return "".join([*lines, (FOLDER / "kinds.cuh").read_text(), (FOLDER / f"{name}.cu").read_text()])


class Kernel:
    """A kernel on the current device, with so many threads and bytes of shared memory to a thread block."""

    def __init__(self, name: str, threads: int, shared: int = 0, **macros: int) -> None:
        self.made = torch.cuda._compile_kernel(source(name, **macros), name)
        self.made.set_shared_memory_config(shared)
        self.device, self.block = torch.cuda.current_device(), (threads, 1, 1, shared)
        self.go = torch.cuda._utils._get_gpu_runtime_library().cuLaunchKernel
        self.go.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
        """Run it on the current stream; a tensor that is None is a null pointer."""
        form, size = layout(len(tensors), len(sizes))
        buffer = ctypes.create_string_buffer(
            form.pack(*[t.data_ptr() if t is not None else 0 for t in tensors], *sizes)
        )
        how = Extra(BUFFER, ctypes.addressof(buffer), SIZE, ctypes.addressof(size), END)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        if error := self.go(self.made.func, *grid, *self.block, stream, None, how):
            raise RuntimeError(f"a kernel was not launched: error {error} of the CUDA driver.")


@cache
def layout(pointers: int, integers: int) -> tuple[struct.Struct, ctypes.c_size_t]:
    """How the arguments of a kernel lie in memory, and their bytes."""
    form = struct.Struct(f"{pointers}P{integers}i")
    return form, ctypes.c_size_t(form.size)


@cache
def kernel(name: str, device: int, threads: int, shared: int = 0, **macros: int) -> Kernel | None:
    """The same, compiled once; None where torch cannot compile it for this device."""
    try:
        with torch.cuda.device(device):
            return Kernel(name, threads, shared, **macros)
    except (AttributeError, OSError, RuntimeError):
        return None


def legible(bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """A bias that a kernel for values of this kind can read, and whether it is of floats."""
    if bias is not None and bias.dtype != dtype:
        bias = bias.float()
    return (None, False) if bias is None else (bias.contiguous(), bias.dtype == torch.float32)
