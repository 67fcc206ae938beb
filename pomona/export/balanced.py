"""The format `balanced`: packed weights of balanced blocks, which Pomona's kernels run on."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import require
from ..sparse import Compression, compress, decompress, load, save
from ..sparse.layers import PackedLayer
from .example import Example, flatten_outputs
from .files import Loaded
from .state_file import DENSE_RUNTIME, Architecture

STAYED_DENSE = "every layer is faster with dense weights here; policy='all' packs them nevertheless"


def write(
    model: nn.Module,
    example: Example | None,
    file: Path,
    *,
    architecture: Architecture = None,
    dtype: torch.dtype | None = None,
    policy: str = "faster",
    block: int | None = None,
    seconds: float = 1.0,
) -> Loaded:
    """Write a network with packed weights, compressed by `pm.compress` where it is not yet.

    A single tensor as the example is the input that layers are timed on. Raise PomonaError where no layer has balanced
    blocks.
    """
    small = model
    if not any(isinstance(module, PackedLayer) for module in model.modules()):
        batch = example.args[0] if example and len(example.args) == 1 else None
        timed_on = batch if isinstance(batch, Tensor) else None
        small = compress(
            model, timed_on, block=block, dtype=dtype, policy=policy, patience=seconds, formats=["balanced"]
        )
    outcome: Compression | None = getattr(small, "compression", None)
    if outcome is not None:
        require(
            any(layer.block is not None for layer in outcome.layers),
            "the network has no layer with balanced blocks among its Linear, Conv2d and LSTM layers: "
            'train with pattern="balanced(block=32)".',
        )
    save(small, file, architecture)
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    loaded = load(file, copy.deepcopy(decompress(model))).eval().to(device)
    layers = [module for module in loaded.modules() if isinstance(module, PackedLayer)]
    return Loaded(
        lambda example: list(flatten_outputs(example.call(loaded)).values()),
        "Pomona's kernels" if layers else DENSE_RUNTIME,
        sum(len(layer.shapes) for layer in layers),
        STAYED_DENSE,
        compression=outcome,
        half=any(packed.dtype != torch.float32 for layer in layers for _, packed in layer.packed_weights()),
    )
