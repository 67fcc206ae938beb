"""Closures given to `optimizer.step`: run once, on sparse weights, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import (
    TOTAL,
    copy_latents,
    copy_state,
    ignore_warnings,
    make_closure,
    make_factory,
    make_soft,
    soft_and_hard,
)
from engine_helpers import Net, attach_to_network, is_identical, obeys_masks, train
from torch.optim import SGD, Optimizer

import pomona as pm


@soft_and_hard
@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_a_closure_runs_once_on_sparse_weights(kind: Callable[..., pm.Pruner], style: str) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    plain = attach_to_network(kind())
    for step in range(10):
        seen: list[Any] = []
        closure = make_closure(model, optimizer, step, seen)
        loss = optimizer.step(closure) if style == "positional" else optimizer.step(closure=closure)
        assert loss.item() > 0
        assert len(seen) == 1
        assert torch.equal(seen[0]["conv1.weight"], plain[0].conv1.weight)
        train(*plain[:2], [step])
    assert is_identical(copy_state(pruner), copy_state(plain[2]))
    assert pruner.step == 10


class CallsClosureTwice(SGD):
    """SGD that calls its closure a second time, after it has moved the weights."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        closure()
        return loss


class IgnoresClosure(SGD):
    """SGD that does not call its closure."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


class MovesBeforeClosure(SGD):
    """SGD that moves the weights before it calls its closure, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(0.01)
        return super().step(closure)


@soft_and_hard
@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (CallsClosureTwice, "called its closure twice"),
        (IgnoresClosure, "did not call it"),
        (MovesBeforeClosure, "moved the weights"),
    ],
)
def test_optimizers_that_misuse_their_closure_are_refused(
    kind: Callable[..., pm.Pruner], cls: type[Optimizer], message: str
) -> None:
    model, optimizer, pruner = attach_to_network(kind(), make=make_factory(cls))
    dense = copy_latents(pruner)
    with pytest.raises(pm.PomonaError, match=message):
        optimizer.step(make_closure(model, optimizer, 0))
    assert pruner.step == 0
    assert is_identical(copy_latents(pruner), dense)
    with ignore_warnings():
        pruner.refresh()
    assert obeys_masks(model, pruner)
    if cls is not MovesBeforeClosure:
        assert is_identical(copy_latents(pruner), dense)


def test_weights_moved_before_the_closure_do_not_change_the_latents() -> None:
    model, optimizer, pruner = attach_to_network(make_soft(), make=make_factory(MovesBeforeClosure))
    dense = copy_latents(pruner)
    with pytest.raises(pm.PomonaError, match="moved the weights"):
        optimizer.step(make_closure(model, optimizer, 0))
    with ignore_warnings():
        pruner.refresh()
    assert is_identical(copy_latents(pruner), dense)


@soft_and_hard
def test_lbfgs_is_refused_at_attach(kind: Callable[..., pm.Pruner]) -> None:
    model = Net()
    with pytest.raises(pm.PomonaError, match="LBFGS calls its closure several times"):
        kind().attach(model, torch.optim.LBFGS(model.parameters()), total_steps=TOTAL)
