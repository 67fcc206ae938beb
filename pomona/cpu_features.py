"""A limit for oneDNN on processors whose AMX unit cannot be used.

Intel processors since Sapphire Rapids advertise AMX. A process may use its tile registers only after the kernel has
granted them, and some virtual machines advertise AMX and refuse that request. There oneDNN's bfloat16 kernels die of
an illegal instruction. oneDNN reads the environment variable ONEDNN_MAX_CPU_ISA once, so the limit has to be set
before torch is imported: `pomona/__init__.py` imports this module first, and importing it sets the limit where it is
needed. This module uses the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable, MutableMapping
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
LARGEST_ISA_WITHOUT_AMX = "AVX512_CORE_BF16"
CPUINFO = Path("/proc/cpuinfo")

# From the Linux headers asm/unistd_64.h, asm/prctl.h and asm/fpu/types.h.
SYS_ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18


def is_linux_x86_64() -> bool:
    """Return whether this is a 64-bit process on x86-64 Linux, the only platform the system call is known for."""
    return sys.platform == "linux" and os.uname().machine == "x86_64" and sys.maxsize > 2**32


def read_cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the feature flags of the first processor in `cpuinfo`, or an empty set where it cannot be read."""
    try:
        with open(cpuinfo, encoding="ascii", errors="replace") as lines:
            for line in lines:
                key, _, flags = line.partition(":")
                if key.strip() == "flags":
                    return frozenset(flags.split())
    except OSError:
        pass
    return frozenset()


def request_tile_data() -> bool:
    """Ask the kernel for AMX tile data, as oneDNN does, and return whether it was granted."""
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    return bool(syscall(*map(ctypes.c_long, (SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA))) == 0)


def is_amx_refused(cpuinfo: Path = CPUINFO, request: Callable[[], bool] = request_tile_data) -> bool:
    """Return whether the processor advertises AMX and the kernel refuses its tile data."""
    return is_linux_x86_64() and "amx_tile" in read_cpu_flags(cpuinfo) and not request()


def limit_onednn(environ: MutableMapping[str, str], is_refused: Callable[[], bool], torch_is_loaded: bool) -> bool:
    """Set oneDNN's limit in `environ` where AMX is refused and return whether that was done.

    A value that the user has set is left alone, and the processor is then not looked at. Where torch is loaded
    already, oneDNN may have read the variable before: a warning says what to do.
    """
    if VARIABLE in environ or not is_refused():
        return False
    environ[VARIABLE] = LARGEST_ISA_WITHOUT_AMX
    if torch_is_loaded:
        warnings.warn(
            "this machine advertises AMX and refuses its use, and torch was imported before pomona: bfloat16 on the "
            "CPU can die of an illegal instruction. Import pomona before torch, or set "
            f"{VARIABLE}={LARGEST_ISA_WITHOUT_AMX} in the environment.",
            RuntimeWarning,
            stacklevel=2,
        )
    return True


def describe_amx(cpuinfo: Path = CPUINFO, request: Callable[[], bool] = request_tile_data) -> str:
    """Return one sentence about AMX on this machine, for `pomona check`."""
    if not is_linux_x86_64() or "amx_tile" not in read_cpu_flags(cpuinfo):
        return "not advertised by the processor"
    if not is_amx_refused(cpuinfo, request):
        return "available"
    return f"advertised by the processor, refused by the system; {VARIABLE} is {os.environ.get(VARIABLE, 'not set')}"


limit_onednn(os.environ, is_amx_refused, "torch" in sys.modules)
