"""Take the removed filters of a finished run out for good."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ... import models
from ...errors import require
from ...sparse import Shrunk
from ...sparse import shrink as remove
from . import checkpoint

SHRUNK_FILE = "shrunk.pt2"


def shrink_run(run: Path, out: Path | None = None) -> tuple[Shrunk, Path]:
    """The smaller network of a run, and the file it was written to.

    The file is an exported program: `torch.export.load(FILE).module()` runs it, with any batch size and
    without Pomona.
    """
    model, shape = load_finished_model(run)
    shrunk = remove(model, shape, latency=True)
    place = run / SHRUNK_FILE if out is None else out
    example = torch.zeros(2, *shape)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(shrunk.model.eval(), (example,), dynamic_shapes=({0: batch},))
    partial = place.with_name(place.name + ".partial.pt2")
    with checkpoint.write_errors(place.parent):
        torch.export.save(program, partial)
        partial.replace(place)
    return shrunk, place


def load_finished_model(run: Path) -> tuple[nn.Module, list[int]]:
    """The trained network of a run, and the shape of its input."""
    file = run / "model.safetensors"
    require(file.is_file(), f"'{run}' is not a finished run: it has no {file.name}; pomona train makes one.")
    with safe_open(file, "pt") as stored:
        model = models.build(**json.loads(stored.metadata()["pomona"]))
    model.load_state_dict(load_file(file))
    return model.eval(), json.loads((run / "env.json").read_bytes())["data"]["input_shape"]
