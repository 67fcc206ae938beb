"""Resumed runs under training stacks that load weights and optimizer before their callbacks can attach a pruner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import make_soft
from engine_helpers import Net, is_identical, make_batch, make_sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import pomona as pm

TOTAL = 24
SAVED = 10


def make_pruner() -> pm.Pruner:
    """Return the pruner of these runs, which updates its masks every four steps."""
    return make_soft(schedule="cubic")


def test_accelerate_loads_before_attach(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(folder: Path, stop: int, resume: bool) -> tuple[Net, pm.Pruner]:
        accelerator = accelerate.Accelerator(cpu=True)
        model = Net(seed=7 if resume else 0).double()
        model, optimizer = accelerator.prepare(model, make_sgd(model))
        if resume:
            accelerator.load_state(str(folder))
        pruner = make_pruner().attach(model, optimizer, total_steps=TOTAL)
        assert pruner.step == (SAVED if resume else 0)
        for step in range(pruner.step, stop):
            x, y = make_batch(step)
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if step + 1 == SAVED:
                accelerator.save_state(str(folder))
        return model, pruner

    whole, pruner = train(tmp_path / "whole", TOTAL, resume=False)
    train(tmp_path / "stopped", SAVED, resume=False)
    resumed, resumed_pruner = train(tmp_path / "stopped", TOTAL, resume=True)
    assert is_identical(resumed.state_dict(), whole.state_dict())
    assert is_identical(resumed_pruner.state_dict(), pruner.state_dict())


@pytest.mark.filterwarnings("ignore::Warning:lightning")
def test_lightning_loads_before_on_train_start(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.net = Net(seed).double()

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = make_batch(self.trainer.global_step)  # Lightning begins the epoch's data again
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return make_sgd(self.net)

    class Prune(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.pruner = make_pruner().attach(module.net, trainer.optimizers[0], total_steps=TOTAL)
            self.start = self.pruner.step

    def train(seed: int, steps: int, resume: str | None = None) -> tuple[Any, Prune]:
        module, prune = Module(seed), Prune()
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=steps, max_epochs=2, callbacks=[prune], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, DataLoader(range(TOTAL)), ckpt_path=resume)  # type: ignore[arg-type]
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return module, prune

    whole, prune = train(0, TOTAL)
    train(0, SAVED)
    resumed, resumed_prune = train(7, TOTAL, str(tmp_path / f"{SAVED}.ckpt"))
    assert (prune.start, resumed_prune.start) == (0, SAVED)
    assert is_identical(resumed.state_dict(), whole.state_dict())
    assert is_identical(resumed_prune.pruner.state_dict(), prune.pruner.state_dict())


def test_transformers_loads_before_on_train_begin(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.net = Net(seed).double()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.net(x[0])
            return {"loss": F.cross_entropy(logits, labels[0]), "logits": logits}

    class Named(Dataset[Any]):
        def __len__(self) -> int:
            return TOTAL

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            x, y = make_batch(index)
            return {"x": x, "labels": y}

    class Prune(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
            self.pruner = make_pruner().attach(model, optimizer, total_steps=TOTAL)
            self.start = self.pruner.step

    def train(seed: int, resume: str | None = None) -> tuple[Any, Prune]:
        model, prune = Model(seed), Prune()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=TOTAL, per_device_train_batch_size=1, optim="adamw_torch",
            save_strategy="steps", save_steps=SAVED, report_to=[], disable_tqdm=True, seed=0, logging_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=Named(), callbacks=[prune])
        trainer.train(resume_from_checkpoint=resume)
        return model, prune

    whole, prune = train(0)
    resumed, resumed_prune = train(7, str(tmp_path / f"checkpoint-{SAVED}"))
    assert (prune.start, resumed_prune.start) == (0, SAVED)
    assert is_identical(resumed.state_dict(), whole.state_dict())
    assert is_identical(resumed_prune.pruner.state_dict(), prune.pruner.state_dict())
