"""Exporting the network of a finished run: as packed weights, or as a ticket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...core.method import METHODS
from ...core.score_method import ScoreMethod
from ...errors import PomonaError, require
from ...sparse import Compression, compress, save
from ...sparse import ticket as tickets
from . import checkpoint, masks
from .durable_files import replace_file
from .folder import MODEL_FILE
from .model_file import read_model_options
from .shrink import load_finished_model

FORMATS = {"balanced": "balanced.safetensors", "ticket": "model.ticket"}  # format → file name


def export_balanced(
    run: Path,
    out: Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    keep: str = "faster",
    patience: float = 1.0,
) -> tuple[Compression, Path]:
    """Write the compressed network of a run, and return what became of each layer and the file.

    `pm.load` makes a network of the file again. Raises PomonaError if no layer has balanced blocks.
    """
    model, shape = load_finished_model(run)
    small = compress(model, shape, dtype=dtype, policy=keep, patience=patience)
    report: Compression = small.compression  # type: ignore[assignment]
    require(
        any(layer.block is not None for layer in report.layers),
        f"'{run}' has no layer with balanced blocks: train with method.pattern = \"balanced(block=32)\".",
    )
    return report, save(small, run / FORMATS["balanced"] if out is None else out, read_model_options(run / MODEL_FILE))


def export_ticket(run: Path, out: Path | None = None) -> dict[str, Any]:
    """Write the ticket of a run of a score method, and return its file, size and method.

    A ticket holds the seed of the random weights and what the seed does not determine.
    `pomona.sparse.ticket.load(FILE).build()` makes a network of it again. Raises PomonaError for another method.
    """
    model = load_finished_model(run)[0]
    pruner = checkpoint.load(run)["optimizer"].get("pomona")
    method = None if pruner is None else METHODS.resolve(pruner["method"])
    if not isinstance(method, ScoreMethod):
        raise PomonaError(
            f"the last stage of '{run}' trained weights: a ticket holds random ones (edge_popup, iterand, no finetune)."
        )
    kept, fan_in = masks.load(run), {target.name: target.fan_in for target in method.targets(model)}
    drawn = {name: tickets.DrawnTensor(fan_in[name], mask, pruner["drawn"].get(name)) for name, mask in kept.items()}
    data = tickets.dumps(model.state_dict(), drawn, method.stream, read_model_options(run / MODEL_FILE))
    file = run / FORMATS["ticket"] if out is None else out
    replace_file(file, data)
    state_bytes = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    return {
        "file": str(file),
        "method": method.name,
        "seed": method.stream.seed,
        "distribution": method.stream.distribution,
        "sparsity": 1 - sum(int(m.sum()) for m in kept.values()) / sum(m.numel() for m in kept.values()),
        "bytes": len(data),
        "state_bytes": state_bytes,
        "ratio": state_bytes / len(data),
    }
