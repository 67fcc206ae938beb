"""The swap: one step of the engine, for every method.

    before the step:  parameter ← latent           (hard methods: the gradient is masked)
    optimizer.step()                               (its momentum, its weight decay, as ever)
    after the step:   latent ← parameter           mask ← update, when one is due
                      parameter ← project(latent)

Between steps the parameters hold their sparse values; what the optimizer moves is the latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import distributed, guards
from .errors import PomonaError
from .method import Method, masked
from .targets import Target


@dataclass(eq=False)
class Slot:
    """One pruned parameter: its mask, and for soft methods its latent."""

    target: Target
    parameter: nn.Parameter
    method: Method
    mask: Tensor
    latent: Tensor | None  # None: the optimizer moves the parameter itself
    version: int = -1  # the parameter's version right after the last projection

    @classmethod
    def make(cls, target: Target, method: Method) -> Slot:
        """A slot that keeps everything."""
        parameter = target.parameter
        latent = parameter.detach().clone() if method.weights == "soft" else None
        return cls(target, parameter, method, torch.ones_like(parameter, dtype=torch.bool), latent)

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def source(self) -> Tensor:
        """What the optimizer moves."""
        return self.parameter if self.latent is None else self.latent

    def stale(self) -> bool:
        """Whether the model holds another tensor under this name, or holds it elsewhere, than the slot knows."""
        return self.target.parameter is not self.parameter or self.parameter.device != self.mask.device

    def follow(self) -> None:
        """Take over the tensor that the model holds now."""
        self.parameter = self.target.parameter
        self.mask = self.mask.to(self.parameter.device)
        self.latent = None if self.latent is None else self.latent.to(self.parameter)
        self.version = -1

    def project(self) -> None:
        """Give the model the sparse value."""
        self.method.project(self.source, self.mask, self.parameter)
        self.version = self.parameter._version

    def sparse(self) -> Tensor:
        """A new tensor with the sparse value."""
        value = torch.empty_like(self.parameter, requires_grad=False)
        self.method.project(self.source, self.mask, value)
        return value

    @torch.compiler.disable
    @torch.no_grad()
    def mask_gradient(self, _: Tensor | None = None) -> None:
        """Zero the gradient off the mask; also a post-accumulate-grad hook."""
        if self.parameter.grad is not None:
            masked(self.parameter.grad, self.mask, self.parameter.grad)

    def accept(self) -> None:
        """Take the parameter's value, whoever wrote it, as the latent."""
        if self.latent is not None:
            self.latent.copy_(self.parameter)
            self.method.bound(self.latent)


