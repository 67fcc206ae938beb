"""What the callbacks of all trainers share: attach a pruner when training begins, finish it when training ends."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..core import carried_state
from ..core.batch_norm import adapting_layers
from ..core.guards import unwrap_optimizer
from ..core.method import TrainingProgress
from ..core.pruner import Pruner
from ..core.targets import unwrap
from ..errors import PomonaError, require

SHARDED = ("fsdp", "deepspeed", "megatron", "modelparallel")  # in names of ways to distribute training


class TrainerPruning:
    """A pruner for a training loop that a trainer owns.

    Arguments:
        pruner: the pruner, not attached: `pm.DPF(sparsity=0.9)`.
        total_steps: the length of training in optimizer steps, where the trainer does not know it.
        by_epoch: whether the scheduled sparsity changes at epochs only, as with `attach(…, steps_per_epoch=…)`. By
            default it does so for methods that update their masks once an epoch.
        track: remember when each mask entry last changed, for `pruner.settled()`.
        resume: False begins a new run where the optimizer was loaded with the state of another pruner.
        max_batches: how many training batches are read at the end to re-estimate batch-norm statistics. 0 leaves
            the statistics. Models without batch norms need none.
    """

    def __init__(
        self,
        pruner: Pruner,
        *,
        total_steps: int | None = None,
        by_epoch: bool | None = None,
        track: bool = False,
        resume: bool = True,
        max_batches: int | None = 200,
    ) -> None:
        super().__init__()
        require(
            isinstance(pruner, Pruner),
            f"PruningCallback takes a pruner such as pm.DPF(sparsity=0.9), got {pruner!r}.",
        )
        self.pruner = pruner
        self.total_steps = total_steps
        self.by_epoch = by_epoch
        self.track = track
        self.resume = resume
        self.max_batches = max_batches

    @property
    def is_attached(self) -> bool:
        """Whether the pruner is attached and not finished."""
        return bool(self.pruner.slots) and not self.pruner.finished

    def begin(
        self,
        model: nn.Module,
        optimizer: Any,
        total_steps: int | float | None,
        steps_per_epoch: int | None,
        step: int,
    ) -> None:
        """Attach the pruner to a training of `total_steps` of which the trainer has taken `step`.

        A run that is resumed keeps the length that it was begun with.
        """
        inner = unwrap_optimizer(optimizer)
        if self.is_attached and step > 0 and self.pruner.optimizers == [inner]:
            return  # training was broken off, and its checkpoint was loaded into the optimizer that has the hooks
        self._renew()
        waiting = carried_state.list_waiting([inner]) if self.resume else []
        if len(waiting) == 1:
            length = waiting[0].state.get("total")
        else:
            length = self.total_steps or count_steps_left(total_steps, step)
        self.pruner.attach(
            model,
            inner,
            total_steps=length,
            steps_per_epoch=steps_per_epoch if self._needs_epochs(length) else None,
            track=self.track,
            resume=self.resume,
        )

    def end(self, loader: Iterable[Any] | None) -> None:
        """Finish the pruner, with new batch-norm statistics where there is a loader of training batches."""
        if not self.is_attached:
            return
        has_norms = bool(adapting_layers(unwrap(self.pruner.model)))  # type: ignore[arg-type]
        data = loader if has_norms and self.max_batches != 0 else None
        try:
            self.pruner.finish(data, max_batches=self.max_batches)
        except Exception as error:
            if data is None:
                raise
            warnings.warn(
                f"the batch-norm statistics are those of training, as the model does not run on a training batch "
                f"({type(error).__name__}: {error}): re-estimate them with a loop of your own.",
                stacklevel=3,
            )
            self.pruner.finish(max_batches=0)

    def count_steps_at_target(self) -> int | None:
        """Return for how many steps the final sparsity has been held, or None where it is not reached."""
        target = self.pruner.method.final_sparsity
        if self.pruner.reached < target:
            return None
        first = self.pruner.step
        for entry in reversed(self.pruner.history):
            if entry["sparsity"] < target:
                break
            first = entry["step"]
        return self.pruner.step - first

    def _needs_epochs(self, length: int | None) -> bool:
        """Return whether the pruner must be told how long an epoch is."""
        if self.by_epoch is not None:
            return self.by_epoch
        try:
            self.pruner.method.is_update_due(TrainingProgress(1, length or 1))
        except PomonaError:
            return True
        return False

    def _renew(self) -> None:
        """Replace a pruner that an earlier training has used, so that another training can begin."""
        if type(self.pruner) is not Pruner or not self.pruner.slots:
            return
        if self.is_attached:
            self.pruner.attached_engine().detach()
        self.pruner = Pruner(self.pruner.method)


def refuse_sharding(name: str) -> None:
    """Raise PomonaError for a way to distribute training that shards weights or replaces the optimizer's step."""
    require(
        not any(word in name.lower() for word in SHARDED),
        f"{name} shards the weights, and sharded weights are not pruned yet: use DistributedDataParallel.",
    )


def count_steps_left(total_steps: int | float | None, step: int) -> int | None:
    """Return how many of the trainer's steps are left, or None where training has no known end."""
    if total_steps is None or total_steps < 0 or math.isinf(total_steps):
        return None
    return int(total_steps) - step


def count_epoch_steps(batches: int | float | None, accumulated: int) -> int | None:
    """Return the optimizer steps of an epoch, given its batches and those accumulated for one step."""
    if not batches or math.isinf(batches):
        return None
    return math.ceil(batches / accumulated)


def find_owners(model: nn.Module, pruner: Pruner, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that move any of the parameters that a pruner will prune."""
    targets = {id(target.parameter) for target in pruner.method.targets(model)}
    return [o for o in optimizers if any(id(p) in targets for group in o.param_groups for p in group["params"])]
