"""The model file of a finished run: safetensors whose metadata name the network and its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from pomona import models


def read_model_options(file: Path) -> dict[str, Any]:
    """Return the name and the options of the network of a model file."""
    with safe_open(file, "pt") as stored:
        return dict(json.loads(stored.metadata()["pomona"]))


def load_model(file: Path) -> nn.Module:
    """Return the trained network of a model file."""
    model = models.build(**read_model_options(file))
    model.load_state_dict(load_file(file))
    return model
