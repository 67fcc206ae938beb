"""CUDA C++ kernels: compiled by torch when they are first needed, and launched with little host time.

torch's own launch looks up the driver at every call, which takes longer than most products.
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
MAX_WARP_BLOCK = 32  # columns of a block that the CUDA C++ kernels take: one for each lane, and indices of 5 bits
REQUIRED_ARCHITECTURES = {"hopper_wgmma": "90a"}  # of kernels that are for a single architecture
# The driver's CUlaunchConfig: grid, thread block, bytes of shared memory, stream, attributes and their number.
LAUNCH_CONFIG_FORMAT = "7I2PI4x"
# CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END: they announce kernel arguments that lie in one buffer.
PARAM_BUFFER_POINTER, PARAM_BUFFER_SIZE, PARAM_END = 1, 2, 0
# The attribute CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION (6): start before the previous kernel has ended.
EARLY_LAUNCH_ATTRIBUTE = ctypes.create_string_buffer(struct.pack("i4xi60x", 6, 1))
EARLY_LAUNCH_MAJOR, EARLY_LAUNCH_DRIVER = 9, 12030  # the oldest compute capability and driver that support it
UNLIMITED_SHARED_BYTES = 48 << 10  # of a thread block, static and dynamic: more must be allowed for a kernel
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has not used the device yet
LAUNCH_LOCK = Lock()  # launches share the buffer that holds their arguments


def kernel_source(name: str, **macros: int | str) -> str:
    """Return the source of a kernel, with its macros defined and its includes inserted."""
    definitions = (f"#define {macro} {value}\n" for macro, value in macros.items())
    return "".join([*definitions, insert_includes(f"{name}.cu")])


def insert_includes(name: str) -> str:
    """Return the text of a file of this folder, with the text of the files it includes."""
    return re.sub(r'#include "(.*)"\n', lambda match: insert_includes(match[1]), (FOLDER / name).read_text())


class CompiledKernel:
    """A kernel compiled for the current device, with its threads and bytes of shared memory for a thread block.

    With the macro EARLY_LAUNCH, it is launched before the previous kernel has ended, and waits for that one itself.
    """

    def __init__(self, name: str, threads: int, shared_bytes: int = 0, **macros: int | str) -> None:
        source = kernel_source(name, **macros)
        self.compiled = torch.cuda._compile_kernel(source, name, REQUIRED_ARCHITECTURES.get(name))
        # torch raises the limit for 48 KiB and more, but shared memory that a kernel declares itself counts as well.
        self.compiled.set_shared_memory_config(max(shared_bytes, UNLIMITED_SHARED_BYTES) if shared_bytes else 0)
        self.device, self.block = torch.cuda.current_device(), (threads, 1, 1, shared_bytes)
        early = macros.get("EARLY_LAUNCH")
        self.attributes = (ctypes.addressof(EARLY_LAUNCH_ATTRIBUTE), 1) if early else (0, 0)
        self.driver, self.context = torch.cuda._utils._get_gpu_runtime_library(), ctypes.c_void_p()
        self.driver.cuCtxGetCurrent(ctypes.byref(self.context))
        self.launch_function = self.driver.cuLaunchKernelEx
        self.launch_function.argtypes = [ctypes.c_void_p] * 4

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
        """Launch the kernel on the current stream; a tensor that is None becomes a null pointer."""
        self.launch(grid, [0 if t is None else t.data_ptr() for t in tensors], sizes)

    def launch(self, grid: tuple[int, int, int], pointers: Sequence[int], sizes: Sequence[int]) -> None:
        """Launch the kernel on the current stream, with addresses and integers as its arguments.

        Raise RuntimeError where the driver refuses the launch.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        layout, memory, config, extra = launch_buffer(len(pointers), len(sizes))
        with LAUNCH_LOCK:
            layout.pack_into(memory, 0, *grid, *self.block, stream, *self.attributes, *pointers, *sizes)
            error = self.launch_function(config, self.compiled.func, None, extra)
            if error == INVALID_CONTEXT:
                self.driver.cuCtxSetCurrent(self.context)
                error = self.launch_function(config, self.compiled.func, None, extra)
        if error:
            raise RuntimeError(f"a kernel was not launched: error {error} of the CUDA driver.")


@cache
def launch_buffer(pointers: int, integers: int) -> tuple[struct.Struct, ctypes.Array[ctypes.c_char], int, int]:
    """Return the layout of a launch and its arguments, memory for both, and the two addresses that the driver takes."""
    head, size = struct.calcsize(LAUNCH_CONFIG_FORMAT), struct.calcsize(f"{pointers}P{integers}i")
    layout, tail = struct.Struct(f"{LAUNCH_CONFIG_FORMAT}{pointers}P{integers}i0P"), struct.Struct("N5P")
    memory = ctypes.create_string_buffer(layout.size + tail.size)
    start = ctypes.addressof(memory)
    size_at = start + layout.size
    extra = PARAM_BUFFER_POINTER, start + head, PARAM_BUFFER_SIZE, size_at, PARAM_END
    tail.pack_into(memory, layout.size, size, *extra)
    return layout, memory, start, size_at + struct.calcsize("N")


@cache
def compile_kernel(
    name: str, device: int, threads: int, shared_bytes: int = 0, **macros: int | str
) -> CompiledKernel | None:
    """Return a kernel compiled once for these arguments; None where torch cannot compile it for this device."""
    try:
        with torch.cuda.device(device):
            return CompiledKernel(name, threads, shared_bytes, **macros)
    except (AttributeError, OSError, RuntimeError):
        return None


def supports_early_launch(device: int) -> bool:
    """Return whether a kernel can start before the previous one has ended, also while a graph is captured."""
    version = ctypes.c_int()
    torch.cuda._utils._get_gpu_runtime_library().cuDriverGetVersion(ctypes.byref(version))
    new_enough = torch.cuda.get_device_properties(device).major >= EARLY_LAUNCH_MAJOR
    return new_enough and version.value >= EARLY_LAUNCH_DRIVER


def prepare_bias(bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """Return a bias that a kernel for values of this dtype can read, and whether it is of float32."""
    if bias is None:
        return None, False
    bias_dtype = bias.dtype
    if bias_dtype != dtype:
        bias, bias_dtype = bias.float(), torch.float32
    return bias.contiguous(), bias_dtype == torch.float32
