"""The pruner: what a user holds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PomonaError, require
from ..masking import apply_mask
from ..registry import spec_to_dict
from . import guards
from . import history as dynamics
from .companions import companions, norms_behind
from .engine import Engine, Slot
from .mask_bits import pack, unpack
from .method import Masks, Method, Targets, Time
from .targets import unwrap

VERSION = 1  # of the state dictionary


class Pruner:
    """A method at work on a model.

        pruner = pm.DPF(sparsity=0.9)
        pruner.attach(model, optimizer, total_steps=steps)
        ...                                       # the training loop, as it is
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
        self.reached = 0.0  # the sparsity asked for by the last update
        self.at_rest = False  # whether that was the last one of all
        self.finished = False
        self.slots: list[Slot] = []
        self.companions: list[Slot] = []  # biases and norms that follow removed outputs
        self.model: nn.Module | None = None
        self.optimizers: list[Optimizer] = []
        self._engine: Engine | None = None
        self._history: list[dict[str, Any]] = []
        self._memory: dict[str, Any] = {}  # of the method

    def __repr__(self) -> str:
        state = "finished" if self.finished else f"step {self.step} of {self.total}" if self.slots else "not attached"
        return f"<Pruner {self.method}, {state}>"

    # ---- the life of a pruner

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
    ) -> Pruner:
        """Join the optimizer's steps. Nothing is changed where this raises.

        `total_steps` is the length of training in optimizer steps; with `steps_per_epoch` the
        sparsity asked for moves at the start of each epoch, else at every update. Attach after
        DistributedDataParallel. Where several optimizers step in turn, give them in that order:
        the last one's steps are counted.

        `loss` is for methods that look at a gradient before training (SNIP): a function that returns
        the loss of a batch. `track` remembers when each mask entry last changed, for `settled()`, at
        four bytes a weight.
        """
        self._refuse(total_steps, steps_per_epoch)
        optimizers = [
            guards.unwrap_optimizer(o) for o in (optimizer if isinstance(optimizer, Sequence) else [optimizer])
        ]
        for each in optimizers:
            guards.refuse_optimizer(each, self.method.weights)
        if self.method.before:
            guards.refuse_several(optimizers, self.method.name)
        if self.method.remembers:
            guards.refuse_without_momentum(optimizers, self.method.name)
        targets = self.method.targets(model)
        require(
            bool(targets),
            f"{type(unwrap(model)).__name__} has nothing to prune: no convolution, linear, recurrent or attention "
            "weight besides the last classifier; name layers with include=[…].",
        )
        for target in targets:
            self.method.pattern.validate_shape(target.name, target.outputs_first)
        slots = {target.name: Slot.make(target, self.method, track) for target in targets}
        followers = self._followers(unwrap(model), slots) if self.method.pattern.removes_coupled else []
        everything = [*slots.values(), *followers]
        guards.refuse_values(everything)
        if self.method.before or self.method.remembers or self.scored:
            guards.refuse_frozen(slots.values(), self.method.name)
        if self.scored:
            guards.refuse_trained(unwrap(model), slots.values(), self.method.name)
        guards.require_owned(everything, optimizers)
        guards.refuse_overlap(everything, optimizers)

        self.model, self.optimizers = model, optimizers
        self.slots, self.companions = list(slots.values()), followers
        self.total, self.steps_per_epoch = total_steps or 1, steps_per_epoch
        self._hook()
        try:
            self._start(loss)
        except BaseException:
            self._unhook()
            self.slots, self.companions, self.optimizers, self.model = [], [], [], None
            raise
        return self

    def _followers(self, model: nn.Module, slots: dict[str, Slot]) -> list[Slot]:
        """What must go with removed outputs."""
        behind = norms_behind(model)
        for slot in slots.values():
            norm = behind.get(slot.target.module)
            if norm is not None and norm.weight is None:
                slot.plain_norm = norm._buffers.get("running_mean")
        pairs = companions(model, [slot.target for slot in slots.values()], behind)
        return [Slot.make(one, self.method, leader=slots[leader.name]) for one, leader in pairs]

    def finish(self) -> None:
        """Leave exact zeros in a plain model, and let go of it: from here on nothing holds the zeros."""
        if self.finished:
            return
        engine = self._attached()
        engine.refresh()
        if self.method.weights == "free" and self.last_change < self.step:
            self._update(self.method.target)
        if self.reached < self.method.target:
            require(
                not self.method.before,
                f"{self.method.name} has seen no gradient: give attach(…, loss=…), or train one step at least.",
            )
            warnings.warn(
                f"finish() came at step {self.step} of {self.total}, with {self.reached:.1%} pruned: the rest, up to "
                f"{self.method.target:.1%}, was cut at once and not trained since.",
                stacklevel=2,
            )
            self._update(self.method.target)
        engine.cut(last=True)
        self._unhook()
        self.finished = True
        for slot in (*self.slots, *self.companions):
            slot.latent = slot.weight = slot.seen = None

    def tick(self) -> None:
        """Count a step that a CUDA graph replayed, and update the mask when due; no host sync."""
        self._attached()
        require(
            not self.wants_gradient(),
            f"{self.method.name} needs the gradient of this step, which a replay hides: step eagerly where "
            "pruner.wants_gradient().",
        )
        self.advance()

    def refresh(self) -> None:
        """Project at once: after weights were loaded or edited, or a step was broken off."""
        self._attached().refresh()

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Project another copy of the model (an average of weights, say) onto the same masks, in place."""
        self._needs_slots()
        parameters = dict(unwrap(model).named_parameters())
        self._compare("apply", {s.name: s.mask.shape for s in self.slots}, {k: p.shape for k, p in parameters.items()})
        for slot in (*self.slots, *self.companions):
            parameter = parameters[slot.name]
            if slot.gauge is None:
                slot.write(parameter.detach().clone(), parameter)
            else:  # it is of weights that the model ran on: what the method does to them was done
                apply_mask(parameter.detach().clone(), slot.mask.to(parameter.device), parameter)

    # ---- what was reached

    def masks(self) -> Masks:
        """Name → mask, true where kept."""
        return {slot.name: slot.mask for slot in self.slots}

    def sparsity(self) -> float:
        """The pruned fraction reached over the targets."""
        require(
            bool(self.slots),
            "the pruner is not attached: call attach(model, optimizer, total_steps=…) first.",
        )
        kept = sum(int(slot.mask.sum()) for slot in self.slots)
        return 1 - kept / sum(slot.mask.numel() for slot in self.slots)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record a mask update.

        `step`, `sparsity` (asked for), `delta` (δ = ‖w − w̃‖² / ‖w‖², equation 1 of DPF), `flips` (entries
        that changed), `iou` (of the mask with the one before), `layers` (the sparsity of each target).
        """
        # Numbers stay on the device until somebody looks, so that an update needs no host sync.
        self._history = [dynamics.plain(record) for record in self._history]
        return [dict(record) for record in self._history]

    def settled(self) -> list[float]:
        """The share of all mask entries that never change after epoch 0, 1, 2, … (Figure 4 of DPF)."""
        flipped = [slot.flipped for slot in self.slots if slot.flipped is not None]
        require(bool(flipped), "nothing was tracked: call attach(…, track=True).")
        require(self.steps_per_epoch is not None, "epochs are not known: call attach(…, steps_per_epoch=…).")
        return dynamics.settled(flipped, self.steps_per_epoch)  # type: ignore[arg-type]

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: plain values and tensors. It also rides in `optimizer.state_dict()`."""
        state = {
            "version": VERSION,
            "method": spec_to_dict(self.method),
            "step": self.step,
            "total": self.total,
            "steps_per_epoch": self.steps_per_epoch,
            "last_change": self.last_change,
            "reached": self.reached,
            "at_rest": self.at_rest,
            "history": self.history,
            "shapes": {slot.name: list(slot.mask.shape) for slot in self.slots},
            "masks": {slot.name: pack(slot.mask) for slot in self.slots},
            "latents": {s.name: s.latent for s in (*self.slots, *self.companions) if s.latent is not None},
            "flipped": {slot.name: slot.flipped for slot in self.slots if slot.flipped is not None},
            "memory": copy.deepcopy(self._memory),
        }
        if self.scored:  # weights are not kept: the numbers of their last draws tell them
            state["seen"] = {slot.name: pack(slot.seen) for slot in self.slots if slot.seen is not None}
            state["drawn"] = {slot.name: slot.drawn for slot in self.slots if slot.drawn is not None}
        gauges = {slot.name: slot.gauge for slot in self.slots if slot.gauge is not None}
        return state | ({"gauges": gauges} if gauges else {})

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken; the model's weights follow. Nothing is changed where this raises."""
        engine = self._attached()
        masks = self._read(state)
        engine.recover()
        for slot in engine.slots:
            slot.unpark()
        for slot in self.slots:
            slot.mask.copy_(masks[slot.name])
            if slot.flipped is not None and slot.name in state["flipped"]:
                slot.flipped.copy_(state["flipped"][slot.name])
        for slot in engine.slots:
            if slot.latent is not None:
                slot.latent.copy_(state["latents"][slot.name])
            if slot.weight is not None:
                self._draw(slot, state)
            if slot.gauge is not None:
                slot.gauge.copy_(state["gauges"][slot.name])
            if slot.hard or state["at_rest"]:
                slot.heed()
        for key in ("step", "total", "steps_per_epoch", "last_change", "reached", "at_rest"):
            setattr(self, key, state[key])
        self._history = [dict(record) for record in state["history"]]
        self._memory = copy.deepcopy(state["memory"])
        engine.hold()
        self._aim()

    def _draw(self, slot: Slot, state: dict[str, Any]) -> None:
        """The random weights that a state tells of."""
        if slot.drawn is not None:
            slot.drawn.copy_(state["drawn"][slot.name])
        weights = self.method.stream.weights(slot.name, slot.target.fan_in, slot.parameter.detach(), slot.drawn)
        slot.weight.copy_(weights)  # type: ignore[union-attr]
        slot.seen.copy_(unpack(state["seen"][slot.name].to(slot.mask.device), slot.mask.shape))  # type: ignore[union-attr]

    def _read(self, state: dict[str, Any]) -> Masks:
        """The masks in a state, after everything in it was found to be this pruner's."""
        version = state.get("version")
        require(
            version == VERSION, f"the state has version {version}, this is {VERSION}: use the Pomona that wrote it."
        )
        for key in self.state_dict():
            require(key in state, f"the pruner's state is damaged: it has no '{key}'.")
        mine = spec_to_dict(self.method)
        for key in mine.keys() | state["method"].keys():
            given, own = state["method"].get(key), mine.get(key)
            require(given == own, f"the state is of a method with {key} = {given}, this pruner has {own}.")
        self._compare("load", {s.name: s.mask.shape for s in self.slots}, state["shapes"])
        for key, field in (("latents", "latent"), ("gauges", "gauge")):
            held = {s.name: t.shape for s in self._attached().slots if (t := getattr(s, field)) is not None}
            self._compare("load", held, {name: t.shape for name, t in state.get(key, {}).items()})
        return {s.name: unpack(state["masks"][s.name].to(s.mask.device), s.mask.shape) for s in self.slots}

    def __deepcopy__(self, memo: dict[int, Any]) -> Pruner:
        """A pruner for the copied model and optimizer: copy (model, optimizer, pruner) together."""
        twin = Pruner(self.method)
        memo[id(self)] = twin
        unhooked = {"_engine", "method"}
        for key, value in self.__dict__.items():
            if key not in unhooked:
                setattr(twin, key, copy.deepcopy(value, memo))
        if self._engine is not None:
            twin._hook()
        return twin

    # ---- within

    def _refuse(self, total_steps: int | None, steps_per_epoch: int | None) -> None:
        require(not self.finished, "this pruner is finished: make a new one.")
        require(self._engine is None, "this pruner is attached already: make another, or finish() it first.")
        require(
            steps_per_epoch is None or steps_per_epoch >= 1,
            f"steps_per_epoch counts optimizer steps and must be ≥ 1, got {steps_per_epoch}.",
        )
        if self.method.timed:
            require(
                isinstance(total_steps, int) and total_steps >= 1,
                f"{self.method.name} needs total_steps, the length of training in optimizer steps, got {total_steps}.",
            )
        self.method.due(Time(1, total_steps or 1, steps_per_epoch))  # refuses what it would refuse a step later

    def _needs_slots(self) -> None:
        require(bool(self.slots), "the pruner is not attached: call attach(model, optimizer, total_steps=…) first.")

    def _attached(self) -> Engine:
        if self._engine is None:
            raise PomonaError(
                "the pruner is finished and holds nothing any more."
                if self.finished
                else "the pruner is not attached: call attach(model, optimizer, total_steps=…) first."
            )
        return self._engine

    def _hook(self) -> None:
        self._engine = Engine([*self.slots, *self.companions], self.optimizers, self)
        self._engine.carry_state(self.state_dict, self.load_state_dict)
        self._aim()

    def _unhook(self) -> None:
        self._attached().detach()
        self._engine = None

    @property
    def time(self) -> Time:
        """How far training is."""
        return Time(self.step, self.total, self.steps_per_epoch)

    @property
    def scored(self) -> bool:
        """Whether masks follow scores at every step, and weights are random."""
        return self.method.weights == "score"

    # The four that the engine calls.

    def wants_gradient(self) -> bool:
        """Whether the coming step is to be replaced by an update that sees its unmasked gradient."""
        made = bool(self._history) and self.last_change == self.step  # from the loss given to `attach`
        return self.method.before and not made and self.method.due(self.time)

    @torch.no_grad()
    def use_gradient(self) -> None:
        """Make that update."""
        self._update(self.method.asked(self.time), self._complete({s.name: s.parameter.grad for s in self.slots}))

    @torch.no_grad()
    def choose(self) -> None:
        """Let the masks follow the scores."""
        asked = self.method.asked(self.time.next)
        require(
            asked == self.method.target or not guards.capturing(self.slots[0].mask),
            f"a recording would hold {self.method.pattern} at a sparsity of {asked:.2%}, and it is still to rise to "
            f"{self.method.target:.2%}: step eagerly, or take schedule='constant' or pattern='unstructured'.",
        )
        masks = self.method.update(self._targets(), asked)
        for arena in self._attached().arenas:
            arena.put(masks)

    @torch.no_grad()
    def advance(self) -> None:
        """A step was taken, or replaced."""
        self.step += 1
        if self.scored:
            self._follow()
        elif not self.method.before and self.method.due(self.time):
            self._update(self.method.asked(self.time))

    def _start(self, loss: Callable[[], Tensor] | None) -> None:
        """The masks that training begins with."""
        sparsity = self.method.asked(self.time)
        require(
            loss is None or self.wants_gradient(),
            f"{self.method.name} makes no use of a loss at attach: leave it out.",
        )
        if loss is not None:
            self._update(sparsity, self._gradient(loss))
            return
        masks = self.method.start(self._targets(), sparsity)
        if masks is not None:
            for slot in self._attached().slots:
                slot.park()
            self._put(masks, sparsity)
            self._redraw()
        else:
            self._attached().cut()

    def _follow(self) -> None:
        """The masks have followed the scores: make a record when one is due, and draw weights anew."""
        self.reached = self.method.asked(self.time)
        if self.method.due(self.time):
            self._put(self._targets().masks, self.reached)
            self._redraw()
        self._aim()

    def _redraw(self) -> None:
        """Draw pruned weights anew when that is due. The model does not feel it: they are off the mask."""
        number = self.method.redraw(self.time)
        for arena in self._attached().arenas if number else ():
            arena.redraw(number)

    def _aim(self) -> None:
        """Tell the kernels how sparse the masks are to be after the coming step."""
        engine = self._attached()
        if self.scored and engine.aimed != (asked := self.method.asked(self.time.next)):
            engine.aim(asked)

    def _gradient(self, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
        """The gradient of a loss, with batch norm and dropout at rest."""
        model = unwrap(self.model)  # type: ignore[arg-type]
        training = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.enable_grad():
                value = loss()
                fits = isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad
                require(
                    fits,
                    f"loss() must give the loss of a batch, a tensor of one number with a gradient, got {value!r}.",
                )
                gradients = torch.autograd.grad(value, [s.parameter for s in self.slots], allow_unused=True)
        finally:
            for module, mode in training.items():
                module.training = mode
        return self._complete(dict(zip((s.name for s in self.slots), gradients, strict=True)))

    def _complete(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The same gradients, none of them missing."""
        for name, gradient in gradients.items():
            if gradient is None:
                raise PomonaError(
                    f"{name} has no gradient, so the loss does not use it, and {self.method.name} cannot rank it: "
                    f"use exclude=['{name}']."
                )
            if not bool(torch.isfinite(gradient).all()):
                raise PomonaError(
                    f"the gradient of {name} holds NaN or inf, and {self.method.name} cannot rank it: lower the "
                    "learning rate, clip, or skip this step."
                )
        return dict(gradients)  # type: ignore[arg-type]

    def _targets(self, grads: dict[str, Tensor] | None = None) -> Targets:
        """What the method may look at, with outputs first."""

        def view(pick: Callable[[Slot], Tensor | None]) -> dict[str, Tensor]:
            return {s.name: outputs_first(v, s.target.rows) for s in self.slots if (v := pick(s)) is not None}

        return Targets(
            latent=view(lambda slot: slot.source),
            masks=view(lambda slot: slot.mask),
            time=self.time,
            grads=view(lambda slot: grads.get(slot.name)) if grads else {},
            momentum=view(lambda s: guards.momentum(self.optimizers, s.parameter)) if self.method.remembers else {},
            memory=self._memory,
        )

    @torch.no_grad()
    def _update(self, sparsity: float, grads: dict[str, Tensor] | None = None) -> None:
        """New masks from the method, or from kernels that do the same on all layers at once."""
        arenas = self._attached().arenas
        if self.method.ranks and len(arenas) == 1 and arenas[0].aim(sparsity):
            self._put(None, sparsity)
            return
        targets = self._targets(grads)
        self._put(self.method.update(targets, sparsity), sparsity, targets.fresh)

    @torch.no_grad()
    def _put(self, masks: Mapping[str, Tensor] | None, sparsity: float, fresh: Masks | None = None) -> None:
        """Put new masks in force, and note what the change cost."""
        names = [slot.name for slot in self.slots]
        record = dynamics.change(self._attached().arenas, masks, names, self.time, sparsity)
        self.at_rest = self.method.last(self.time)
        self._attached().cut(self.at_rest, fresh)
        self.last_change, self.reached = self.step, sparsity
        self._history.append(record)

    def _compare(self, what: str, mine: Mapping[str, Sequence[int]], theirs: Mapping[str, Sequence[int]]) -> None:
        """Refuse another model's tensors, naming the first that differs."""
        for name, shape in mine.items():
            if name not in theirs:
                raise PomonaError(f"cannot {what}: {name} is missing, so this is another model's.")
            if tuple(theirs[name]) != tuple(shape):
                raise PomonaError(
                    f"cannot {what}: {name} has shape {tuple(theirs[name])} there and {tuple(shape)} here, "
                    "so this is another model's."
                )


def outputs_first(tensor: Tensor, rows: int) -> Tensor:
    """A plain tensor with its outputs in front; views cost some microseconds each, so none without need."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.movedim(rows, 0) if rows else tensor
