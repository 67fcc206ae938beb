"""Compilation of C files, with nothing but the standard library, so that the package's install can use it."""

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

PACKAGE = Path(__file__).parents[1]
STEP_SOURCE = PACKAGE / "native" / "step_kernels.c"  # the engine's step
PRIVATE_SOURCE = PACKAGE / "native" / "private_kernels.c"  # a private step
PRODUCT_SOURCE = PACKAGE / "sparse" / "cpu" / "kernels.c"  # products with packed matrices
UNSTRUCTURED_SOURCE = PACKAGE / "sparse" / "cpu" / "unstructured.c"  # the same for matrices without blocks
BLOCK_SOURCE = PACKAGE / "sparse" / "cpu" / "blocks.c"  # the same for matrices of dense blocks
QUANTIZED_SOURCE = PACKAGE / "sparse" / "cpu" / "quantized.c"  # the same for packed values of few bits
CONVOLUTION_SOURCE = PACKAGE / "sparse" / "cpu" / "convolution.c"  # convolutions with matrices without blocks
NETWORK_SOURCE = PACKAGE / "sparse" / "cpu" / "network_kernels.c"  # networks of such convolutions
SNAPSHOT_SOURCE = PACKAGE / "sparse" / "cpu" / "snapshot.c"  # comparisons of a model with its earlier state
# Each becomes a library.
SOURCES = (
    *(STEP_SOURCE, PRIVATE_SOURCE),
    *(PRODUCT_SOURCE, UNSTRUCTURED_SOURCE, BLOCK_SOURCE, QUANTIZED_SOURCE),
    *(CONVOLUTION_SOURCE, NETWORK_SOURCE, SNAPSHOT_SOURCE),
)
WRITABLE_BY_OTHERS = 0o022  # the mode bits of group and others
DIGEST_BYTES = 32  # of the SHA-256 at the end of a library
X86 = platform.machine() in ("x86_64", "AMD64")
# What every x86-64 processor has, whatever a compiler's default is: the wheel's library runs on other machines too.
BASELINE = ("-march=x86-64", "-mtune=generic") if X86 else ()
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", *BASELINE)
# The instruction sets, best first: torch's name for a processor that has it, and the compiler's flags.
INSTRUCTION_SETS = {
    "avx512": (
        "AVX512",
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mbmi2", "-mfma", "-mf16c"),
    ),
    "avx2": ("AVX2", ("-mavx2", "-mfma", "-mf16c")),
    "plain": ("DEFAULT", ()),
}
# Those of products with integers. torch has no name for the best one: its library tells whether a processor has it.
INTEGER_INSTRUCTION_SETS = {
    "avx512vnni": ("AVX512", (*INSTRUCTION_SETS["avx512"][1], "-mavx512vbmi", "-mavx512vnni")),
    **INSTRUCTION_SETS,
}


def find_compiler() -> str | None:
    """Return the path of the C compiler: $CC, else the system's; None where there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)


def installed_library_path(source: Path) -> Path:
    """Return the path of a source's library beside it, where the package's install builds it."""
    return source.with_suffix(".so")


def cached_library_path(source: Path) -> Path:
    """Return a library's path in the user's cache, named by a hash of everything that determines its contents."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    contents = [file.read_bytes() for file in (source, *sorted(source.parent.glob("*.h")))]
    parts = (*contents, repr((FLAGS, INTEGER_INSTRUCTION_SETS, find_compiler(), platform.machine())).encode())
    return Path(root) / "pomona" / f"{source.stem}-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"


def make_private_folder(folder: Path) -> None:
    """Create a folder that only this user can write, or make it one; raise PermissionError where it is another's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_owned(folder):
        raise PermissionError(f"the folder '{folder}' belongs to another user")
    if folder.stat().st_mode & WRITABLE_BY_OTHERS:
        folder.chmod(0o700)


def is_trusted(library: Path) -> bool:
    """Return whether a library exists, is this user's alone and has the contents that were built."""
    if not library.is_file() or not is_owned(library) or library.stat().st_mode & WRITABLE_BY_OTHERS:
        return False
    contents = library.read_bytes()
    return hashlib.sha256(contents[:-DIGEST_BYTES]).digest() == contents[-DIGEST_BYTES:]


def is_owned(path: Path) -> bool:
    """Return whether a file or folder, and no link to one, belongs to the user of this process."""
    return not hasattr(os, "getuid") or (path.lstat().st_uid == os.getuid() and not path.is_symlink())


def build_library(path: Path, source: Path, verify: bool = True) -> Path:
    """Compile a source for every instruction set and link the results into one file; return its path.

    The file appears complete or not at all, and ends with its SHA-256, which the loader ignores. OpenMP is used but not
    linked: torch has one in memory, and two would compete for the cores. With `verify`, the file is therefore tested by
    loading it, which needs a process that has imported torch. Raise FileNotFoundError without a compiler, and
    SubprocessError or OSError where it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("there is no C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        library = Path(folder) / path.name
        for thread_flags in (("-fopenmp",), ()):
            try:
                compile_library(library, source, compiler, thread_flags)
                if verify:
                    ctypes.CDLL(str(library))
                break
            except (OSError, subprocess.SubprocessError):
                if not thread_flags:
                    raise
        with library.open("ab") as file:
            file.write(hashlib.sha256(library.read_bytes()).digest())
        library.chmod(0o755)
        library.replace(path)
    return path


def compile_library(library: Path, source: Path, compiler: str, thread_flags: Sequence[str]) -> None:
    """Run the compiler once for each instruction set, all in parallel, and then the linker."""
    sets = INTEGER_INSTRUCTION_SETS if source == QUANTIZED_SOURCE else INSTRUCTION_SETS
    objects = {name: library.with_name(f"{name}.o") for name in (sets if X86 else ["plain"])}
    command = [compiler, *FLAGS, *thread_flags, "-c", str(source)]
    jobs = [
        subprocess.Popen(
            [*command, *sets[name][1], f"-DNAME={name}", "-o", str(file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, file in objects.items()
    ]
    failed = sum(job.wait() != 0 for job in jobs)
    if failed:
        raise subprocess.CalledProcessError(failed, compiler)
    subprocess.run(
        [compiler, "-shared", "-o", str(library), *map(str, objects.values())], check=True, capture_output=True
    )
