"""Compile the kernels. Nothing but the standard library is needed, so that the package's install can use it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
NAME = "kernels.so"  # beside it, where the package's install built it
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
X86 = platform.machine() in ("x86_64", "AMD64")
# The flags of each level, best first, and torch's name for a processor that has it.
LEVELS = {
    "avx512": ("AVX512", ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c")),
    "avx2": ("AVX2", ("-mavx2", "-mfma", "-mf16c")),
    "plain": ("DEFAULT", ()),
}


def compiler() -> str | None:
    """The C compiler: $CC, or the system's."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)


def cached() -> Path:
    """The file in the user's cache, named after all that decides what is in it."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parts = (SOURCE.read_bytes(), repr((FLAGS, LEVELS, compiler(), platform.machine())).encode())
    return Path(root) / "pomona" / f"kernels-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"


def build(place: Path, check: bool = True) -> Path:
    """Compile every level and link them into one file, which appears whole or not at all.

    OpenMP is used but not linked: torch has one in memory, and two would fight for the cores. So the file is
    checked by loading it, which takes a process with torch in it.
    """
    cc = compiler()
    if cc is None:
        raise FileNotFoundError("there is no C compiler")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        made = Path(folder) / place.name
        for threads in (("-fopenmp",), ()):
            try:
                compile_into(made, cc, threads)
                if check:
                    ctypes.CDLL(str(made))
                break
            except (OSError, subprocess.SubprocessError):
                if not threads:
                    raise
        made.replace(place)
    return place


def compile_into(made: Path, cc: str, threads: Sequence[str]) -> None:
    """Run the compiler once for each level, all at a time, and then the linker."""
    levels = LEVELS if X86 else {"plain": LEVELS["plain"]}
    objects = {name: made.with_name(f"{name}.o") for name in levels}
    jobs = [
        subprocess.Popen(
            [cc, *FLAGS, *threads, *levels[name][1], f"-DNAME={name}", "-c", str(SOURCE), "-o", str(file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, file in objects.items()
    ]
    failed = sum(job.wait() != 0 for job in jobs)
    if failed:
        raise subprocess.CalledProcessError(failed, cc)
    subprocess.run([cc, "-shared", "-o", str(made), *map(str, objects.values())], check=True, capture_output=True)
