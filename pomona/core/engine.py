"""The engine: joins the slots to the optimizer's step, in the same way for every method.

    before the step:  mask ← update, where a method needs the gradient; the update replaces the step
                      parameter ← latent           (hard methods: the gradient is masked)
    optimizer.step()                               (its momentum and weight decay are untouched)
    after the step:   latent ← parameter           mask ← update, when one is due
                      parameter ← project(latent)

Between steps the parameters hold their sparse values; what the optimizer moves is the latent. For score
methods the latent is a score for each weight: its gradient is g ⊙ w, the mask follows it at every step, and the
parameter becomes m ⊙ w again, with random weights w that are never trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PomonaError
from ..sharding import local_part, place_like
from . import carried_state, distributed, gradients, guards
from .fused.flat_buffers import FlatBuffers, group_slots
from .method import Masks
from .slot import Slot


class UpdatePolicy(Protocol):
    """Who decides when masks change: the pruner."""

    def wants_gradient(self) -> bool:
        """Return whether the coming step is replaced by an update that sees its unmasked gradient."""

    def update_from_gradient(self) -> None:
        """Update the masks by the gradient of the step that is replaced."""

    def update_from_scores(self) -> None:
        """Update the masks by the scores."""

    def updates_after_step(self) -> bool:
        """Return whether `complete_step` will install new masks after the step under way."""

    def begin_training(self) -> None:
        """Warn before the first step where a saved run seems to begin anew, and refuse ranks that differ."""

    def begin_step(self) -> None:
        """Refuse a step that would let ranks drift apart."""

    def complete_step(self) -> None:
        """Count a step that was taken or replaced, and update the masks when due."""


class Engine:
    """The hooks on the optimizers, and the copies between latents and parameters that they make."""

    def __init__(self, slots: Sequence[Slot], optimizers: Sequence[Optimizer], policy: UpdatePolicy) -> None:
        self.slots = slots
        self.buffers = group_slots(slots)
        self.is_sharded = any(slot.is_sharded for slot in slots)  # whether ranks hold parts of the weights
        self.untrained_biases = gradients.find_untrained_biases(slots)
        self.next_sparsity: float | None = None  # after the coming step, where masks follow scores
        self.optimizers = optimizers
        self.policy = policy
        self.started = False  # whether a step was seen: what is attached is validated at the first
        self.group: Any = None  # the processes that hold the same masks: from `attach`, or from the first step
        self.step_frame: FrameType | None = None  # of the optimizer.step under way
        self.active: list[Slot] = []  # the slots whose parameters hold their latents right now
        self.saved_gradients: dict[nn.Parameter, Tensor] = {}  # gradients that the optimizer must not see
        self.ignores_step = False  # whether the step under way is none: see `guards.initializes_state`
        self.awaits_closure = False  # whether the optimizer has yet to call its closure
        self.known_parameters: dict[Optimizer, tuple[int, set[int]]] = {}  # see `parameter_ids`
        taken = [other.key for other in guards.attached_engines(optimizers[-1])]
        self.key: str = carried_state.choose_key(optimizers[-1], taken)  # of the pruner's state in the optimizer's
        self.handles: list[Any] = [guards.refuse_foreign_steps(self)]
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self._uncompiled(self.before_step)))
            self.handles.append(optimizer.register_step_post_hook(self._uncompiled(self.after_step)))
        for slot in slots:
            self._hook_gradient(slot)

    def _uncompiled(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that torch.compile leaves alone and that refers to its engine."""
        wrapper = torch.compiler.disable(hook)  # here and not as a decorator: it takes a second to import
        wrapper.engine = self
        return wrapper

    def _hook_gradient(self, slot: Slot) -> None:
        """Mask a hard slot's gradient when it is accumulated, so that clipping sees the one that will be used."""
        if slot.masks_gradient and slot.parameter.requires_grad:
            hook = gradients.make_mask_hook(slot, self.policy)
            self.handles.append(slot.parameter.register_post_accumulate_grad_hook(hook))

    def carry_state(self, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]) -> None:
        """Store a state in the optimizer's own, so that stacks which know nothing of Pomona resume too."""

        def on_save(_: Optimizer, state: dict[str, Any]) -> None:
            carried_state.add_state(state, self.key, save())

        def on_load(optimizer: Optimizer, state: dict[str, Any]) -> None:
            if not carried_state.fits_groups(optimizer, state):
                return  # the optimizer is about to refuse it, and then nothing may have changed
            carried = carried_state.pop_state(state, self.key)
            if carried is not None:
                load(carried)

        self.handles.append(self.counting_optimizer.register_state_dict_post_hook(on_save))
        self.handles.append(self.counting_optimizer.register_load_state_dict_pre_hook(on_load))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    @property
    def counting_optimizer(self) -> Optimizer:
        """The optimizer whose steps are counted: the last, where several step in turn."""
        return self.optimizers[-1]

    # ---- the step

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Load the latents before the step (an optimizer step pre-hook)."""
        if self.step_frame is not None and guards.is_running(self.step_frame):
            return None  # a subclass called super().step()
        self.ignores_step = guards.initializes_state(optimizer)
        if self.ignores_step:
            gradients.drop_gradients(self.untrained_biases)  # which have no state in a checkpoint either
            return None
        self.abort_step()
        self.policy.begin_step()
        self._follow_model()
        self.step_frame = guards.find_step_frame(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._load_latents(optimizer)
            return None
        wrapped = self._wrap_closure(optimizer, closure)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Store the latents, update masks when due and project (an optimizer step post-hook)."""
        if self.step_frame is not None and guards.find_step_frame(optimizer) is not self.step_frame:
            return  # the inner step of a subclass
        if self.ignores_step:
            return
        self.step_frame = None
        if self.awaits_closure:
            self.abort_step()
            raise PomonaError(f"{type(optimizer).__name__} was given a closure and did not call it: step without one.")
        self._restore_gradients()
        active, self.active = self.active, []
        captured = guards.is_capturing(self.slots[0].mask)
        taken = captured or not guards.step_was_skipped(optimizer)
        counted = optimizer is self.counting_optimizer and taken and not captured
        if counted and self.slots[0].method.weights == "soft" and self.policy.updates_after_step():
            self._update_and_project(active)
            return
        self._store_and_project(active, taken)
        if counted:
            self.policy.complete_step()

    def _restore_gradients(self) -> None:
        """Give all parameters the gradients that backward left."""
        gradients.restore_gradients(self.saved_gradients)
        for buffers in self.buffers:
            buffers.bounded_rows.restore()

    def _update_and_project(self, slots: Sequence[Slot]) -> None:
        """Store the latents and complete the step; its mask update projects them, so that they are projected once."""
        for buffers, part in self._split_by_buffers(slots):
            buffers.store_latents(part)
        try:
            self.policy.complete_step()
        except BaseException:
            self.enforce_masks()
            raise

    def _load_latents(self, optimizer: Optimizer) -> None:
        """Give the optimizer the latents of its own parameters that have a gradient."""
        own = self._parameter_ids(optimizer)
        active = [s for s in self.slots if s.parameter.grad is not None and id(s.parameter) in own]
        for slot in active:
            if slot.parameter._version != slot.version and slot.adopt_edit():
                if slot.weight is not None:
                    guards.refuse_edited(slot.name)
                guards.warn_edited(slot.name)
                slot.project()
        if self.policy.wants_gradient() and not guards.step_was_skipped(optimizer):
            self.policy.update_from_gradient()
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.saved_gradients = {p: p.grad for p in parameters if p.grad is not None}
            for parameter in self.saved_gradients:
                parameter.grad = None  # so that the optimizer has nothing to do
            return
        self.active = active
        self.saved_gradients = gradients.replace_gradients(active, self.untrained_biases)
        point = guards.moves_only_parameters(optimizer)
        for buffers, slots in self._split_by_buffers(active):
            buffers.transform_gradients(slots)
            buffers.load_latents(slots, point)
        if active and active[0].masks_gradient:
            for slot in active:
                slot.mask_gradient()

    def _store_and_project(self, slots: Sequence[Slot], taken: bool) -> None:
        """Store the latents and project them; masks follow scores if the step was taken."""
        parts = self._split_by_buffers(slots)
        if not slots or self.slots[0].weight is None:
            for buffers, part in parts:
                buffers.store_and_project(part)
        elif taken and len(parts) == 1 and parts[0][0].store_select_project(slots):
            return
        else:
            for buffers, part in parts:
                buffers.store_latents(part)
            if taken:
                self.policy.update_from_scores()
            for buffers in self.buffers:
                buffers.project()

    def set_next_sparsity(self, sparsity: float | None) -> None:
        """Tell the kernels how sparse the masks of scores must be after the coming step."""
        self.next_sparsity = sparsity
        if sparsity is not None:
            for buffers in self.buffers:
                buffers.set_sparsity(sparsity)

    def _parameter_ids(self, optimizer: Optimizer) -> set[int]:
        """Return the identities of an optimizer's parameters, collected again when their number changes."""
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        known = self.known_parameters.get(optimizer)
        if known is None or known[0] != count:
            known = count, {id(p) for group in optimizer.param_groups for p in group["params"]}
            self.known_parameters[optimizer] = known
        return known[1]

    def _split_by_buffers(self, slots: Sequence[Slot]) -> list[tuple[FlatBuffers, Sequence[Slot]]]:
        """Return each set of buffers with those of the slots that it holds."""
        if len(self.buffers) == 1:
            return [(self.buffers[0], slots)]
        return [(buffers, [s for s in slots if s in set(buffers.slots)]) for buffers in self.buffers]

    def _wrap_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the user's closure so that it runs exactly once, on sparse weights, before the latents are loaded."""
        self.awaits_closure = True
        versions = [s.parameter._version for s in self.slots]

        @torch.compiler.disable
        def run_once() -> Any:
            if not self.awaits_closure:
                self.abort_step()
                raise PomonaError(
                    "the optimizer called its closure twice in one step, the second time on weights that are not "
                    "sparse: use an optimizer that calls it once (SGD, Adam), or step without a closure."
                )
            self.awaits_closure = False
            if versions != [s.parameter._version for s in self.slots]:
                self.enforce_masks()
                raise PomonaError(
                    "the optimizer moved the weights before it called its closure (as SAM does), so that the "
                    "gradient would not be the sparse model's: use an optimizer that does not."
                )
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                self._load_latents(optimizer)
            return loss

        return run_once

    # ---- around the step

    def _follow_model(self) -> None:
        """Rebind slots whose parameter was replaced or moved to a device, if an attached optimizer moves it."""
        replaced = [s for s in self.slots if s.target.module._parameters[s.target.leaf] is not s.parameter]
        moved = [buffers.forget_moved_parameters() for buffers in self.buffers]  # each must be asked
        changed = [s for s in self.slots if s.is_stale()] if replaced or any(moved) else []
        if changed or not self.started:
            guards.require_owned(self.slots, self.optimizers)
        for slot in changed:
            slot.rebind()
            self._hook_gradient(slot)
        if changed:
            self.buffers = group_slots(self.slots)
            self.set_next_sparsity(self.next_sparsity)
            self.known_parameters.clear()
        if not self.started:
            self.group = self.group or distributed.world_group()
            self.policy.begin_training()
            distributed.broadcast_slots(self.slots, self.group)
            self.started = True
            for slot in self.slots:
                slot.initial_value = None

    @torch.no_grad()
    def abort_step(self) -> None:
        """Give the model its sparse values after a step that ended in an exception and left latents in the model.

        The step is undone, except where torch's own optimizers had moved weights on a CPU by then.
        """
        self.step_frame, self.awaits_closure = None, False
        self._restore_gradients()
        for buffers in self.buffers:
            buffers.latent_memory.restore()
        for slot in self.active:
            slot.enforce_mask()
        self.active = []

    @torch.no_grad()
    def enforce_masks(self) -> None:
        """Give the model its sparse values."""
        self.abort_step()
        for slot in self.slots:
            slot.enforce_mask()

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the model its sparse values, from what the user may have loaded since the last step."""
        self.abort_step()
        for slot in self.slots:
            slot.adopt_edit()
            slot.enforce_mask()

    @torch.no_grad()
    def apply_masks(self, last: bool = False, reset: Masks | None = None) -> None:
        """Project the model on masks that were just installed, and clear the optimizer state of what they prune.

        The bias and the norm of a removed filter are pruned with it at once where weights are hard. Where weights
        can come back they are pruned with the `last` mask: behind a zero gain no filter would ever learn again.
        Entries in `reset` restart at zero and without momentum.
        """
        for slot in self.slots:
            if reset and slot.name in reset:
                entries = local_part(place_like(reset[slot.name].movedim(0, slot.target.output_dim), slot.parameter))
                slot.moved.detach().masked_fill_(entries, 0)
                guards.clear_optimizer_state(self.optimizers, slot.parameter, ~entries)
        for slot in self.slots:
            if slot.is_hard or last:
                slot.copy_output_mask()
                slot.clear_running_means()
            if last:
                slot.freeze_projection()
        for buffers in self.buffers:
            if buffers.method.weights == "free" and not last:
                for slot in buffers.targets:
                    slot.project()
            else:
                buffers.project()
        for slot in self.slots:
            if slot.masks_gradient:
                guards.clear_optimizer_state(self.optimizers, slot.parameter, slot.mask)
