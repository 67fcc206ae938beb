"""The formats that hold a network's state in a safetensors file, which `pm.load` reads into an ordinary network."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from ..sparse import decompress, load, save
from ..sparse.files import METADATA_KEY
from .comparison import require_equal_states
from .example import flatten_outputs
from .files import Loaded

DENSE_RUNTIME = "torch with dense weights"

Architecture = Mapping[str, Any] | str | None  # as `pm.save` takes it


def write_state(
    model: nn.Module, file: Path, architecture: Architecture, encoding: str | None = None, reason: str = ""
) -> Loaded:
    """Write the dense state of a network, encoded or not, load it back and require equal values."""
    plain = decompress(model)
    save(plain, file, architecture, encoding=encoding)
    loaded = load(file, copy.deepcopy(plain)).to(next(plain.parameters()).device)
    require_equal_states(str(file), plain.state_dict(), loaded.state_dict())
    packed = None if encoding is None else count_encoded(file)
    return Loaded(lambda example: list(flatten_outputs(example.call(loaded)).values()), DENSE_RUNTIME, packed, reason)


def count_encoded(file: Path) -> int:
    """Return the number of encoded weights in a file of `pm.save`."""
    with safe_open(file, "pt") as stored:
        return len(json.loads(stored.metadata()[METADATA_KEY])["encoded"])
