"""Compilation of CUDA C++ for any GPU on a machine without one: NVRTC from its PyPI package, or nvcc."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest


class Compiled(NamedTuple):
    """What the assembler reports of a kernel."""

    registers: int  # of a thread
    shared_bytes: int  # of a thread block, that the kernel declares itself
    stack_bytes: int  # of a thread


@cache
def find_compiler() -> Callable[[str, str], str] | None:
    """Return a function that compiles a source for an architecture and returns the assembler's report, or None."""
    library = find_nvrtc()
    if library is not None:
        return NVRTC(library).compile
    return compile_with_nvcc if shutil.which("nvcc") else None


def find_nvrtc() -> Path | None:
    """Return the path of the library in the package nvidia-cuda-nvrtc; None where it is not installed."""
    try:
        import nvidia
    except ImportError:
        return None
    found = (path for folder in nvidia.__path__ for path in Path(folder).glob("*/lib/libnvrtc.so.*"))
    return next(found, None)


class NVRTC:
    """CUDA's compiler at run time, which torch compiles the kernels with; it needs neither a GPU nor a driver."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def call(self, name: str, *arguments: object) -> int:
        """Return the status of a function of the library."""
        return getattr(self.library, name)(*arguments)

    def compile(self, source: str, architecture: str) -> str:
        """Return the assembler's report; raise RuntimeError with the compiler's log where the source is refused."""
        program = ctypes.c_void_p()
        created = self.call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
        assert created == 0, f"NVRTC refused the source with the status {created}"
        options = [f"--gpu-architecture=sm_{architecture}".encode(), b"--ptxas-options=-v"]
        status = self.call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        self.call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self.call("nvrtcGetProgramLog", program, log)
        self.call("nvrtcDestroyProgram", ctypes.byref(program))
        if status:
            raise RuntimeError(log.value.decode())
        return log.value.decode()


def compile_with_nvcc(source: str, architecture: str) -> str:
    """Return the assembler's report; raise RuntimeError with the compiler's log where the source is refused."""
    command = ["nvcc", "-cubin", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-x", "cu", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stderr


@cache
def compile_source(source: str, architecture: str) -> Compiled:
    """Compile a source for an architecture such as "86"; skip the test on a machine without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("needs NVRTC (pip install nvidia-cuda-nvrtc) or nvcc")
    report = compiler(source, architecture)
    return Compiled(*(read_number(pattern, report) for pattern in (r"Used (\d+) registers", r"(\d+) bytes smem",
                                                                   r"(\d+) bytes stack frame")))  # fmt: skip


def read_number(pattern: str, report: str) -> int:
    """Return the number that a pattern finds in the report, which leaves out shared memory that is not there."""
    found = re.search(pattern, report)
    return int(found[1]) if found else 0
