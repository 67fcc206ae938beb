"""An emulator of CUDA C++ kernels for tests: the sources are compiled for this processor, every thread a fiber."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from pomona.sparse import BalancedTensor
from pomona.sparse.cuda.launcher import FOLDER
from pomona.sparse.format import LANES

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
COUNTERS = torch.zeros(1000, dtype=torch.int32)  # used by one launch after another, as on a stream


@cache
def compile_emulator(name: str, **macros: int) -> ctypes.CDLL:
    """Return the library of a kernel compiled for this processor."""
    folder = Path(tempfile.mkdtemp())
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-w", "-msse2", f"-I{FOLDER}", f'-DSOURCE="{name}.cu"']
    flags += [f"-D{macro}={value}" for macro, value in {"KERNEL": name, **macros}.items()]
    command = ["g++", *flags, "-o", str(folder / "kernel.so"), str(Path(__file__).with_name("emulate.cpp"))]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "kernel.so"))
    shutil.rmtree(folder)
    return library


@dataclass
class EmulatedKernel:
    """A substitute for `CompiledKernel`: the same source, run on this processor."""

    library: ctypes.CDLL

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
        self.launch(grid, [t.data_ptr() if t is not None else 0 for t in tensors], sizes)

    def launch(self, grid: tuple[int, int, int], pointers: Sequence[int], sizes: Sequence[int]) -> None:
        boxes = [*map(ctypes.c_void_p, pointers), *map(ctypes.c_int, sizes)]
        within = self.library.launch(*grid, (ctypes.c_void_p * len(boxes))(*map(ctypes.addressof, boxes)))
        assert within, "a store went past the end of shared memory, or the grid does not fit the cluster"


def emulate_kernel(name: str, device: int, threads: int, shared_bytes: int = 0, **macros: int | str) -> EmulatedKernel:
    """Return an emulated kernel, in place of `launcher.compile_kernel`; macros of text are for the assembler."""
    numbers = {macro: value for macro, value in macros.items() if isinstance(value, int)}
    assert threads == numbers["WARPS"] * LANES
    return EmulatedKernel(compile_emulator(name, SHARED=shared_bytes, **numbers))


def multiply(
    kernel: ModuleType, x: Tensor, weight: Tensor, block: int, bias: Tensor | None = None, relu: bool = False
) -> Tensor:
    """Return x Wᵀ + bias by one of the kernels."""
    packed = BalancedTensor.from_dense(weight, block)
    y = x.new_full((len(x), len(weight)), torch.nan)
    assert kernel.multiply(x, packed.values, packed.indices, bias, y, x.shape[1], block, relu)
    return y
