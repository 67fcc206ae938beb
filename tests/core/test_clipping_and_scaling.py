"""Gradient clipping, gradient scaling and mixed precision."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from engine_cases import TOTAL, make_hard, soft_and_hard
from engine_helpers import TARGETS, Net, attach_to_network, compute_loss, is_identical, make_sgd, obeys_masks, train
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer

import pomona as pm


def test_hard_methods_mask_the_gradient_before_it_is_clipped() -> None:
    model, optimizer, pruner = attach_to_network(make_hard())
    compute_loss(model, 0).backward()
    compute_loss(model, 1).backward()  # accumulated
    for name, mask in pruner.masks().items():
        gradient = model.get_parameter(name).grad
        assert not gradient[~mask].any()
        assert gradient[mask].any()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    kept = [p.grad[p != 0] if n in TARGETS else p.grad for n, p in model.named_parameters()]
    assert norm > 0.1
    assert torch.stack([g.square().sum() for g in kept]).sum().sqrt() == pytest.approx(0.1, rel=1e-4)
    optimizer.step()
    assert obeys_masks(model, pruner)


def test_hard_methods_mask_what_was_written_to_the_gradient_after_backward() -> None:
    model, optimizer, pruner = attach_to_network(make_hard())
    for at in range(6):
        optimizer.zero_grad()
        compute_loss(model, at).backward()
        for parameter in model.parameters():
            parameter.grad.data.add_(1.0)  # autograd does not notice, as with the buckets of DDP
        optimizer.step()
    assert obeys_masks(model, pruner)
    for name, mask in pruner.masks().items():
        assert not optimizer.state[model.get_parameter(name)]["momentum_buffer"][~mask].any()


@soft_and_hard
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cls", [SGD, Adam])
def test_a_step_skipped_by_grad_scaler_is_not_counted(
    kind: Callable[..., pm.Pruner], cls: type[Optimizer], fused: bool
) -> None:
    def make(model: nn.Module) -> Optimizer:
        return cls(model.parameters(), lr=0.05, fused=fused)  # type: ignore[call-arg]

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, pruner = attach_to_network(kind(schedule="cubic"), make=make)
    plain = attach_to_network(kind(schedule="cubic"), make=make)

    def step(at: int, overflow: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(compute_loss(model, at)).backward()
        if overflow:
            model.head.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()

    for at in range(7):
        before = copy.deepcopy((dict(model.named_parameters()), pruner.state_dict()))
        step(at, overflow=True)
        assert is_identical((dict(model.named_parameters()), pruner.state_dict()), before)
        model.load_state_dict(plain[0].state_dict())  # the forward of the skipped step changed the batch norm
        step(at, overflow=False)
        train(*plain[:2], [at])
    assert pruner.step == 7
    assert is_identical(pruner.masks(), plain[2].masks())
    for key, value in plain[0].state_dict().items():
        assert torch.allclose(model.state_dict()[key], value)


@soft_and_hard
def test_weights_obey_the_masks_under_autocast(kind: Callable[..., pm.Pruner]) -> None:
    model = Net()
    optimizer = make_sgd(model)
    pruner = kind().attach(model, optimizer, total_steps=TOTAL)
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute_loss(model, step)
        loss.backward()
        optimizer.step()
    assert obeys_masks(model, pruner)


@soft_and_hard
def test_half_precision_weights_have_a_finite_delta(kind: Callable[..., pm.Pruner]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)).to(torch.float16)
    with torch.no_grad():
        model[0].weight.fill_(8.0)  # its norm is 512, whose square overflows float16
    plain = {"compressor": "none"} if kind().method.weights == "soft" else {}
    pruner = kind(sparsity=0.5, **plain).attach(model, SGD(model.parameters(), lr=0.1), total_steps=TOTAL)
    assert pruner.history[0]["delta"] == pytest.approx(0.5)
