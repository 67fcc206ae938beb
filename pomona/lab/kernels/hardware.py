"""The name of the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Return the model name of the processor, or what Python knows of it where /proc/cpuinfo has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
