"""Guards of a private optimizer: only private steps may use it, and only for the parameters it was made with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..errors import PomonaError, require

_guards: WeakKeyDictionary[torch.optim.Optimizer, OptimizerGuard] = WeakKeyDictionary()


class OptimizerGuard:
    """A hook before each step of an optimizer, which refuses steps that are not private."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.is_open = False
        optimizer.register_step_pre_hook(self.refuse_foreign_step)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerGuard:
        """Return the guard of an optimizer, one for all private steps that use it."""
        if optimizer not in _guards:
            _guards[optimizer] = cls(optimizer)
        return _guards[optimizer]

    def refuse_foreign_step(self, *arguments: Any) -> None:
        """Raise PomonaError unless a private step is taking its step."""
        if not self.is_open:
            raise PomonaError(
                "optimizer.step() was called outside the private step, with gradients that have no noise: call the "
                "private step instead, or make another optimizer for steps on public data."
            )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Allow steps within the block."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False


def refuse_other_optimizers(optimizer: torch.optim.Optimizer) -> None:
    """Raise PomonaError for an optimizer whose step needs more than one dense gradient."""
    kind = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    require(
        closure is None or closure.default is not inspect.Parameter.empty,
        f"{kind} computes the gradient several times in a step, by a closure, and a private step has noise for one: "
        "use SGD, Adam or another optimizer without a closure.",
    )
    require(
        not isinstance(optimizer, torch.optim.SparseAdam),
        f"{kind} takes sparse gradients, and noise makes every coordinate of a private one dense: use Adam.",
    )


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizer updates, by name; raise PomonaError if one is not the model's."""
    updated = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    found = {name: p for name, p in model.named_parameters() if id(p) in updated}
    require(
        len(found) == len(updated) > 0,
        f"the optimizer updates {len(updated)} parameters, of which {len(found)} are the model's: make it from "
        "model.parameters(), after any layer was replaced.",
    )
    return found


def refuse_other_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Raise PomonaError if the optimizer or the model has other parameters to train than at the beginning.

    Gradients of frozen parameters, which an optimizer would apply without noise, are cleared.
    """
    now = trained_parameters(model, optimizer)
    is_same = now.keys() == parameters.keys() and all(now[name] is parameters[name] for name in now)
    changed = sorted(now.keys() ^ parameters.keys()) or sorted(now)
    require(
        is_same,
        f"the parameters that the optimizer updates have changed since the private step was made ('{changed[0]}'): "
        "their gradients would have no noise, so make a new private step.",
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
