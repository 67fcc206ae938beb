"""Exporting the network of a finished run, in any format of `pm.export`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ...core.method import METHODS
from ...core.score_method import ScoreMethod
from ...errors import PomonaError, unknown_name_error
from ...export import FORMATS, ExportReport, export
from ...export.ticket import DrawnWeights
from ...sparse import ticket as tickets
from . import checkpoint, masks
from .folder import MODEL_FILE
from .model_file import read_model_options
from .shrink import load_finished_model


def export_run(
    run: Path,
    file_format: str = "balanced",
    out: Path | None = None,
    *,
    note: Callable[[str], Any] = warnings.warn,
    **options: Any,
) -> ExportReport:
    """Write the network of a run to a file, by default in the folder of the run, and return the report of `pm.export`.

    The example is a batch of one sample of zeros. Files of the state name the network, so that `pm.load` builds it.
    """
    if file_format not in FORMATS:
        raise unknown_name_error("format", file_format, FORMATS)
    model, shape = load_finished_model(run)
    chosen = FORMATS[file_format]
    if "architecture" in chosen.options:
        options["architecture"] = read_model_options(run / MODEL_FILE)
    if file_format == "ticket":
        options["pruner"] = read_drawn_weights(run, model)
    file = run / chosen.file_name if out is None else out
    return export(model, file, file_format, shape, note=note, **options)


def read_drawn_weights(run: Path, model: nn.Module) -> DrawnWeights:
    """Return the random weights of a run of a score method; raise PomonaError for another method."""
    pruner = checkpoint.load(run)["optimizer"].get("pomona")
    method = None if pruner is None else METHODS.resolve(pruner["method"])
    if not isinstance(method, ScoreMethod):
        raise PomonaError(
            f"the last stage of '{run}' trained weights: a ticket holds random ones (edge_popup, iterand, no finetune)."
        )
    kept, fan_in = masks.load(run), {target.name: target.fan_in for target in method.targets(model)}
    drawn = {name: tickets.DrawnTensor(fan_in[name], mask, pruner["drawn"].get(name)) for name, mask in kept.items()}
    return DrawnWeights(method, drawn)
