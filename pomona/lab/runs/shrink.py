"""Physical removal of the pruned filters of a finished run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ...durable import rename_files
from ...errors import require
from ...sparse import Shrunk
from ...sparse import shrink as shrink_model
from .durable_files import write_errors
from .folder import ENVIRONMENT_FILE, MODEL_FILE
from .model_file import load_model, read_input_shape

SHRUNK_FILE = "shrunk.pt2"


def shrink_run(run: Path, out: Path | None = None) -> tuple[Shrunk, Path]:
    """Write the network of a run without its pruned filters, and return it with the file.

    The file is an exported program: `torch.export.load(FILE).module()` runs it with any batch size and without
    Pomona.
    """
    model, shape = load_finished_model(run)
    shrunk = shrink_model(model, shape, latency=True)
    file = run / SHRUNK_FILE if out is None else out
    example = torch.zeros(2, *shape)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(shrunk.model.eval(), (example,), dynamic_shapes=({0: batch},))
    partial = file.with_name(file.name + ".partial.pt2")
    with write_errors(file.parent):
        try:
            torch.export.save(program, partial)
            rename_files({partial: file})
        finally:
            partial.unlink(missing_ok=True)
    return shrunk, file


def load_finished_model(run: Path) -> tuple[nn.Module, list[int]]:
    """Return the trained network of a finished run and the shape of one input; raise PomonaError if it is not one."""
    file = run / MODEL_FILE
    require(file.is_file(), f"'{run}' is not a finished run: it has no {file.name}; pomona train makes one.")
    return load_model(file).eval(), read_input_shape(run / ENVIRONMENT_FILE)
