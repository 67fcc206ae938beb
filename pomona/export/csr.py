"""The format `csr`: the state of a network with sparse weights as compressed sparse rows, for any pattern of zeros."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from .example import Example
from .files import Loaded
from .state_file import Architecture, write_state


def write(model: nn.Module, example: Example | None, file: Path, *, architecture: Architecture = None) -> Loaded:
    """Write the state, with every weight as compressed sparse rows that takes fewer bytes so."""
    return write_state(model, file, architecture, "csr", "no weight has enough zeros to be smaller without them")
