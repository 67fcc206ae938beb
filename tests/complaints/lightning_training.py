"""A small Lightning module and a quiet trainer, shared by the tests of complaints about pruning in Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_helpers import Net, make_batch, make_sgd
from torch.nn import functional as F
from torch.utils.data import DataLoader

STEPS = 8


def make_module(seed: int = 0) -> Any:
    """Return a LightningModule around the small network."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(seed).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = make_batch(index)
            return F.cross_entropy(self(x), y)

        def configure_optimizers(self) -> Any:
            return make_sgd(self)

    return Module()


def fit(module: Any, callback: Any) -> None:
    """Train a module for an epoch with a callback."""
    lightning = pytest.importorskip("lightning")
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(range(STEPS)))  # type: ignore[arg-type]
