"""The format `2:4`: the state of a network with 2:4 weights as values and two-bit places."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from .example import Example
from .files import Loaded
from .state_file import Architecture, write_state


def write(model: nn.Module, example: Example | None, file: Path, *, architecture: Architecture = None) -> Loaded:
    """Write the state, with every weight packed that has at most two nonzeros in every four along its rows."""
    reason = "no weight has at most two nonzeros in every four; prune with pattern=pm.NM(2, 4)"
    return write_state(model, file, architecture, "2:4", reason)
