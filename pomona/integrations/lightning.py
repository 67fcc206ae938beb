"""Prune in the `Trainer` of Lightning."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from ..core import carried_state
from ..errors import PomonaError, require
from .trainer_pruning import TrainerPruning, count_epoch_steps, find_owners, refuse_sharding

PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # two names of the same library


def import_callback() -> Any:
    """Return the base class of callbacks, of the package that is imported already where that is one of the two."""
    for package in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ImportError):
            return importlib.import_module(package).Callback
    raise PomonaError("PruningCallback needs Lightning: pip install 'pomona[lightning]'.")


Callback: Any = import_callback()


class PruningCallback(TrainerPruning, Callback):
    """Prune a `LightningModule` while a Lightning `Trainer` trains it.

        Trainer(max_epochs=10, callbacks=[PruningCallback(pm.DPF(sparsity=0.9))])

    The callback attaches the pruner when training begins and finishes it when training ends, so that the module holds
    exact zeros. Checkpoints hold the pruner's state: `trainer.fit(module, ckpt_path=…)` continues bit for bit.
    `sparsity` is logged. A best model counts from the step at which the final sparsity is reached, for
    `ModelCheckpoint(monitor=…)` and `EarlyStopping`. With manual optimization, give the `total_steps` of the optimizer
    if it does not step once a batch.
    """

    has_begun = False  # whether the fit under way has trained
    was_at_target = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.has_begun = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        refuse_sharding(type(trainer.strategy).__name__)
        total, step = trainer.estimated_stepping_batches, trainer.global_step
        per_epoch = count_epoch_steps(trainer.num_training_batches, trainer.accumulate_grad_batches)
        self.begin(pl_module, self._choose_optimizer(pl_module, trainer.optimizers), total, per_epoch, step)
        self.was_at_target = self.is_at_target
        self.has_begun = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if self.is_at_target and not self.was_at_target:
            forget_best(trainer)
        self.was_at_target = self.is_at_target
        if self.pruner.step % max(trainer.log_every_n_steps, 1) == 0:
            self._log_sparsity(pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._log_sparsity(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        loader = trainer.train_dataloader
        # Batches go to `forward`, which a LightningModule need not have.
        usable = isinstance(loader, DataLoader) and has_forward(pl_module)
        self.end(loader if usable else None)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        # Lightning skips training where the checkpoint was saved after the last step: only finish() is left.
        if not self.has_begun and carried_state.list_waiting(trainer.optimizers):
            self.on_train_start(trainer, pl_module)
            self.on_train_end(trainer, pl_module)

    @property
    def is_at_target(self) -> bool:
        """Whether the masks have the final sparsity."""
        return self.pruner.reached >= self.pruner.method.final_sparsity

    def _log_sparsity(self, module: Any) -> None:
        if self.is_attached:
            module.log("sparsity", float(self.pruner.sparsity()))

    def _choose_optimizer(self, module: nn.Module, optimizers: list[Any]) -> Any:
        """Return the one optimizer that moves what is pruned."""
        owners = find_owners(module, self.pruner, optimizers)
        require(
            len(owners) < 2,
            f"{len(owners)} optimizers of the module move parameters to prune, and Lightning does not say in which "
            "order they step: choose the layers of one with include=[…], or call pruner.attach(module, optimizers, "
            "total_steps=…) in on_train_start with the optimizers in that order.",
        )
        return (owners or optimizers)[0]


def forget_best(trainer: Any) -> None:
    """Let checkpoints and early stopping of a trainer find a new best model; files stay."""
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "monitor", None) is not None and hasattr(callback, "best_k_models"):
            callback.best_k_models = {}
            callback.best_model_path = callback.kth_best_model_path = ""
            callback.best_model_score = callback.current_score = None
    for callback in trainer.early_stopping_callbacks:
        worst = float("inf") if callback.mode == "min" else -float("inf")
        callback.wait_count, callback.best_score = 0, callback.best_score.new_tensor(worst)


def has_forward(module: nn.Module) -> bool:
    """Return whether a LightningModule defines `forward`."""
    return type(module).forward.__module__.split(".")[0] not in {name.split(".")[0] for name in PACKAGES}
