"""Libraries of C functions: built with the package, or from a checkout on first use into the user's cache.

`POMONA_NATIVE=0` disables them. The instruction set is the one torch reports for the processor, so that
`ATEN_CPU_CAPABILITY=avx2` or `default` restricts both.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import warnings
from functools import cache
from pathlib import Path

import torch

from .toolchain import (
    INSTRUCTION_SETS,
    PRIVATE_SOURCE,
    SNAPSHOT_SOURCE,
    STEP_SOURCE,
    X86,
    build_library,
    cached_library_path,
    installed_library_path,
    is_trusted,
    make_private_folder,
)

logger = logging.getLogger(__name__)


def supported_instruction_sets() -> list[str]:
    """Return the names of the instruction sets this processor has, the best one first."""
    best = torch.backends.cpu.get_cpu_capability()
    names = [capability for capability, _ in INSTRUCTION_SETS.values()]
    return list(INSTRUCTION_SETS)[names.index(best) if X86 and best in names else -1 :]


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """Load the library of a source, built first where needed; return None where there is none and PyTorch is used."""
    if os.environ.get("POMONA_NATIVE") == "0":
        return None
    for load in (load_installed_library, load_cached_library):
        try:
            return load(source)
        except PermissionError as error:
            warnings.warn(f"the CPU kernels are not used: {error}; set XDG_CACHE_HOME to another one.", stacklevel=2)
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def load_installed_library(source: Path) -> ctypes.CDLL:
    """Load the library that the package's install built; raise OSError where there is none."""
    return ctypes.CDLL(str(installed_library_path(source)))


def load_cached_library(source: Path) -> ctypes.CDLL:
    """Load a library from the user's cache; build it where it is missing, damaged or not the user's alone."""
    path = cached_library_path(source)
    make_private_folder(path.parent)
    if not is_trusted(path):
        is_short = source in (STEP_SOURCE, PRIVATE_SOURCE, SNAPSHOT_SOURCE)
        level, duration = (logging.INFO, "a moment") if is_short else (logging.WARNING, "about half a minute")
        logger.log(level, "compiling the CPU kernels into '%s'; this takes %s, once.", path, duration)
        build_library(path, source)
    return ctypes.CDLL(str(path))
