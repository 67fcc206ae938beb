"""What this machine is and has: for `env.json`, for a run's summary and for `pomona check`."""

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

PACKAGES = ("numpy", "scipy", "safetensors", "scikit-learn", "typer", "rich", "triton")


def describe_environment() -> dict[str, Any]:
    """Versions, machine and commit, as plain values."""
    return {
        "versions": package_versions(),
        "machine": describe_machine(),
        "commit": current_commit(),
        "command": command_line(),
    }


def package_versions() -> dict[str, str | None]:
    """Versions of pomona, Python and what they run on; None where a package is missing."""
    return {
        "pomona": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,  # which build it is, too
        **{name: _package_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None,
    }


def describe_machine() -> dict[str, Any]:
    """Processor, cores, threads, and the GPUs with their memory."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [_describe_gpu(i) for i in range(torch.cuda.device_count())],
    }


@functools.cache
def current_commit() -> str | None:
    """The commit this code was run from, with "+" where the tree had changes.

    A copy without git (on a cluster's node, say) is told it in POMONA_COMMIT; else it is None.
    """
    if told := os.environ.get("POMONA_COMMIT"):
        return told
    root = Path(__file__).resolve().parents[3]
    head = _run_git(root, "rev-parse", "--short=12", "--show-toplevel", "HEAD")
    if head is None or Path(head.splitlines()[0]) != root:  # an installed copy inside another repository
        return None
    dirty = _run_git(root, "status", "--porcelain", "--untracked-files=no")
    return head.splitlines()[1] + ("+" if dirty else "")


def command_line() -> str:
    """The command line of this process; of paths from the root, which tell of a machine, the last part alone."""
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in sys.argv)


def _package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _describe_gpu(index: int) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(index)
    return {
        "name": gpu.name,
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "capability": f"{gpu.major}.{gpu.minor}",
    }


def _run_git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
