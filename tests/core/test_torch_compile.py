"""Compiled models and compiled optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_cases import TOTAL, DecaysAfterStep, make_factory, soft_and_hard
from engine_helpers import TARGETS, Net, attach_to_network, compute_loss, make_sgd, obeys_masks, train
from torch.optim import SGD, Optimizer

import pomona as pm


@soft_and_hard
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_pruned_like_a_plain_one(kind: Callable[..., pm.Pruner], backend: str) -> None:
    torch._dynamo.reset()
    model = Net().double()
    compiled = torch.compile(model, backend=backend)
    optimizer = make_sgd(model)
    pruner = kind().attach(compiled, optimizer, total_steps=TOTAL)
    assert tuple(pruner.masks()) == TARGETS
    plain = attach_to_network(kind())
    train(compiled, optimizer, range(6))
    train(*plain[:2], range(6))
    assert pruner.step == 6
    assert obeys_masks(model, pruner)
    for key, value in plain[0].state_dict().items():
        assert torch.allclose(model.state_dict()[key], value)


@soft_and_hard
@pytest.mark.parametrize("cls", [SGD, DecaysAfterStep])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_runs_the_hooks(kind: Callable[..., pm.Pruner], cls: type[Optimizer], backend: str) -> None:
    torch._dynamo.reset()
    make_factory(SGD)(Net())
    model, optimizer, pruner = attach_to_network(kind(), make=make_factory(cls))
    plain = attach_to_network(kind(), make=make_factory(cls))

    @torch.compile(backend=backend)
    def step(at: int) -> None:
        optimizer.step()

    for at in range(6):
        optimizer.zero_grad()
        compute_loss(model, at).backward()
        step(at)
        assert obeys_masks(model, pruner)
    train(*plain[:2], range(6))
    assert pruner.step == 6
    for key, value in plain[0].state_dict().items():
        assert torch.allclose(model.state_dict()[key], value)
