"""A training with masks: what decides when masks are updated, and updates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PomonaError, require
from ..registry import spec_to_dict
from ..sharding import reshard, whole_reads
from . import carried_state, distributed, guards, history
from .connectivity import warn_about_layers
from .engine import Engine
from .gradients import compute_gradients, require_gradients
from .method import Masks, Method, TrainingProgress
from .score_method import ScoreMethod
from .slot import Slot
from .updates import compute_masks, connect_masks, install_masks, read_targets, snapshot_masks

NOT_ATTACHED = "the pruner is not attached: call attach(model, optimizer, total_steps=…) first."


class PrunedTraining:
    """A method at work in a training: counts its steps, and updates the masks when that is due.

    The engine calls it at each step. `Pruner` adds what a user calls.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self.step = 0  # steps taken since `attach`
        self.total = 0
        self.steps_per_epoch: int | None = None
        self.last_change = 0  # the step of the last mask update
        self.reached = 0.0  # the sparsity that the last update asked for
        self.at_rest = False  # whether that was the last update of all
        self.finished = False
        self.slots: list[Slot] = []
        self.coupled: list[Slot] = []  # biases and norms that are removed with outputs
        self.model: nn.Module | None = None
        self.optimizers: list[Optimizer] = []
        self.memory: dict[str, Any] = {}  # what the method remembers between updates
        self.zeros_at_attach = 0.0  # the share of zeros that a new run found, until its first step
        self.norm_counts: dict[str, int] = {}  # how many batches each batch norm had seen when training began
        self.reported: set[str] = set()  # layers that a warning has named already
        self._engine: Engine | None = None
        self._history = history.UpdateHistory()

    def attached_engine(self) -> Engine:
        """Return the engine, or raise PomonaError where the pruner is not attached."""
        if self._engine is None:
            raise PomonaError("the pruner is finished and holds nothing any more." if self.finished else NOT_ATTACHED)
        return self._engine

    # ---- what the engine calls

    def wants_gradient(self) -> bool:
        """Return whether the coming step is replaced by an update that sees its unmasked gradient."""
        updated = self._history.count > 0 and self.last_change == self.step  # from the loss given to `attach`
        return self.method.updates_before_step and not updated and self.method.is_update_due(self.progress)

    @torch.no_grad()
    def update_from_gradient(self) -> None:
        """Update the masks by the gradient of the step that is replaced."""
        gradients = require_gradients({s.name: s.parameter.grad for s in self.slots}, self.method.name)
        self._update_in_training(self.method.scheduled_sparsity(self.progress), gradients)

    @torch.no_grad()
    def update_from_scores(self) -> None:
        """Update the masks by the scores."""
        sparsity = self.method.scheduled_sparsity(self.progress.next)
        require(
            sparsity == self.method.final_sparsity or not guards.is_capturing(self.slots[0].mask),
            f"a captured step would fix {self.method.pattern} at a sparsity of {sparsity:.2%}, which must still rise "
            f"to {self.method.final_sparsity:.2%}: step eagerly, or use schedule='constant' or pattern='unstructured'.",
        )
        with whole_reads(self.attached_engine().is_sharded):
            masks = self.method.update(read_targets(self), sparsity)
        for buffers in self.attached_engine().buffers:
            buffers.install_masks(masks)

    def updates_after_step(self) -> bool:
        """Return whether `complete_step` will install new masks after the step under way."""
        return not self.method.updates_before_step and self.method.is_update_due(self.progress.next)

    def begin_step(self) -> None:
        """Refuse a step that would let ranks drift apart, and make the model hold its sharded weights."""
        distributed.refuse_join(self.model)
        if self.attached_engine().is_sharded and self.model is not None:
            reshard(self.model)

    def begin_training(self) -> None:
        """Warn before the first step where a saved run seems to begin anew, and refuse ranks that differ."""
        lengths = {"total_steps": self.total, "steps_per_epoch": self.steps_per_epoch, "step": self.step}
        distributed.require_same_options(self.attached_engine().group, spec_to_dict(self.method) | lengths)
        carried_state.warn_waiting(self.optimizers)
        if self.zeros_at_attach:
            guards.warn_pruned_before(self.zeros_at_attach, self.method.name)
            self.zeros_at_attach = 0.0

    @torch.no_grad()
    def complete_step(self, replayed: bool = False) -> None:
        """Count a step that was taken, replaced or replayed, and update the masks when due."""
        self.step += 1
        if isinstance(self.method, ScoreMethod):
            self._follow_scores(self.method)
        elif not self.method.updates_before_step and self.method.is_update_due(self.progress):
            self._update_in_training(self.method.scheduled_sparsity(self.progress), replayed=replayed)

    # ---- mask updates

    @property
    def progress(self) -> TrainingProgress:
        """How far training has come."""
        return TrainingProgress(self.step, self.total, self.steps_per_epoch)

    def _install_initial_masks(self, loss: Callable[[], Tensor] | None) -> None:
        """Install the masks that training begins with."""
        sparsity = self.method.scheduled_sparsity(self.progress)
        require(
            loss is None or self.wants_gradient(),
            f"{self.method.name} makes no use of a loss at attach: leave it out.",
        )
        if loss is not None:
            gradients = compute_gradients(self.model, self.slots, loss)  # type: ignore[arg-type]
            self._update(sparsity, require_gradients(gradients, self.method.name))
            return
        targets = read_targets(self)
        with whole_reads(self.attached_engine().is_sharded):
            masks = self.method.initial_masks(targets, sparsity)
            masks = None if masks is None else connect_masks(self, targets, masks)
        if masks is None:
            self.attached_engine().apply_masks()
            return
        for slot in self.attached_engine().slots:
            slot.save_initial_value()
        self._install(masks, sparsity)
        if isinstance(self.method, ScoreMethod):
            self._redraw_weights(self.method)

    def _update_in_training(
        self, sparsity: float, gradients: dict[str, Tensor] | None = None, replayed: bool = False
    ) -> None:
        """Update the masks, and warn about layers once the masks are as sparse as they will be.

        The masks of soft methods must be fixed for that: until then their weights return. A replayed step does not wait
        for the device, and `finish` warns of its masks.
        """
        reached = self.reached
        self._update(sparsity, gradients, replayed)
        complete = self.method.weights != "soft" and reached < sparsity == self.method.final_sparsity
        if (self.at_rest or complete) and not replayed:
            warn_about_layers(self.model, self.slots, self.reported, stacklevel=2)

    @torch.no_grad()
    def _update(self, sparsity: float, gradients: dict[str, Tensor] | None = None, replayed: bool = False) -> None:
        """Install new masks from the method, or from kernels that select for all layers at once."""
        buffers = self.attached_engine().buffers
        if self.method.ranks_by_magnitude and len(buffers) == 1 and buffers[0].set_sparsity(sparsity):
            self._install(None, sparsity)
            return
        targets = compute_masks(self, sparsity, gradients, replayed)
        self._install(targets.masks, sparsity, targets.reset)

    def _install(self, masks: Mapping[str, Tensor] | None, sparsity: float, reset: Masks | None = None) -> None:
        """Install masks, append a history entry and project the model; without masks, kernels select them."""
        engine = self.attached_engine()
        before = install_masks(engine.buffers, masks)
        self._observe(before, sparsity)
        self.at_rest = self.method.is_last_update(self.progress)
        engine.apply_masks(self.at_rest, reset)

    def _observe(self, before: Sequence[Tensor], sparsity: float) -> None:
        """Append a history entry that compares the masks with those `before`; no weight is changed."""
        buffers = self.attached_engine().buffers
        entry = history.observe_update(buffers, before, self.progress, sparsity)
        self._history.append(entry)
        if not history.is_finite(entry):
            guards.warn_nonfinite(self.slots, self.step, self.reported)
        self.last_change, self.reached = self.step, sparsity
        distributed.require_same_masks(self.slots, self.attached_engine().group, self.step)

    # ---- masks that follow scores

    def _follow_scores(self, method: ScoreMethod) -> None:
        """Observe masks that have followed the scores when that is due, and draw weights again."""
        self.reached = method.scheduled_sparsity(self.progress)
        if method.is_update_due(self.progress):
            self._observe(snapshot_masks(self.attached_engine().buffers), self.reached)
            self._redraw_weights(method)
        self.set_next_sparsity()

    def _redraw_weights(self, method: ScoreMethod) -> None:
        """Draw pruned weights again when that is due; the model does not change, as they are off the mask."""
        number = method.redraw_number(self.progress)
        for buffers in self.attached_engine().buffers if number else ():
            buffers.redraw_weights(number)

    def set_next_sparsity(self) -> None:
        """Tell the kernels how sparse the masks must be after the coming step, where masks follow scores."""
        engine = self.attached_engine()
        if isinstance(self.method, ScoreMethod):
            sparsity = self.method.scheduled_sparsity(self.progress.next)
            if engine.next_sparsity != sparsity:
                engine.set_next_sparsity(sparsity)
