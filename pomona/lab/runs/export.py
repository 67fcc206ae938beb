"""Write a finished run's network in a form of its own: packed weights, or a ticket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...core.method import METHODS
from ...core.score_method import ScoreMethod
from ...errors import PomonaError, require
from ...sparse import Compression, compress, save
from ...sparse import ticket as tickets
from . import checkpoint, masks
from .shrink import finished_model

FORMATS = {"balanced": "balanced.safetensors", "ticket": "model.ticket"}  # with the names of their files


def balanced(
    run: Path,
    out: Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    keep: str = "faster",
    patience: float = 1.0,
) -> tuple[Compression, Path]:
    """What became of each layer, and the file, which `pm.load` turns into a network again."""
    model, shape = finished_model(run)
    small = compress(model, shape, dtype=dtype, keep=keep, patience=patience)
    report: Compression = small.compression  # type: ignore[assignment]
    require(
        any(layer.block is not None for layer in report.layers),
        f"'{run}' has no layer with balanced blocks: train with method.pattern = \"balanced(block=32)\".",
    )
    return report, save(small, run / FORMATS["balanced"] if out is None else out, built(run))


def ticket(run: Path, out: Path | None = None) -> dict[str, Any]:
    """Write the ticket of a run of a score method, and tell how small it is.

    It is the seed, and what the seed cannot tell; `pomona.sparse.ticket.load(FILE).build()` is the network again.
    """
    model = finished_model(run)[0]
    pruner = checkpoint.load(run)["optimizer"].get("pomona")
    method = None if pruner is None else METHODS.resolve(pruner["method"])
    if not isinstance(method, ScoreMethod):
        raise PomonaError(
            f"the last stage of '{run}' trained weights: a ticket holds random ones (edge_popup, iterand, no finetune)."
        )
    kept, fan_in = masks.load(run), {target.name: target.fan_in for target in method.targets(model)}
    drawn = {name: tickets.DrawnTensor(fan_in[name], mask, pruner["drawn"].get(name)) for name, mask in kept.items()}
    data = tickets.dumps(model.state_dict(), drawn, method.stream, built(run))
    file = run / FORMATS["ticket"] if out is None else out
    checkpoint.replace(file, data)
    whole = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    return {
        "file": str(file),
        "method": method.name,
        "seed": method.stream.seed,
        "distribution": method.stream.distribution,
        "sparsity": 1 - sum(int(m.sum()) for m in kept.values()) / sum(m.numel() for m in kept.values()),
        "bytes": len(data),
        "state_bytes": whole,
        "ratio": whole / len(data),
    }


def built(run: Path) -> dict[str, Any]:
    """Name and options of a run's model."""
    with safe_open(run / "model.safetensors", "pt") as stored:
        return dict(json.loads(stored.metadata()["pomona"]))
