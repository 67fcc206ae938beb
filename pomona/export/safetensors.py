"""The format `safetensors`: the plain state of a network, zeros included."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from .example import Example
from .files import Loaded
from .state_file import Architecture, write_state


def write(model: nn.Module, example: Example | None, file: Path, *, architecture: Architecture = None) -> Loaded:
    """Write the state. Any reader of safetensors finds the names and shapes of `model.state_dict()`."""
    return write_state(model, file, architecture)
