"""The pruner: what a user holds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PomonaError, require
from ..masking import apply_mask
from . import batch_norm, carried_state, guards, history
from .attachment import create_slots, find_pruned_share, unwrap_optimizers, validate_length
from .connectivity import warn_about_layers
from .engine import Engine
from .gradients import compute_gradients, require_gradients
from .method import Masks, Method, TrainingProgress
from .score_method import ScoreMethod
from .slot import Slot
from .sparsity import Sparsity, measure_sparsity
from .state import collect_state, require_same_shapes, restore_state
from .targets import unwrap
from .updates import compute_masks, connect_masks, install_masks, read_targets, snapshot_masks

NOT_ATTACHED = "the pruner is not attached: call attach(model, optimizer, total_steps=…) first."


class Pruner:
    """A method at work on a model.

        pruner = pm.DPF(sparsity=0.9)
        pruner.attach(model, optimizer, total_steps=steps)
        ...                                       # the training loop, unchanged
        pruner.finish()

    The model stays plain: its parameters hold their sparse values whenever it runs, and all work
    happens in the optimizer's step.
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
        self.reported: set[str] = set()  # layers that a warning has named already
        self._engine: Engine | None = None
        self._history: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        state = "finished" if self.finished else f"step {self.step} of {self.total}" if self.slots else "not attached"
        return f"<Pruner {self.method}, {state}>"

    # ---- attach, train, finish

    @torch.no_grad()
    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        *,
        loss: Callable[[], Tensor] | None = None,
        track: bool = False,
        resume: bool = True,
    ) -> Pruner:
        """Attach to the optimizer's steps and install the first masks. Nothing is changed where this raises.

        An optimizer that was loaded with the state of a pruner is continued from it, bit for bit. A state that
        does not fit is refused.

        Arguments:
            model: the model to prune, after DistributedDataParallel where that is used.
            optimizer: the optimizer that trains it. Where several step in turn, give them in that order: the
                steps of the last one are counted.
            total_steps: the length of training in optimizer steps.
            steps_per_epoch: with it, the scheduled sparsity changes at the start of each epoch, else at every
                mask update.
            loss: for methods that read a gradient before training (SNIP), a function that returns the loss of
                a batch.
            track: remember when each mask entry last changed, for `settled()`, at four bytes a weight.
            resume: False begins a new run, and drops the state that the optimizer was loaded with.
        """
        require(not self.finished, "this pruner is finished: make a new one.")
        require(self._engine is None, "this pruner is attached already: make another, or finish() it first.")
        validate_length(self.method, total_steps, steps_per_epoch)
        optimizers = unwrap_optimizers(optimizer, self.method)
        slots, coupled = create_slots(model, self.method, optimizers, track)
        waiting = carried_state.take_waiting(optimizers, slots)
        self.model, self.optimizers = model, optimizers
        self.slots, self.coupled = slots, coupled
        self.total, self.steps_per_epoch = total_steps or 1, steps_per_epoch
        self._hook()
        try:
            if waiting and resume:
                carried_state.continue_from(self, waiting, total_steps)
            else:
                self.zeros_at_attach = find_pruned_share(self.method, slots) if resume else 0.0
                self._install_initial_masks(loss)
        except BaseException:
            self._unhook()
            self.slots, self.coupled, self.optimizers, self.model = [], [], [], None
            for state in waiting:
                state.put_back()
            raise
        warn_about_layers(self.model, self.slots, self.reported, stacklevel=3)  # of a decorated method
        return self

    def finish(self, data: Iterable[Any] | None = None, *, max_batches: int | None = 200) -> None:
        """Leave exact zeros in a plain model and remove all hooks: from here on nothing holds the zeros.

        With `data`, an iterable of training batches, the running statistics of batch norms are re-estimated on the
        final model. A batch is the inputs, a tuple that begins with them, or a mapping of inputs by name. At most
        `max_batches` are read; None reads all, and 0 leaves the statistics. Without data, stale ones give a warning.
        """
        if self.finished:
            return
        engine = self.attached_engine()
        batches = None if data is None else batch_norm.iterate_batches(data)
        engine.refresh()
        if self.method.weights == "free" and self.last_change < self.step:
            self._update(self.method.final_sparsity)
        if self.reached < self.method.final_sparsity:
            require(
                not self.method.updates_before_step,
                f"{self.method.name} has seen no gradient: give attach(…, loss=…), or train one step at least.",
            )
            warnings.warn(
                f"finish() came at step {self.step} of {self.total}, with {self.reached:.1%} pruned: the rest, up to "
                f"{self.method.final_sparsity:.1%}, was pruned at once, with no training after it.",
                stacklevel=2,
            )
            self._update(self.method.final_sparsity)
        engine.apply_masks(last=True)
        if max_batches != 0:
            # The masks of a score method move a little at every step, as weights do.
            steps = None if self.method.weights == "score" else self.step - self.last_change
            batch_norm.renew_statistics(unwrap(self.model), batches, max_batches, steps)  # type: ignore[arg-type]
        warn_about_layers(self.model, self.slots, self.reported, stacklevel=2)
        self._unhook()
        self.finished = True
        for slot in (*self.slots, *self.coupled):
            slot.latent = slot.weight = slot.observed_mask = None

    def tick(self, steps: int = 1) -> None:
        """Count steps that a CUDA graph replayed, and update the masks when due, without a host sync.

        Several steps may be counted at once where `steps_to_update` allows so many.
        """
        self.attached_engine()
        for _ in range(steps):
            require(
                not self.wants_gradient(),
                f"{self.method.name} needs the gradient of this step, which a replay hides: step eagerly where "
                "pruner.wants_gradient().",
            )
            self.complete_step(replayed=True)

    def steps_to_update(self, limit: int) -> int:
        """Return how many steps can be replayed, at most `limit`, before `tick` must be called for them.

        The masks may be updated after the last of these steps, or need the gradient of the one that follows.
        """
        if isinstance(self.method, ScoreMethod):
            return 1  # the sparsity of the masks is set before every step
        progress = self.progress
        for count in range(1, limit):
            progress = progress.next
            if self.method.is_update_due(progress):
                return count
        return limit

    def refresh(self) -> None:
        """Project the model at once: after weights were loaded or edited, or a step was broken off."""
        self.attached_engine().refresh()

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Project another copy of the model (an average of weights, say) onto the same masks, in place."""
        require(bool(self.slots), NOT_ATTACHED)
        parameters = dict(unwrap(model).named_parameters())
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        require_same_shapes("apply", {s.name: s.mask.shape for s in self.slots}, shapes)
        for slot in (*self.slots, *self.coupled):
            parameter = parameters[slot.name]
            if slot.calibration is None:
                slot.write_projection(parameter.detach().clone(), parameter)
            else:  # the copy holds weights that the model ran on, so thresholds were applied to them already
                apply_mask(parameter.detach().clone(), slot.mask.to(parameter.device), parameter)

    # ---- what was reached

    def masks(self) -> Masks:
        """Return name → mask, true where kept."""
        return {slot.name: slot.mask for slot in self.slots}

    def sparsity(self) -> Sparsity:
        """Return the pruned fraction reached over the targets, a float whose `zeros` is the fraction that is zero."""
        require(bool(self.slots), NOT_ATTACHED)
        return measure_sparsity(self.slots)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry for each mask update.

        `step`, `sparsity` (scheduled), `delta` (δ = ‖w − w̃‖² / ‖w‖², equation 1 of Lin et al., 2020), `flips`
        (entries that changed), `iou` (of the mask with the one before), `layers` (the sparsity of each target).
        """
        # Figures stay on the device until somebody reads them, so that an update needs no host sync.
        names = [slot.name for slot in self.slots]
        self._history = [history.to_plain(entry, names) for entry in self._history]
        return [dict(entry) for entry in self._history]

    def replace_history(self, entries: list[dict[str, Any]]) -> None:
        """Replace the history by entries of a saved state."""
        self._history = entries

    def settled(self) -> list[float]:
        """Return the share of mask entries that never change after epoch 0, 1, 2, … (Figure 4 of Lin et al., 2020)."""
        last_flips = [slot.last_flip for slot in self.slots if slot.last_flip is not None]
        require(bool(last_flips), "nothing was tracked: call attach(…, track=True).")
        require(self.steps_per_epoch is not None, "epochs are not known: call attach(…, steps_per_epoch=…).")
        return history.settled_shares(last_flips, self.steps_per_epoch)  # type: ignore[arg-type]

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs. The state also rides in `optimizer.state_dict()`."""
        return collect_state(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken; the model's weights follow. Nothing is changed where this raises."""
        restore_state(self, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pruner:
        """Return a pruner for the copied model and optimizer: copy (model, optimizer, pruner) together."""
        copied = type(self).__new__(type(self))  # a subclass has other arguments
        memo[id(self)] = copied
        copied.method, copied._engine = self.method, None
        for key, value in self.__dict__.items():
            if key not in {"_engine", "method"}:
                setattr(copied, key, copy.deepcopy(value, memo))
        if self._engine is not None:
            copied._hook()
        return copied

    # ---- what the engine calls

    def wants_gradient(self) -> bool:
        """Return whether the coming step is replaced by an update that sees its unmasked gradient."""
        updated = bool(self._history) and self.last_change == self.step  # from the loss given to `attach`
        return self.method.updates_before_step and not updated and self.method.is_update_due(self.progress)

    @torch.no_grad()
    def update_from_gradient(self) -> None:
        """Update the masks by the gradient of the step that is replaced."""
        gradients = require_gradients({s.name: s.parameter.grad for s in self.slots}, self.method.name)
        self._update(self.method.scheduled_sparsity(self.progress), gradients)

    @torch.no_grad()
    def update_from_scores(self) -> None:
        """Update the masks by the scores."""
        sparsity = self.method.scheduled_sparsity(self.progress.next)
        require(
            sparsity == self.method.final_sparsity or not guards.is_capturing(self.slots[0].mask),
            f"a captured step would fix {self.method.pattern} at a sparsity of {sparsity:.2%}, which must still rise "
            f"to {self.method.final_sparsity:.2%}: step eagerly, or use schedule='constant' or pattern='unstructured'.",
        )
        masks = self.method.update(read_targets(self), sparsity)
        for buffers in self.attached_engine().buffers:
            buffers.install_masks(masks)

    def updates_after_step(self) -> bool:
        """Return whether `complete_step` will install new masks after the step under way."""
        return not self.method.updates_before_step and self.method.is_update_due(self.progress.next)

    def begin_training(self) -> None:
        """Warn before the first step where a saved run seems to begin anew."""
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
            self._update(self.method.scheduled_sparsity(self.progress), replayed=replayed)

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
        masks = self.method.initial_masks(targets, sparsity)
        if masks is None:
            self.attached_engine().apply_masks()
            return
        for slot in self.attached_engine().slots:
            slot.save_initial_value()
        self._install(connect_masks(self, targets, masks), sparsity)
        if isinstance(self.method, ScoreMethod):
            self._redraw_weights(self.method)

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
        self._history.append(history.observe_update(buffers, before, self.progress, sparsity))
        self.last_change, self.reached = self.step, sparsity

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

    # ---- attachment

    def attached_engine(self) -> Engine:
        """Return the engine, or raise PomonaError where the pruner is not attached."""
        if self._engine is None:
            raise PomonaError("the pruner is finished and holds nothing any more." if self.finished else NOT_ATTACHED)
        return self._engine

    def _hook(self) -> None:
        self._engine = Engine([*self.slots, *self.coupled], self.optimizers, self)
        self._engine.carry_state(self.state_dict, self.load_state_dict)
        self.set_next_sparsity()

    def _unhook(self) -> None:
        self.attached_engine().detach()
        self._engine = None
