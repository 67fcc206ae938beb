"""The native functions that run a network of convolutions with sparse weights: `network_kernels.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...native import library
from ...native.library import supported_instruction_sets
from ...native.toolchain import NETWORK_SOURCE

LOAD, STORE, CONVOLVE, MAX_POOL, MEAN = range(5)  # the kinds of steps
TILE_NUMBERS = 128  # of the largest tile of any instruction set
MAX_KERNEL = 64  # lines and columns of a kernel
NO_RESIDUAL = -1
DONE = 0  # the return code of a run whose numbers are all finite
NUMBER, ADDRESS = ctypes.c_int64, ctypes.c_void_p
SIZES = ("channels", "height", "width")
PAIRS = ("kernel", "stride", "padding", "dilation")
PLACES = ("input", "input_plane", "output", "output_plane", "residual", "residual_plane")
# Result and arguments of each function.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "network_scratch": (NUMBER, [ADDRESS]),
    "network_channels": (NUMBER, [ADDRESS]),
    "network_offsets": (None, [ADDRESS, NUMBER, ADDRESS, ADDRESS]),
    "network_run": (ctypes.c_int, [ADDRESS, *[NUMBER] * 2, *[ADDRESS] * 3, *[NUMBER] * 3]),
}


class StepRecord(ctypes.Structure):
    """One step, as `network_kernels.c` declares it."""

    _fields_ = [
        *((name, NUMBER) for name in ("kind", *SIZES)),
        *((f"{pair}_{side}", NUMBER) for pair in PAIRS for side in ("height", "width")),
        *((name, NUMBER) for name in ("rows", "relu", *PLACES, "chunks")),
        *((name, ADDRESS) for name in ("starts", "offsets", "values", "shifts")),
    ]


@cache
def load_function(name: str, instruction_set: str | None = None) -> Callable[..., Any] | None:
    """Return a native function, for the best instruction set or the one named; None without a library."""
    functions = library.load_library(NETWORK_SOURCE)
    if functions is None:
        return None
    function = getattr(functions, f"pomona_{instruction_set or supported_instruction_sets()[0]}_{name}")
    function.restype, function.argtypes = SIGNATURES[name]
    return function


def require_function(name: str, instruction_set: str | None = None) -> Callable[..., Any]:
    """Return a native function; raise RuntimeError without a library."""
    function = load_function(name, instruction_set)
    if function is None:
        raise RuntimeError("there is no native library: see `pomona.native`.")
    return function


def call(name: str, instruction_set: str | None, *arguments: Any) -> Any:
    """Call a native function; raise RuntimeError without a library."""
    return require_function(name, instruction_set)(*arguments)


def scratch_numbers(record: StepRecord, instruction_set: str | None = None) -> int:
    """Return how many numbers of scratch memory a thread needs for a step."""
    return call("network_scratch", instruction_set, ctypes.byref(record))


def channels_at_once(record: StepRecord, instruction_set: str | None = None) -> int:
    """Return how many input channels of a convolution fit into the L1 cache."""
    return call("network_channels", instruction_set, ctypes.byref(record))


def locate_columns(record: StepRecord, columns: Tensor, instruction_set: str | None = None) -> Tensor:
    """Return the offsets at which the columns of a convolution's weight begin in its input."""
    offsets = torch.empty(len(columns), dtype=torch.int32, device="cpu")
    addresses = columns.data_ptr(), offsets.data_ptr()
    call("network_offsets", instruction_set, ctypes.byref(record), len(columns), *addresses)
    return offsets
