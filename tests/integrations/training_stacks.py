"""One training in four stacks: a plain loop, accelerate, Lightning and the Trainer of Hugging Face.

Each function trains the same classifier on the same batches, two batches a step, and saves checkpoints. What it
returns must be equal to the last bit in all of them, also where the process was killed and resumed.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_helpers import Net, make_batch, make_sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import pomona as pm

EPOCHS = 4
EPOCH_BATCHES = 12
ACCUMULATED = 2
EPOCH_STEPS = EPOCH_BATCHES // ACCUMULATED
STEPS = EPOCHS * EPOCH_STEPS
KILLED_AT = 2 * EPOCH_BATCHES + 7  # a batch within the third epoch, after the checkpoint of the second

MakePruner = Callable[[], pm.Pruner]


class Batches(Dataset[Any]):
    """The batches of an epoch, by name."""

    def __len__(self) -> int:
        return EPOCH_BATCHES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = make_batch(index)
        return {"x": x, "labels": y}


class Classifier(nn.Module):
    """The network with its loss. It kills its process before the training batch with the number `killed_at`."""

    def __init__(self, seed: int = 0, train_norm: bool = True, killed_at: int | None = None) -> None:
        super().__init__()
        self.net = Net(seed).double()
        self.net.norm.requires_grad_(train_norm)
        self.killed_at, self.batches = killed_at, 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.batches += self.training
        if self.batches == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def make_classifier(pruner: pm.Pruner, kind: type[Classifier] = Classifier, **options: Any) -> Classifier:
    """Return the classifier that a pruner can prune: a score method trains no norm."""
    return kind(train_norm=pruner.method.weights != "score", **options)


def describe(model: nn.Module, pruner: pm.Pruner) -> dict[str, Any]:
    """Return what must be the same in every stack."""
    assert pruner.finished
    return {"weights": model.state_dict(), "masks": pruner.masks(), "history": pruner.history, "step": pruner.step}


def make_loader() -> DataLoader[Any]:
    """Return a loader of the batches in their order."""
    return DataLoader(Batches(), batch_size=None)


def train_plain(make_pruner: MakePruner, folder: Path, resume: bool = False, killed_at: int | None = None) -> Any:
    """Train with a loop of our own."""
    pruner = make_pruner()
    model = make_classifier(pruner, seed=7 if resume else 0, killed_at=killed_at)
    optimizer = make_sgd(model)
    start = 0
    if resume:
        saved = torch.load(folder / "plain.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    pruner.attach(model, optimizer, total_steps=STEPS)
    for epoch in range(start, EPOCHS):
        for index, batch in enumerate(make_loader()):
            (model(**batch)["loss"] / ACCUMULATED).backward()
            if index % ACCUMULATED == ACCUMULATED - 1:
                optimizer.step()
                optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, folder / "plain.pt")
    pruner.finish(make_loader())
    return describe(model, pruner)


def train_accelerate(make_pruner: MakePruner, folder: Path, resume: bool = False, killed_at: int | None = None) -> Any:
    """Train with accelerate, in a loop as its documentation has it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    pruner = make_pruner()
    model = make_classifier(pruner, seed=7 if resume else 0, killed_at=killed_at)
    model, optimizer, loader = accelerator.prepare(model, make_sgd(model), make_loader())
    if resume:
        accelerator.load_state(str(folder / "accelerate"))
    pruner.attach(model, optimizer, total_steps=STEPS)
    for _ in range(pruner.step // EPOCH_STEPS, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(str(folder / "accelerate"))
    pruner.finish(loader)
    return describe(accelerator.unwrap_model(model), pruner)


def train_lightning(make_pruner: MakePruner, folder: Path, resume: bool = False, killed_at: int | None = None) -> Any:
    """Train with Lightning and its callback."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from pomona.integrations.lightning import PruningCallback

    class Module(Classifier, LightningModule):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return self(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self(**batch)["loss"], batch_size=6)

        def configure_optimizers(self) -> Any:
            return make_sgd(self)

    callback = PruningCallback(make_pruner())
    module = make_classifier(callback.pruner, Module, seed=7 if resume else 0, killed_at=killed_at)
    checkpoint = ModelCheckpoint(folder, filename="lightning", enable_version_counter=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer = Trainer(
            accelerator="cpu", max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATED, callbacks=[callback, checkpoint],
            logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, make_loader(), make_loader(), ckpt_path=folder / "lightning.ckpt" if resume else None)
    return describe(module, callback.pruner)


def train_huggingface(make_pruner: MakePruner, folder: Path, resume: bool = False, killed_at: int | None = None) -> Any:
    """Train with the Trainer of Hugging Face and its callback."""
    from pomona.integrations.huggingface import PruningCallback

    callback = PruningCallback(make_pruner())
    model = make_classifier(callback.pruner, seed=7 if resume else 0, killed_at=killed_at)
    trainer = make_huggingface_trainer(model, folder, callbacks=[callback], save_strategy="epoch")
    trainer.train(resume_from_checkpoint=resume or None)
    return describe(model, callback.pruner)


def make_huggingface_trainer(
    model: nn.Module, folder: Path, callbacks: list[Any], kind: Any = None, **options: Any
) -> Any:
    """Return a Hugging Face trainer that takes the batches in their order, and evaluates every five steps."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**{
        "output_dir": str(folder / "huggingface"), "use_cpu": True, "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": ACCUMULATED, "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential", "eval_strategy": "steps", "eval_steps": 5, "report_to": [],
        "disable_tqdm": True, "logging_steps": 1, "dataloader_pin_memory": False, **options,
    })  # fmt: skip
    return (kind or Trainer)(
        model, arguments, data_collator=lambda items: items[0], train_dataset=Batches(), eval_dataset=Batches(),
        optimizers=(make_sgd(model), None), callbacks=callbacks,
    )  # fmt: skip


STACKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "plain": ("torch", train_plain),
    "accelerate": ("accelerate", train_accelerate),
    "lightning": ("lightning", train_lightning),
    "huggingface": ("transformers", train_huggingface),
}


def train_until_killed(train: Callable[..., Any], make_pruner: MakePruner, folder: Path) -> None:
    """Train in a process that is killed within the third epoch."""
    process = os.fork()  # not a new interpreter: the libraries take seconds to import
    if process == 0:
        try:
            train(make_pruner, folder, killed_at=KILLED_AT)
        finally:
            os._exit(1)
    status = os.waitpid(process, 0)[1]
    assert os.WIFSIGNALED(status), "the process ended before it was killed"
    assert os.WTERMSIG(status) == signal.SIGKILL
