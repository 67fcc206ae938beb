"""Prune in the `Trainer` of Hugging Face transformers."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch

from ..core import carried_state
from ..core.state import restore_state
from ..errors import PomonaError, require
from .trainer_pruning import TrainerPruning, count_epoch_steps, refuse_sharding

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise PomonaError("PruningCallback needs transformers: pip install 'pomona[huggingface]'.") from error


class PruningCallback(TrainerPruning, TrainerCallback):
    """Prune a model while a Hugging Face `Trainer` trains it.

        Trainer(model, args, train_dataset=data, callbacks=[PruningCallback(pm.DPF(sparsity=0.9))])

    The callback attaches the pruner when training begins and finishes it when training ends, so that `save_model`
    writes exact zeros. Checkpoints hold the pruner's state: `trainer.train(resume_from_checkpoint=True)` continues bit
    for bit. `sparsity` is logged beside the loss. A best model counts from the step at which the final sparsity is
    reached, for `load_best_model_at_end` and, after this callback in the list, for `EarlyStoppingCallback`.
    """

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any = None,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        refuse_sharding(args.distributed_state.distributed_type.value)
        require(
            not (args.load_best_model_at_end and args.save_only_model),
            "load_best_model_at_end=True needs the masks of the best model, which are in the optimizer's state, and "
            "save_only_model=True leaves it out: set save_only_model=False.",
        )
        steps_per_epoch = count_epoch_steps(count_known_batches(train_dataloader), args.gradient_accumulation_steps)
        self.begin(model, optimizer, state.max_steps, steps_per_epoch, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.is_attached and logs is not None:
            figures = {"sparsity": float(self.pruner.sparsity())}
            logs |= figures
            state.log_history[-1] |= figures

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.is_attached or state.best_global_step is None:
            return
        held = self.count_steps_at_target()
        if held is None or state.best_global_step < state.global_step - held:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_train_end(self, args: Any, state: Any, control: Any, *, train_dataloader: Any = None, **kwargs: Any) -> None:
        if self.is_attached and args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._return_to(state.best_model_checkpoint)
        self.end(train_dataloader)

    def _return_to(self, folder: str) -> None:
        """Set the pruner to the state in a checkpoint, whose weights the model should hold."""
        saved = torch.load(Path(folder) / "optimizer.pt", map_location="cpu", mmap=True, weights_only=True)
        state = carried_state.pop_state(saved, self.pruner.attached_engine().key)
        before = copy.deepcopy(self.pruner.state_dict())
        try:
            require(state is not None, "it was saved without a pruner")
            restore_state(self.pruner, state, same_weights=True)  # type: ignore[arg-type]
        except PomonaError as error:
            self.pruner.load_state_dict(before)
            warnings.warn(
                f"the model keeps the masks of its last step, as {folder} is not what the Trainer has loaded as the "
                f"best model ({str(error).removesuffix('.')}).",
                stacklevel=2,
            )


def count_known_batches(loader: Any) -> int | None:
    """Return the number of batches in a loader, or None where it is not known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
