"""The swap: one step of the engine, for every method.

    before the step:  mask ← update, where a method wants the gradient; it replaces the step
                      parameter ← latent           (hard methods: the gradient is masked)
    optimizer.step()                               (its momentum, its weight decay, as ever)
    after the step:   latent ← parameter           mask ← update, when one is due
                      parameter ← project(latent)

Between steps the parameters hold their sparse values; what the optimizer moves is the latent. For score
methods that is a score for each weight: its gradient is g ⊙ w, the mask follows it at every step, and the
parameter becomes m ⊙ w again, with weights w that nobody trains.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import PomonaError
from ..masking import apply_mask
from . import distributed, guards
from .fused.flat_buffers import Arena, arenas, dense_strides
from .method import Masks, Method
from .targets import Target, kind


@dataclass(eq=False)
class Slot:
    """One pruned parameter: its mask, for soft methods its latent, for score methods its scores and weights."""

    target: Target
    parameter: nn.Parameter
    method: Method
    mask: Tensor
    latent: Tensor | None  # None: the optimizer moves the parameter itself
    flipped: Tensor | None = None  # the step at which each mask entry last changed, where that is tracked
    parked: Tensor | None = None  # what the first cut took, until the first step: a state may want it back
    plain_norm: Tensor | None = None  # the running mean of a norm without gain and shift that takes the outputs
    leader: Slot | None = None  # the slot whose removed outputs this one follows
    weight: Tensor | None = None  # the random weights that scores choose from
    drawn: Tensor | None = None  # the number of each weight's last re-draw, where there are any
    seen: Tensor | None = None  # the mask of the last record, where the mask moves at every step
    gauge: Tensor | None = None  # what the method measured when the mask was taken, where it does
    version: int = -1  # the parameter's version right after the last projection

    @classmethod
    def make(cls, target: Target, method: Method, track: bool = False, leader: Slot | None = None) -> Slot:
        """A slot that keeps everything."""
        if method.weights == "score":
            return cls.random(target, method, track, leader)
        weight = target.parameter.detach()
        mask = torch.ones_like(weight, dtype=torch.bool)
        return cls(
            target,
            target.parameter,
            method,
            mask=mask,
            latent=weight.clone() if method.weights == "soft" else None,
            flipped=torch.zeros_like(weight, dtype=torch.int32) if track else None,
            leader=leader,
            gauge=method.gauge(weight, mask, target.rows) if leader is None else None,
        )

    @classmethod
    def random(cls, target: Target, method: Method, track: bool, leader: Slot | None) -> Slot:
        """A slot of random weights with random scores; what follows a filter has none of both."""
        like = target.parameter.detach()
        slot = cls(target, target.parameter, method, torch.ones_like(like, dtype=torch.bool), None, leader=leader)
        if leader is None:
            key = target.name, target.fan_in, like
            slot.latent, slot.weight = method.stream.scores(*key), method.stream.weights(*key)
            slot.seen = slot.mask.clone()
            slot.drawn = torch.zeros_like(like, dtype=torch.int32) if method.coin else None
            slot.flipped = torch.zeros_like(like, dtype=torch.int32) if track else None
        return slot

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def hard(self) -> bool:
        """Whether entries off the mask stay zero."""
        return self.method.weights == "hard"

    @property
    def forgets(self) -> bool:
        """Whether gradient and momentum off the mask are zero too."""
        return self.hard and not self.method.remembers

    @property
    def source(self) -> Tensor:
        """What the optimizer moves."""
        return self.parameter if self.latent is None else self.latent

    @property
    def dense(self) -> Tensor:
        """What the mask is put on."""
        return self.source if self.weight is None else self.weight

    def heed(self) -> None:
        """Keep what the leader keeps any weight of."""
        if self.leader is None:
            return
        self.mask.copy_(self.leader.outputs())

    def outputs(self) -> Tensor:
        """Which outputs keep any weight."""
        return self.mask.movedim(self.target.rows, 0).flatten(1).any(1)

    def still(self) -> None:
        """Forget the running mean behind removed outputs, where a norm has no gain and shift to cut."""
        if self.plain_norm is not None:
            self.plain_norm.masked_fill_(~self.outputs(), 0)

    def stale(self) -> bool:
        """Whether the model holds another tensor under this name, or one laid out otherwise, than the slot knows."""
        now = self.target.parameter
        kept = self.source
        laid_out = (
            now.device == self.mask.device and now.dtype == kept.dtype and dense_strides(now) == self.mask.stride()
        )
        return now is not self.parameter or not laid_out

    def follow(self) -> None:
        """Take over the tensor that the model holds now."""
        self.parameter = self.target.parameter
        self.mask = self.mask.to(self.parameter.device)
        self.latent = None if self.latent is None else self.latent.to(self.parameter)
        self.weight = None if self.weight is None else self.weight.to(self.parameter)
        self.gauge = None if self.gauge is None else self.gauge.to(self.parameter)
        for field in ("flipped", "drawn", "seen"):
            if getattr(self, field) is not None:
                setattr(self, field, getattr(self, field).to(self.parameter.device))
        self.version = -1

    def project(self) -> None:
        """Give the model the sparse value."""
        self.write(self.dense, self.parameter)
        self.version = self.parameter._version

    def write(self, values: Tensor, out: Tensor) -> None:
        """The sparse value of `values`; what follows a filter is masked and nothing else."""
        mask = self.mask.to(out.device)
        if self.leader is None:
            self.method.project(values, mask, out, self.gauge)
        else:
            apply_mask(values, mask, out)

    def measure(self, mask: Tensor) -> None:
        """Note what the method is to know of a mask; in place, for a recording reads it there."""
        if self.gauge is not None:
            self.gauge.copy_(self.method.gauge(self.source, mask, self.target.rows))  # type: ignore[arg-type]

    def ease(self) -> None:
        """Mask the latent and do nothing else to it, until the next mask is taken."""
        self.measure(torch.ones_like(self.mask))

    def rest(self) -> None:
        """The mask is at rest: what the model runs on is what the optimizer moves from here on."""
        if self.gauge is not None:
            self.source.copy_(torch.where(self.mask, self.sparse(), self.source))
            self.ease()

    def park(self) -> None:
        """Keep the value until the first step, where there is no latent to keep it."""
        if self.latent is None:
            self.parked = self.parameter.detach().clone()

    def unpark(self) -> None:
        """Undo the first cut, unless the user has written the parameter since."""
        if self.parked is not None and self.parameter._version == self.version:
            self.parameter.copy_(self.parked)

    def hold(self) -> None:
        """Keep the model sparse between two updates; free weights grow there."""
        if self.method.weights != "free":
            self.project()

    def sparse(self) -> Tensor:
        """A new tensor with the sparse value."""
        value = torch.empty_like(self.parameter, requires_grad=False)
        self.write(self.dense, value)
        return value

    def bound(self) -> None:
        """Let the method bound the latent."""
        if self.latent is not None and self.leader is None:
            self.method.bound(self.latent)

    def mask_gradient(self) -> None:
        """Zero the gradient off the mask."""
        if self.parameter.grad is not None:
            apply_mask(self.parameter.grad, self.mask, self.parameter.grad)

    def accept(self) -> bool:
        """Where the user wrote the parameter since the last projection, take its value as the latent.

        Random weights are not taken from anybody.
        """
        edited = guards.edited(self)
        if edited and self.latent is not None and self.weight is None:
            self.latent.copy_(self.parameter)
            self.bound()
            self.ease()
        return edited


class Owner(Protocol):
    """Who decides when masks change: the pruner."""

    def wants_gradient(self) -> bool:
        """Whether the coming step is to be replaced by an update that sees its unmasked gradient."""

    def use_gradient(self) -> None:
        """Make that update."""

    def choose(self) -> None:
        """Let the masks follow the scores."""

    def advance(self) -> None:
        """A step was taken, or replaced."""


class Engine:
    """Joins slots to optimizers, on behalf of an owner that decides when masks change."""

    def __init__(self, slots: Sequence[Slot], optimizers: Sequence[Optimizer], owner: Owner) -> None:
        self.slots = slots
        self.arenas = arenas(slots)
        self.biases = biases(slots)
        self.aimed: float | None = None  # the sparsity that the coming step is to have, where masks follow scores
        self.optimizers = optimizers
        self.owner = owner
        self.started = False  # whether a step was seen: what is attached is checked at the first
        self.frame: FrameType | None = None  # of the optimizer.step under way
        self.active: list[Slot] = []  # the slots that hold their latent right now
        self.held: dict[nn.Parameter, Tensor] = {}  # the gradients of a step that an update replaced
        self.waiting = False  # for the optimizer to call its closure
        self.owned: dict[Optimizer, tuple[int, set[int]]] = {}  # see `own`
        self.key = free_key(optimizers[-1])
        self.handles: list[Any] = [watch(self)]
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self.uncompiled(self.before)))
            self.handles.append(optimizer.register_step_post_hook(self.uncompiled(self.after)))
        for slot in slots:
            self.follow_gradient(slot)

    def uncompiled(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that torch.compile leaves alone, and that knows whose it is."""
        wrapper = torch.compiler.disable(hook)  # here and not as a decorator: it takes a second to import
        wrapper.engine = self
        return wrapper

    def follow_gradient(self, slot: Slot) -> None:
        """Mask a hard slot's gradient as it is made, so that clipping sees the one that will be used."""
        if slot.forgets and slot.parameter.requires_grad:
            self.handles.append(slot.parameter.register_post_accumulate_grad_hook(self.on_gradient(slot)))

    def carry_state(self, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]) -> None:
        """Let a state ride in the optimizer's, so that stacks which know nothing of us resume too."""

        def on_save(_: Optimizer, state: dict[str, Any]) -> None:
            state[self.key] = save()

        def on_load(_: Optimizer, state: dict[str, Any]) -> None:
            if self.key in state:
                load(state[self.key])

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

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Step post-hook."""
        if self.frame is not None and guards.step_frame(optimizer) is not self.frame:
            return  # the inner step of a subclass
        self.frame = None
        if self.waiting:
            self.recover()
            raise PomonaError(f"{type(optimizer).__name__} was given a closure and did not call it: step without one.")
        self.give_back()
        active, self.active = self.active, []
        recorded = guards.capturing(self.slots[0].mask)
        taken = recorded or not guards.skipped(optimizer)
        self.leave(active, taken)
        if optimizer is self.clock and taken and not recorded:
            self.owner.advance()

    def enter(self, optimizer: Optimizer) -> None:
        """Give the optimizer the latents of its own parameters that have a gradient."""
        own = self.own(optimizer)
        active = [s for s in self.slots if s.parameter.grad is not None and id(s.parameter) in own]
        for slot in active:
            if slot.parameter._version != slot.version and slot.accept():
                if slot.weight is not None:
                    guards.refuse_edited(slot.name)
                guards.warn_edited(slot.name)
                slot.project()
        if self.owner.wants_gradient() and not guards.skipped(optimizer):
            self.owner.use_gradient()
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.held = {p: p.grad for p in parameters if p.grad is not None}
            for parameter in self.held:
                parameter.grad = None  # so that the optimizer has nothing to do
            return
        self.active = active
        self.lend(active)
        for arena, slots in self.divide(active):
            arena.enter(slots)
        if active and active[0].forgets:
            for slot in active:
                slot.mask_gradient()

    def lend(self, slots: Sequence[Slot]) -> None:
        """Give scores their gradient, g ⊙ w with g taken at the sparse weights; biases stay as they are.

        Others are given what the method leaves of theirs.
        """
        scored = [slot for slot in slots if slot.weight is not None]
        tempered = [slot for slot in slots if slot.leader is None] if slots and slots[0].method.tempers else []
        still = [p for p in (module._parameters.get(leaf) for module, leaf in self.biases) if p is not None]
        lent = [slot.parameter for slot in (*scored, *tempered)] + still
        self.held = {p: p.grad for p in lent if p.grad is not None}
        for bias in still:
            bias.grad = None
        if scored:
            factors: Any = [slot.weight for slot in scored]
            products = torch._foreach_mul([self.held[slot.parameter] for slot in scored], factors)
            for slot, gradient in zip(scored, products, strict=True):
                slot.parameter.grad = gradient
        for slot in tempered:
            slot.parameter.grad = slot.method.temper(self.held[slot.parameter], slot.mask, slot.target.rows)

    def give_back(self) -> None:
        """The gradients as backward left them."""
        for parameter, gradient in self.held.items():
            parameter.grad = gradient
        self.held = {}

    def leave(self, slots: Sequence[Slot], taken: bool) -> None:
        """Take the latents back and give the model its sparse values; masks follow scores if the step was taken."""
        parts = self.divide(slots)
        if not slots or self.slots[0].weight is None:
            for arena, mine in parts:
                arena.leave(mine)
        elif taken and len(parts) == 1 and parts[0][0].follow(slots):
            return
        else:
            for arena, mine in parts:
                arena.take(mine)
            if taken:
                self.owner.choose()
            for arena in self.arenas:
                arena.project()

    def aim(self, sparsity: float | None) -> None:
        """How sparse scores are to leave the model after the coming step."""
        self.aimed = sparsity
        if sparsity is not None:
            for arena in self.arenas:
                arena.aim(sparsity)

    def own(self, optimizer: Optimizer) -> set[int]:
        """The identities of an optimizer's parameters, found anew when their number changed."""
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        known = self.owned.get(optimizer)
        if known is None or known[0] != count:
            known = count, {id(p) for group in optimizer.param_groups for p in group["params"]}
            self.owned[optimizer] = known
        return known[1]

    def divide(self, slots: Sequence[Slot]) -> list[tuple[Arena, Sequence[Slot]]]:
        """Slots by their arena."""
        if len(self.arenas) == 1:
            return [(self.arenas[0], slots)]
        return [(arena, [s for s in slots if s in set(arena.slots)]) for arena in self.arenas]

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
                self.hold()
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

    def on_gradient(self, slot: Slot) -> Callable[[Tensor], None]:
        """A post-accumulate-grad hook that masks, unless an update is about to look at the dense gradient."""
        # Weak, for Python cannot see a cycle through a parameter's hooks and would never free it.
        engine, weak = weakref.ref(self), weakref.ref(slot)

        @torch.no_grad()
        def mask(_: Tensor) -> None:
            alive, mine = engine(), weak()
            if alive is not None and mine is not None and not alive.owner.wants_gradient():
                mine.mask_gradient()

        return torch.compiler.disable(mask)

    def start(self) -> None:
        """Follow the model: a parameter that was replaced or moved to a device since, if an optimizer moves it."""
        replaced = [s for s in self.slots if s.target.module._parameters[s.target.leaf] is not s.parameter]
        moved = [arena.moved() for arena in self.arenas]  # of all, for each takes note
        changed = [s for s in self.slots if s.stale()] if replaced or any(moved) else []
        if changed or not self.started:
            guards.require_owned(self.slots, self.optimizers)
        for slot in changed:
            slot.follow()
            self.follow_gradient(slot)
        if changed:
            self.arenas = arenas(self.slots)
            self.aim(self.aimed)
            self.owned.clear()
        if not self.started:
            distributed.agree(self.slots)
            self.started = True
            for slot in self.slots:
                slot.parked = None

    @torch.no_grad()
    def recover(self) -> None:
        """A step that died with an exception left latents in the model: take it back."""
        self.frame, self.waiting = None, False
        self.give_back()
        for slot in self.active:
            slot.hold()
        self.active = []

    @torch.no_grad()
    def hold(self) -> None:
        """Give the model its sparse values."""
        self.recover()
        for slot in self.slots:
            slot.hold()

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the model its sparse values, from what the user may have loaded since the last step."""
        self.recover()
        for slot in self.slots:
            slot.accept()
            slot.hold()

    @torch.no_grad()
    def cut(self, last: bool = False, fresh: Masks | None = None) -> None:
        """Put new masks in force, and let optimizers forget what hard methods drop.

        The bias and the norm of a removed filter fall with it at once where weights are hard. Where they
        can come back they fall with the last mask: behind a zero gain no filter would ever learn again.
        `fresh` entries start anew, at zero and with no momentum.
        """
        for slot in self.slots:
            if fresh and slot.name in fresh:
                anew = fresh[slot.name].movedim(0, slot.target.rows)
                slot.source.detach().masked_fill_(anew, 0)
                guards.clear_state(self.optimizers, slot.parameter, ~anew)
        for slot in self.slots:
            if slot.hard or last:
                slot.heed()
                slot.still()
            if last:
                slot.rest()
        for arena in self.arenas:
            if arena.method.weights == "free" and not last:
                for slot in arena.targets:
                    slot.project()
            else:
                arena.project()
        for slot in self.slots:
            if slot.forgets:
                guards.clear_state(self.optimizers, slot.parameter, slot.mask)


def biases(slots: Sequence[Slot]) -> list[tuple[nn.Module, str]]:
    """Where the biases of random weights are, which nobody trains."""
    modules = dict.fromkeys(slot.target.module for slot in slots if slot.weight is not None)
    return [
        (module, leaf)
        for module in modules
        for leaf, parameter in module._parameters.items()
        if parameter is not None and kind("", module, leaf, parameter) == "bias"
    ]


def free_key(optimizer: Optimizer) -> str:
    """The key under which a state rides in the optimizer's: "pomona", or with a number where that is taken."""
    taken = {engine.key for engine in guards.engines(optimizer)}
    keys = itertools.chain(["pomona"], (f"pomona_{n}" for n in itertools.count(2)))
    return next(key for key in keys if key not in taken)


def watch(engine: Engine) -> Any:
    """Refuse steps of an optimizer that is not attached and moves pruned weights: it would undo the pruning."""
    watched = weakref.ref(engine)

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        alive = watched()
        if alive is None or guards.unwrap_optimizer(optimizer) in alive.optimizers:
            return
        if alive.frame is None or not guards.still_running(alive.frame):  # one of ours may step another inside
            guards.refuse_foreign(optimizer, alive.slots)

    handle = register_optimizer_step_pre_hook(torch.compiler.disable(check))
    weakref.finalize(engine, handle.remove)  # where a pruner is dropped without finish()
    return handle
