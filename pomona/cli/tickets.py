"""`export --format ticket`: a finished run of a score method as its seed, and what the seed cannot tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TICKET = "model.ticket"


def export_ticket(run: Path, out: Path | None = None) -> dict[str, Any]:
    """Write the ticket of a run's network to `out`, or into its folder, and tell how small it is.

    `pomona.sparse.ticket.load(FILE).build()` is the network again.
    """
    from safetensors import safe_open

    from pomona.core.errors import require
    from pomona.core.method import METHODS
    from pomona.lab import checkpoint, masks
    from pomona.lab.shrink import finished_model
    from pomona.sparse import ticket

    model = finished_model(run)[0]
    pruner = checkpoint.load(run)["optimizer"].get("pomona")
    method = None if pruner is None else METHODS.make(pruner["method"])
    require(
        method is not None and method.weights == "score",
        f"the last stage of '{run}' trained weights: a ticket holds random ones (edge_popup, iterand, no finetune).",
    )
    kept, fan_in = masks.load(run), {target.name: target.fan_in for target in method.targets(model)}  # type: ignore[union-attr]
    drawn = {name: ticket.Drawn(fan_in[name], mask, pruner["drawn"].get(name)) for name, mask in kept.items()}
    with safe_open(run / "model.safetensors", "pt") as stored:
        built = json.loads(stored.metadata()["pomona"])
    data = ticket.dumps(model.state_dict(), drawn, method.stream, built)  # type: ignore[union-attr]
    place = run / TICKET if out is None else out
    checkpoint.replace(place, data)
    whole = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    return {
        "file": str(place),
        "method": method.name,  # type: ignore[union-attr]
        "seed": method.stream.seed,  # type: ignore[union-attr]
        "distribution": method.stream.distribution,  # type: ignore[union-attr]
        "sparsity": 1 - sum(int(m.sum()) for m in kept.values()) / sum(m.numel() for m in kept.values()),
        "bytes": len(data),
        "state_bytes": whole,
        "ratio": whole / len(data),
    }
