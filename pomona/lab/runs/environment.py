"""Facts about the software and the machine, for `env.json`, a run's summary and `pomona check`."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from pomona.version import __version__

from ..kernels.hardware import processor_name

PACKAGES = ("numpy", "scipy", "safetensors", "scikit-learn", "typer", "rich", "triton")


def describe_environment() -> dict[str, Any]:
    """Return versions, machine, commit and command line as plain values."""
    return {
        "versions": package_versions(),
        "machine": describe_machine(),
        "commit": current_commit(),
        "command": command_line(),
    }


def package_versions() -> dict[str, str | None]:
    """Return the versions of pomona, Python and the packages they need; None for a missing package."""
    return {
        "pomona": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,  # including the build
        **{name: _package_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None,
    }


def describe_machine() -> dict[str, Any]:
    """Return the processor, its cores, torch's threads, and the GPUs with their memory."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [_describe_gpu(i) for i in range(torch.cuda.device_count())],
    }


@functools.cache
def current_commit() -> str | None:
    """Return the commit of this code, followed by "+" if the working tree has changes; None if it is unknown.

    The environment variable POMONA_COMMIT sets it for a copy without git, such as on a cluster node.
    """
    if given := os.environ.get("POMONA_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[3]
    head = _run_git(root, "rev-parse", "--short=12", "--show-toplevel", "HEAD")
    if head is None or Path(head.splitlines()[0]) != root:  # an installed copy inside another repository
        return None
    dirty = _run_git(root, "status", "--porcelain", "--untracked-files=no")
    return head.splitlines()[1] + ("+" if dirty else "")


def command_line() -> str:
    """Return the command line of this process; absolute paths, which describe a machine, are cut to their last part."""
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in sys.argv)


def _package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_gpu(index: int) -> dict[str, Any]:
    """Return the name, memory and compute capability of a GPU."""
    gpu = torch.cuda.get_device_properties(index)
    return {
        "name": gpu.name,
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "capability": f"{gpu.major}.{gpu.minor}",
    }


def _run_git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command, or None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
