"""The pruner: what a user holds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import guards
from .engine import Engine, Slot
from .errors import PomonaError, require
from .method import Masks, Method, Targets
from .packing import pack, unpack
from .registry import describe
from .targets import prunable, unwrap

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
        self.finished = False
        self.slots: list[Slot] = []
        self.model: nn.Module | None = None
        self.optimizers: list[Optimizer] = []
        self._engine: Engine | None = None
        self._history: list[dict[str, Any]] = []

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
    ) -> Pruner:
        """Join the optimizer's steps. Nothing is changed where this raises.

        `total_steps` is the length of training in optimizer steps; with `steps_per_epoch` the
        sparsity asked for moves at the start of each epoch, else at every update. Attach after
        DistributedDataParallel. Where several optimizers step in turn, give them in that order:
        the last one's steps are counted.
        """
        self._refuse(total_steps)
        optimizers = [guards.unwrap_optimizer(o) for o in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
        for each in optimizers:
            guards.refuse_optimizer(each, self.method.weights)
        targets = prunable(model, self.method.include, self.method.exclude, self.method.dense).targets
        require(
            bool(targets),
            f"{type(unwrap(model)).__name__} has nothing to prune: no convolution, linear, recurrent or attention "
            "weight besides the last classifier; name layers with include=[…].",
        )
        for target in targets:
            self.method.pattern.check(target.name, target.shape)
        slots = [Slot.make(target, self.method) for target in targets]
        guards.refuse_values(slots)
        guards.require_owned(slots, optimizers)
        guards.refuse_overlap(slots, optimizers)

        self.model, self.slots, self.optimizers = model, slots, optimizers
        self.total, self.steps_per_epoch = total_steps or 1, steps_per_epoch
        self._hook()
        self._update_if_due()
        return self

    def finish(self) -> None:
        """Leave exact zeros in a plain model, and let go of it: from here on nothing holds the zeros."""
        if self.finished:
            return
        engine = self._attached()
        engine.project()
        if self.reached < self.method.target:
            warnings.warn(
                f"finish() came at step {self.step} of {self.total}, with {self.reached:.1%} pruned: the rest, up to "
                f"{self.method.target:.1%}, was cut at once and not trained since.",
                stacklevel=2,
            )
            self._update(self.method.target)
        self._unhook()
        self.finished = True
        for slot in self.slots:
            slot.latent = None

    def tick(self) -> None:
        """Count a step that a CUDA graph replayed, and update the mask when due; no host sync."""
        self._attached()
        self._advance()

    def refresh(self) -> None:
        """Project at once: after weights were loaded or edited, or a step was broken off."""
        engine = self._attached()
        engine.recover()
        with torch.no_grad():
            for slot in self.slots:
                if guards.edited(slot):
                    slot.accept()
        engine.project()

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Project another copy of the model (an average of weights, say) onto the same masks, in place."""
        parameters = dict(unwrap(model).named_parameters())
        self._compare("apply", {s.name: s.mask.shape for s in self.slots}, {k: p.shape for k, p in parameters.items()})
        for slot in self.slots:
            parameter = parameters[slot.name]
            self.method.project(parameter.detach().clone(), slot.mask.to(parameter.device), parameter)

    # ---- what was reached

    def masks(self) -> Masks:
        """Name → mask, true where kept."""
        return {slot.name: slot.mask for slot in self.slots}

    def sparsity(self) -> float:
        """The pruned fraction reached over the targets."""
        require(bool(self.slots), "the pruner is not attached: call attach(model, optimizer, total_steps=…) first.")
        kept = sum(int(slot.mask.sum()) for slot in self.slots)
        return 1 - kept / sum(slot.mask.numel() for slot in self.slots)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record a mask update: step, sparsity asked for, and δ = ‖w − w̃‖² / ‖w‖² (equation 1 of DPF)."""
        for record in self._history:
            # On the device until somebody looks, so that an update needs no host sync.
            record["delta"] = float(record["delta"])
        return [dict(record) for record in self._history]

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: plain values and tensors. It also rides in `optimizer.state_dict()`."""
        return {
            "version": VERSION,
            "method": describe(self.method),
            "step": self.step,
            "total": self.total,
            "steps_per_epoch": self.steps_per_epoch,
            "last_change": self.last_change,
            "reached": self.reached,
            "history": self.history,
            "masks": {slot.name: pack(slot.mask) for slot in self.slots},
            "latents": {slot.name: slot.latent for slot in self.slots if slot.latent is not None},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken; the model's weights follow. Nothing is changed where this raises."""
        engine = self._attached()
        version = state.get("version")
        require(version == VERSION, f"the pruner's state has version {version}, this is {VERSION}: use the Pomona that wrote it.")
        mine = describe(self.method)
        for key in mine.keys() | state["method"].keys():
            given, own = state["method"].get(key), mine.get(key)
            require(given == own, f"the state is of a method with {key} = {given}, this pruner has {own}.")
        self._compare("load", {s.name: pack(s.mask).shape for s in self.slots}, {k: m.shape for k, m in state["masks"].items()})
        engine.recover()
        for slot in self.slots:
            slot.mask.copy_(unpack(state["masks"][slot.name].to(slot.mask.device), slot.mask.shape))
            if slot.latent is not None:
                slot.latent.copy_(state["latents"][slot.name])
        for key in ("step", "total", "steps_per_epoch", "last_change", "reached"):
            setattr(self, key, state[key])
        self._history = [dict(record) for record in state["history"]]
        engine.project()

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

    def _refuse(self, total_steps: int | None) -> None:
        require(not self.finished, "this pruner is finished: make a new one.")
        require(self._engine is None, "this pruner is attached already: make another, or finish() it first.")
        if self.method.timed:
            require(
                isinstance(total_steps, int) and total_steps >= 1,
                f"{self.method.name} needs total_steps, the length of training in optimizer steps, got {total_steps}.",
            )

    def _attached(self) -> Engine:
        if self._engine is None:
            raise PomonaError(
                "the pruner is finished and holds nothing any more."
                if self.finished
                else "the pruner is not attached: call attach(model, optimizer, total_steps=…) first."
            )
        return self._engine

    def _hook(self) -> None:
        self._engine = Engine(self.slots, self.optimizers, self._advance)
        self._engine.clear_state()
        self._engine.carry_state(self.state_dict, self.load_state_dict)

    def _unhook(self) -> None:
        self._attached().detach()
        self._engine = None

    @torch.no_grad()
    def _advance(self) -> None:
        """One more step was taken."""
        self.step += 1
        self._update_if_due()

    def _update_if_due(self) -> None:
        if self.method.due(self.step, self.total):
            self._update(self.method.asked(self.step, self.total, self.steps_per_epoch))

    @torch.no_grad()
    def _update(self, sparsity: float) -> None:
        """New masks, and what the change cost."""
        view = {slot.name: slot.source.detach().movedim(slot.target.rows, 0) for slot in self.slots}
        masks = {slot.name: slot.mask.movedim(slot.target.rows, 0) for slot in self.slots}
        new = self.method.update(Targets(view, masks, self.step, self.total), sparsity)
        lost, whole = [], []
        for slot in self.slots:
            slot.mask.copy_(new[slot.name].movedim(0, slot.target.rows))
            lost.append(torch.linalg.vector_norm(slot.source - slot.sparse()))
            whole.append(torch.linalg.vector_norm(slot.source))
        self._attached().clear_state()
        self._attached().project()
        self.last_change, self.reached = self.step, sparsity
        self._history.append({"step": self.step, "sparsity": sparsity, "delta": ratio(lost, whole)})

    def _compare(self, what: str, mine: dict[str, torch.Size], theirs: dict[str, torch.Size]) -> None:
        """Refuse another model's tensors, naming the first that differs."""
        for name, shape in mine.items():
            if name not in theirs:
                raise PomonaError(f"cannot {what}: {name} is missing, so this is another model's.")
            if tuple(theirs[name]) != tuple(shape):
                raise PomonaError(
                    f"cannot {what}: {name} has shape {tuple(theirs[name])} there and {tuple(shape)} here, "
                    "so this is another model's."
                )


def ratio(lost: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
    """δ from the norms of its parts."""
    return torch.stack(list(lost)).square().sum() / torch.stack(list(whole)).square().sum()
