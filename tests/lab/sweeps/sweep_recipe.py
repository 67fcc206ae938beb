"""The recipe that the tests of sweeps train: one epoch of three steps."""

from __future__ import annotations

SMALL_RECIPE = {
    "name": "small",
    "data": "digits",
    "model": "mlp(hidden=[8])",
    "train": {"epochs": 1, "batch_size": 450, "device": "cpu"},
}
