"""The format `torch-export`: a program that `torch.export.load(FILE).module()` runs without the network's code."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..sparse.layers import PackedLayer
from .example import Example, flatten_outputs
from .files import Loaded
from .tracing import ignored_warnings, trace


def write(model: nn.Module, example: Example, file: Path, *, dynamic_batch: bool = True) -> Loaded:
    """Write the program of a network. The program of a compressed network needs `import pomona` for its operators."""
    program = trace(model, example, dynamic_batch)
    with ignored_warnings():
        torch.export.save(program, file)
        loaded = torch.export.load(file).module()
    packed = sum(len(module.shapes) for module in model.modules() if isinstance(module, PackedLayer))
    return Loaded(
        lambda example: list(flatten_outputs(example.call(loaded)).values()),
        "torch.export with Pomona's kernels" if packed else "torch.export",
        packed or None,
        dynamic_batch=dynamic_batch,
    )
