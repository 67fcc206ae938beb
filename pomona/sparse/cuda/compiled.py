"""Kernels in CUDA C++: compiled by torch when they are first wanted, and launched with little ado.

torch's own launch looks for the driver at every call, which takes longer than most products.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ONLY = {"hopper": "90a"}  # the architecture of kernels that are for one alone
HEAD = "7I2PI4x"  # CUlaunchConfig: grid, thread block and its memory, stream, attributes and how many
BUFFER, SIZE, END = 1, 2, 0  # how the driver is told of arguments that lie in one buffer
EARLY = ctypes.create_string_buffer(struct.pack("i4xi60x", 6, 1))  # the attribute: ahead of the last kernel's end
STRANGE = 201  # the driver's error where a thread has not met the device yet
LOCK = Lock()  # launches share the memory that their arguments lie in


def source(name: str, **macros: int | str) -> str:
    """The text of a kernel, for one set of its parameters."""
    return "".join([*(f"#define {macro} {value}\n" for macro, value in macros.items()), text(f"{name}.cu")])


def text(name: str) -> str:
    """A file's text, with that of those it includes."""
    return re.sub(r'#include "(.*)"\n', lambda match: text(match[1]), (FOLDER / name).read_text())


class Kernel:
    """A kernel on the current device, with so many threads and bytes of shared memory to a thread block.

    One that is EARLY waits by itself for the kernel before it, and is launched ahead of that one's end.
    """

    def __init__(self, name: str, threads: int, shared: int = 0, **macros: int | str) -> None:
        self.made = torch.cuda._compile_kernel(source(name, **macros), name, ONLY.get(name))
        self.made.set_shared_memory_config(shared)
        self.device, self.block = torch.cuda.current_device(), (threads, 1, 1, shared)
        self.attributes = (ctypes.addressof(EARLY), 1) if macros.get("EARLY") else (0, 0)
        self.driver, self.context = torch.cuda._utils._get_gpu_runtime_library(), ctypes.c_void_p()
        self.driver.cuCtxGetCurrent(ctypes.byref(self.context))
        self.go = self.driver.cuLaunchKernelEx
        self.go.argtypes = [ctypes.c_void_p] * 4

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
        """Run it on the current stream; a tensor that is None is a null pointer."""
        self.launch(grid, [0 if t is None else t.data_ptr() for t in tensors], sizes)

    def launch(self, grid: tuple[int, int, int], pointers: Sequence[int], sizes: Sequence[int]) -> None:
        """The same for addresses."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        form, memory, config, extra = frame(len(pointers), len(sizes))
        with LOCK:
            form.pack_into(memory, 0, *grid, *self.block, stream, *self.attributes, *pointers, *sizes)
            error = self.go(config, self.made.func, None, extra)
            if error == STRANGE:
                self.driver.cuCtxSetCurrent(self.context)
                error = self.go(config, self.made.func, None, extra)
        if error:
            raise RuntimeError(f"a kernel was not launched: error {error} of the CUDA driver.")


@cache
def frame(pointers: int, integers: int) -> tuple[struct.Struct, ctypes.Array[ctypes.c_char], int, int]:
    """How a launch and its kernel's arguments lie in memory, that memory, and where the driver finds both in it."""
    head, size = struct.calcsize(HEAD), struct.calcsize(f"{pointers}P{integers}i")
    form, tail = struct.Struct(f"{HEAD}{pointers}P{integers}i0P"), struct.Struct("N5P")
    memory = ctypes.create_string_buffer(form.size + tail.size)
    at = ctypes.addressof(memory)
    tail.pack_into(memory, form.size, size, BUFFER, at + head, SIZE, at + form.size, END)
    return form, memory, at, at + form.size + struct.calcsize("N")


@cache
def kernel(name: str, device: int, threads: int, shared: int = 0, **macros: int | str) -> Kernel | None:
    """The same, compiled once; None where torch cannot compile it for this device."""
    try:
        with torch.cuda.device(device):
            return Kernel(name, threads, shared, **macros)
    except (AttributeError, OSError, RuntimeError):
        return None


def overlaps(device: int) -> bool:
    """Whether a kernel can be launched ahead of another's end, also while a graph is captured."""
    version = ctypes.c_int()
    torch.cuda._utils._get_gpu_runtime_library().cuDriverGetVersion(ctypes.byref(version))
    return torch.cuda.get_device_properties(device).major >= 9 and version.value >= 12030


def legible(bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """A bias that a kernel for values of this kind can read, and whether it is of floats."""
    if bias is None:
        return None, False
    kind = bias.dtype
    if kind != dtype:
        bias, kind = bias.float(), torch.float32
    return bias.contiguous(), kind == torch.float32
