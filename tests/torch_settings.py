"""torch's global settings: read, write, and restore them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def restored_torch_settings() -> Iterator[None]:
    """Restore torch's global settings at the end of a `with` block."""
    before = read_torch_settings()
    try:
        yield
    finally:
        if read_torch_settings() != before:
            write_torch_settings(before)


def read_torch_settings() -> dict[str, Any]:
    """Return torch's global settings that a test may change."""
    cudnn = torch.backends.cudnn
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "cudnn": {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")},
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def write_torch_settings(settings: dict[str, Any]) -> None:
    """Set torch's global settings to what `read_torch_settings` returned."""
    torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(settings["dtype"])
    torch.set_grad_enabled(settings["grad"])
    torch.set_deterministic_debug_mode(settings["deterministic"])
    for name, value in settings["cudnn"].items():
        setattr(torch.backends.cudnn, name, value)
    torch.backends.cuda.matmul.allow_tf32 = settings["matmul_tf32"]
