"""The model file of a finished run: safetensors whose metadata name the network and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from pomona import models
from pomona.errors import require
from pomona.sparse.files import require_plausible_options
from pomona.untrusted import parse_json, read_object, read_tensor_metadata, read_tensors, reading, require_object


def read_model_options(file: Path) -> dict[str, Any]:
    """Return the name and the options of the network of a model file; raise PomonaError if it is damaged."""
    with reading(f"the model '{file}'"):
        return require_object(parse_json(read_tensor_metadata(file)["pomona"]))


def load_model(file: Path) -> nn.Module:
    """Return the trained network of a model file; raise PomonaError if it is damaged or does not fit its network."""
    options = read_model_options(file)
    with reading(f"the model '{file}'"):
        _, tensors = read_tensors(file)
        require_plausible_options(file, options, sum(tensor.nbytes for tensor in tensors.values()))
        return models.build_for_state(f"the model '{file}'", options, tensors)


def read_input_shape(file: Path) -> list[int]:
    """Return the shape of one input from the facts that a run has recorded; raise PomonaError if they are damaged."""
    with reading(f"'{file}'"):
        shape = read_object(file)["data"]["input_shape"]
        valid = isinstance(shape, list) and len(shape) <= 4 and all(type(n) is int and 1 <= n <= 1 << 16 for n in shape)
        require(valid, f"'{file}' has the input shape {str(shape)[:60]!r}, which is none of a data set.")
        return shape
