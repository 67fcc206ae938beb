"""The pruner: what a user holds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import require
from ..masking import apply_mask
from ..registry import format_plain_data, spec_to_dict
from ..sharding import local_part, reshard, whole_reads
from ..table_view import to_html
from . import batch_norm, carried_state, distributed, history, input_dependence
from .attachment import create_slots, find_length, find_pruned_share, unwrap_optimizers, validate_length
from .connectivity import warn_about_layers
from .engine import Engine
from .history import UpdateHistory
from .mask_table import mask_table
from .method import Masks
from .pruned_training import NOT_ATTACHED, PrunedTraining
from .score_method import ScoreMethod
from .sharded_state import pack_sharded, unpack_sharded
from .sparsity import Sparsity, measure_sparsity
from .state import collect_state, require_same_shapes, restore_state
from .targets import unwrap


class Pruner(PrunedTraining):
    """A method at work on a model.

        pruner = pm.DPF(0.9)
        pruner.attach(model, optimizer, loader=loader, epochs=10)
        ...                                       # the training loop, unchanged
        pruner.finish()

    The model stays plain: its parameters hold their sparse values whenever it runs, and all work
    happens in the optimizer's step.
    """

    def __repr__(self) -> str:
        return f"<Pruner {self.method}, {self.status}>"

    def __rich__(self) -> Table:
        """Return what each layer keeps; before `attach`, the options of the method."""
        sparsity = f"sparsity {self.method.final_sparsity:.2%}"
        title = f"{type(self.method).__name__}, {self.method.pattern}, {sparsity}, {self.status}"
        if self.slots:
            with whole_reads(any(slot.is_sharded for slot in self.slots)):
                return mask_table(title, self.masks())
        table = Table("option", "value", title=title)
        for option, value in spec_to_dict(self.method).items():
            table.add_row(option, format_plain_data(value, str))
        return table

    def _repr_html_(self) -> str:
        return to_html(self.__rich__())

    @property
    def status(self) -> str:
        """How far the training of this pruner has come, in words."""
        return "finished" if self.finished else f"step {self.step} of {self.total}" if self.slots else "not attached"

    # ---- attach, train, finish

    @torch.no_grad()
    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        *,
        loader: Sized | None = None,
        epochs: int | None = None,
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
            loader: in place of steps_per_epoch, what training iterates over once an epoch, with one optimizer step
                for each of its batches.
            epochs: in place of total_steps, the length of training in epochs of the loader or of steps_per_epoch.
            loss: for methods that read a gradient before training (SNIP), a function that returns the loss of
                a batch.
            track: remember when each mask entry last changed, for `settled()`, at four bytes a weight.
            resume: False begins a new run, and drops the state that the optimizer was loaded with.
        """
        require(not self.finished, "this pruner is finished: make a new one.")
        require(self._engine is None, "this pruner is attached already: make another, or finish() it first.")
        total_steps, steps_per_epoch = find_length(total_steps, steps_per_epoch, loader, epochs)
        optimizers = unwrap_optimizers(optimizer, self.method)
        reshard(model)
        group = distributed.training_group(model)
        given = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch, "resume": resume}
        steps = [waiting.state.get("step") for waiting in carried_state.list_waiting(optimizers)]
        # This comes before all that one rank alone might refuse, which the others would wait for.
        distributed.require_same_options(group, spec_to_dict(self.method) | given | {"step of its checkpoint": steps})
        validate_length(self.method, total_steps, steps_per_epoch)
        slots, coupled = create_slots(model, self.method, optimizers, track)
        waiting = carried_state.take_waiting(optimizers, slots)
        self.model, self.optimizers = model, optimizers
        self.slots, self.coupled = slots, coupled
        self.total, self.steps_per_epoch = total_steps or 1, steps_per_epoch
        self.norm_counts = batch_norm.count_batches(unwrap(model))
        self._hook()
        self.attached_engine().group = group
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
        if engine.is_sharded:
            reshard(self.model)  # type: ignore[arg-type]
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
            counts = self.norm_counts if self.step else {}  # without training no norm has seen a batch
            model, sample = unwrap(self.model), list[Any]()  # type: ignore[arg-type]
            if batches is not None and not engine.is_sharded:  # all ranks together would have to run sharded weights
                sample, batches = input_dependence.keep_first_batch(model, batches)
            batch_norm.renew_statistics(model, batches, max_batches, steps, counts)
            for batch in sample:
                input_dependence.warn_about_constant_outputs(model, batch, stacklevel=3)  # of a decorated method
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
        require_same_shapes("apply", {s.name: s.parameter.shape for s in self.slots}, shapes)
        for slot in (*self.slots, *self.coupled):
            parameter = local_part(parameters[slot.name])
            require(
                parameter.shape == slot.mask.shape,
                f"{slot.name} is divided among ranks here and in the copy in another way: shard the copy alike.",
            )
            if slot.calibration is None:
                slot.write_projection(parameter.detach().clone(), parameter)
            else:  # the copy holds weights that the model ran on, so thresholds were applied to them already
                apply_mask(parameter.detach().clone(), slot.mask.to(parameter.device), parameter)

    # ---- what was reached

    def masks(self) -> Masks:
        """Return name → mask, true where kept; of a sharded parameter, a DTensor in the same placement."""
        return {slot.name: slot.place(slot.mask) for slot in self.slots}

    def sparsity(self) -> Sparsity:
        """Return the pruned fraction reached over the targets, a float whose `zeros` is the fraction that is zero."""
        require(bool(self.slots), NOT_ATTACHED)
        return measure_sparsity(self.slots)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry for each mask update; of more than 10,000, every second of the early ones is left out.

        `step`, `sparsity` (scheduled), `delta` (δ = ‖w − w̃‖² / ‖w‖², equation 1 of Lin et al., 2020), `flips`
        (entries that changed), `iou` (of the mask with the one before), `layers` (the sparsity of each target).
        """
        # Figures stay on the device until somebody reads them, so that an update needs no host sync.
        return self._history.read([slot.name for slot in self.slots])

    @property
    def update_count(self) -> int:
        """How many mask updates there were; of more than 10,000 the history has dropped some early ones."""
        return self._history.count

    def replace_history(self, entries: UpdateHistory) -> None:
        """Replace the history by that of a saved state."""
        self._history = entries

    def history_columns(self) -> dict[str, Any]:
        """Return the history as a saved state has it."""
        return self._history.to_columns([slot.name for slot in self.slots])

    def settled(self) -> list[float]:
        """Return the share of mask entries that never change after epoch 0, 1, 2, … (Figure 4 of Lin et al., 2020)."""
        last_flips = [slot.last_flip for slot in self.slots if slot.last_flip is not None]
        require(bool(last_flips), "nothing was tracked: call attach(…, track=True).")
        require(self.steps_per_epoch is not None, "epochs are not known: call attach(…, steps_per_epoch=…).")
        return history.settled_shares(last_flips, self.steps_per_epoch)  # type: ignore[arg-type]

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs. The state also rides in `optimizer.state_dict()`."""
        state = collect_state(self)
        return pack_sharded(state) if self._is_sharded else state

    @property
    def _is_sharded(self) -> bool:
        return any(slot.is_sharded for slot in self.slots)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken; the model's weights follow. Nothing is changed where this raises."""
        restore_state(self, unpack_sharded(state))

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

    # ---- attachment

    def _hook(self) -> None:
        self._engine = Engine([*self.slots, *self.coupled], self.optimizers, self)
        if not self._is_sharded:  # torch.distributed.checkpoint stores the state of an optimizer in another form
            self._engine.carry_state(self.state_dict, self.load_state_dict)
        self.set_next_sparsity()

    def _unhook(self) -> None:
        self.attached_engine().detach()
        self._engine = None