class Engine:
    """Joins slots to optimizers. `advance` is called after every step that was taken."""

    def __init__(self, slots: Sequence[Slot], optimizers: Sequence[Optimizer], advance: Callable[[], None]) -> None:
        self.slots = slots
        self.optimizers = optimizers
        self.advance = advance
        self.started = False  # whether a step was seen: what is attached is checked at the first
        self.frame: FrameType | None = None  # of the optimizer.step under way
        self.active: list[Slot] = []  # the slots that hold their latent right now
        self.waiting = False  # for the optimizer to call its closure
        self.handles: list[Any] = []
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self.before))
            self.handles.append(optimizer.register_step_post_hook(self.after))
        for slot in slots:
            if slot.latent is None and slot.parameter.requires_grad:
                # So that clipping sees the gradient that will be used.
                self.handles.append(slot.parameter.register_post_accumulate_grad_hook(slot.mask_gradient))

    def carry_state(self, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]) -> None:
        """Let a state ride in the optimizer's, so that stacks which know nothing of us resume too."""
        taken = len(guards.engines(self.clock))
        key = "pomona" if taken == 1 else f"pomona_{taken}"

        def on_save(_: Optimizer, state: dict[str, Any]) -> None:
            state[key] = save()

        def on_load(_: Optimizer, state: dict[str, Any]) -> None:
            if key in state:
                load(state[key])

        self.handles.append(self.clock.register_state_dict_post_hook(on_save))
        self.handles.append(self.clock.register_load_state_dict_pre_hook(on_load))

    def detach(self) -> None:
        """Take all hooks away."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    @property
    def clock(self) -> Optimizer:
        """The optimizer whose steps are counted: where several step in turn, the last ends the round."""
        return self.optimizers[-1]

    # ---- the step

    @torch.compiler.disable
    @torch.no_grad()
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Step pre-hook."""
        if self.frame is not None and guards.still_running(self.frame):
            return None  # a subclass called super().step()
        self.recover()
        self.start()
        self.frame = guards.step_frame(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.enter(optimizer)
            return None
        wrapped = self.once(optimizer, closure)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    @torch.compiler.disable
    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Step post-hook."""
        if self.frame is not None and guards.step_frame(optimizer) is not self.frame:
            return  # the inner step of a subclass
        self.frame = None
        if self.waiting:
            self.recover()
            raise PomonaError(f"{type(optimizer).__name__} was given a closure and did not call it: step without one.")
        active, self.active = self.active, []
        latents = [s.latent for s in active if s.latent is not None]
        if latents:
            torch._foreach_copy_(latents, [s.parameter for s in active if s.latent is not None])
        for slot in active:
            if slot.latent is not None:
                slot.method.bound(slot.latent)
        for slot in active:
            slot.project()
        if optimizer is self.clock and not guards.capturing() and not guards.skipped(optimizer):
            self.advance()

    def enter(self, optimizer: Optimizer) -> None:
        """Give the optimizer the latents of its own parameters that have a gradient."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        active = [s for s in self.slots if id(s.parameter) in own and s.parameter.grad is not None]
        for slot in active:
            if guards.edited(slot):
                guards.warn_edited(slot.name)
                slot.accept()
                slot.project()
        self.active = active
        soft = [s for s in active if s.latent is not None]
        if soft:
            torch._foreach_copy_([s.parameter for s in soft], [s.source for s in soft])
        for slot in active:
            if slot.latent is None:
                slot.mask_gradient()

    def once(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure, run exactly once and on sparse weights; the latents go in behind it."""
        self.waiting = True
        versions = [s.parameter._version for s in self.slots]

        @torch.compiler.disable
        def run() -> Any:
            if not self.waiting:
                self.recover()
                raise PomonaError(
                    "the optimizer called its closure twice in one step, the second time on weights that are not "
                    "sparse: use an optimizer that calls it once (SGD, Adam), or step without a closure."
                )
            self.waiting = False
            if versions != [s.parameter._version for s in self.slots]:
                raise PomonaError(
                    "the optimizer moved the weights before it called its closure (as SAM does), so that the "
                    "gradient would not be the sparse model's: use an optimizer that does not."
                )
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                self.enter(optimizer)
            return loss

        return run

    # ---- around the step

    def start(self) -> None:
        """Follow the model: a parameter that was replaced or moved to a device since, if an optimizer moves it."""
        changed = [s for s in self.slots if s.stale()]
        if changed or not self.started:
            guards.require_owned(self.slots, self.optimizers)
        for slot in changed:
            slot.follow()
        if not self.started:
            distributed.agree(self.slots)
            self.started = True

    @torch.no_grad()
    def recover(self) -> None:
        """A step that died with an exception left latents in the model: take it back."""
        self.frame, self.waiting = None, False
        for slot in self.active:
            slot.project()
        self.active = []

    @torch.no_grad()
    def project(self) -> None:
        """Give the model its sparse values."""
        self.recover()
        for slot in self.slots:
            slot.project()

    def clear_state(self) -> None:
        """Zero the optimizers' state off the masks of hard methods."""
        for optimizer in self.optimizers:
            guards.clear_state(optimizer, [s for s in self.slots if s.latent is None])
