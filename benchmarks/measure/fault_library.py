"""The library of disk_faults.c, which must be loaded before Python starts, to harm its calls of the system.

It has nothing but the standard library, so that starting Python again costs little.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pomona.native.toolchain import find_compiler

SOURCE = Path(__file__).with_name("disk_faults.c")
VARIABLE = "CHAOS_LIBRARY"


def has_faults() -> bool:
    """Return whether this process has the library."""
    return VARIABLE in os.environ


def build_library(path: Path) -> bool:
    """Build the library; return False where this is impossible: without a C compiler, or on another system."""
    compiler = find_compiler()
    if compiler is None or not sys.platform.startswith("linux"):
        return False
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-ldl"]
    return subprocess.run(command, capture_output=True).returncode == 0


def run_with_faults(command: Sequence[str]) -> int:
    """Run a command with the library, or without where it cannot be built; return its exit status."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        library = Path(folder) / "disk_faults.so"
        loaded = {"LD_PRELOAD": str(library), VARIABLE: str(library)} if build_library(library) else {}
        return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **loaded}).returncode
