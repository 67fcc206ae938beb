"""A small table that the tests of tables load and fill."""

from __future__ import annotations

from pathlib import Path

from pomona.lab.tables.definitions import load_table
from pomona.lab.tables.paper_table import PaperTable

SMALL_TABLE = """
title = "digits"
paper = "nobody, table 0"
seeds = [0, 1]
queue = ["wide", "DPF"]
show = ["cost"]
names = { "method.settle" = "settle" }

[columns]
dense = { method = "dense" }
"one-shot + FT" = { from = "dense", method = "oneshot", "optimizer.lr" = 0.02 }
DPF = { "method.settle" = 0 }
"DPF + FT" = { "method.settle" = 0, "finetune.epochs" = 1 }
again = { from = "DPF", retrain = "init", budget = "flops" }

[[part]]
label = "narrow"
rows = { "method.sparsity" = [0.5, 0.8] }
columns = ["dense", "one-shot + FT", "DPF", "again"]
[part.recipe]
data = "digits"
model = "mlp(hidden=[8])"
method = "dpf(every=2)"
train = { epochs = 1, batch_size = 450, device = "cpu" }
[part.paper]
dense = "95.01 ± 0.04"
DPF = ["*", "90.00 ± 0.10"]

[[part]]
label = "wide"
set = { "model.hidden" = [16] }
rows = { "method.sparsity" = [0.5] }
columns = ["DPF", "DPF + FT"]
[part.recipe]
data = "digits"
model = "mlp(hidden=[8])"
method = "dpf(every=2)"
train = { epochs = 1, batch_size = 450, device = "cpu" }
[part.paper]
DPF = ["88.0"]
"""


def load_small_table(folder: Path, text: str = SMALL_TABLE, *overrides: str) -> PaperTable:
    """Return the table defined by a text, written to a file in a folder."""
    (folder / "small.toml").write_text(text)
    return load_table(folder / "small.toml", overrides)
