"""What the tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pomona import lab

SMALL_RECIPE = """
data = "digits"
model = "digits_cnn(rho=0.5)"
method = "dpf(sparsity=0.9, every=2)"

[train]
epochs = 4
batch_size = 256
device = "cpu"
"""


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def interrupt_run(folder: str, steps: int, *settings: str) -> None:
    """Train small.toml in a folder and stop after some steps; an epoch has six."""
    left = iter(range(steps - 1))
    with pytest.raises(lab.Interrupted):
        lab.train(lab.Recipe.load("small.toml", settings), folder, stop=lambda: next(left, None) is None)


SMALL_TABLE = """
title = "digits"
paper = "nobody, table 0"
seeds = [0]
columns = { dense = { method = "dense" }, DPF = { "method.settle" = 0 } }

[[part]]
label = "CNN"
rows = { "method.sparsity" = [0.5] }
recipe = { data = "digits", model = "digits_cnn(rho=0.5)", method = "dpf(every=2)" }
set = { "train.epochs" = 1, "train.batch_size" = 256, "train.device" = "cpu" }
paper = { dense = "95.01 ± 0.04", DPF = "*" }
"""
