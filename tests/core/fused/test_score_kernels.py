"""The kernels of score methods against the CPU: the re-draw, the whole step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pomona as pm

pytestmark = pytest.mark.gpu


def network(channels_last: bool, device: str = "cuda") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 70, 3, padding=1), nn.ReLU(), nn.Conv2d(70, 130, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(130, 300), nn.ReLU(), nn.Linear(300, 10),
    ).to(device)  # fmt: skip
    return model.to(memory_format=torch.channels_last) if channels_last else model  # type: ignore[call-overload]


def begin(channels_last: bool, device: str = "cuda", **options: Any) -> tuple[nn.Module, Any, pm.Pruner]:
    model = network(channels_last, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, pm.IteRand(**options).attach(model, optimizer, total_steps=100)


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    x = torch.randn(8, 3, 9, 9, generator=torch.Generator().manual_seed(seed)).to(model[0].weight.device)
    optimizer.zero_grad()
    F.cross_entropy(model(x), torch.arange(8, device=x.device)).backward()
    optimizer.step()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("distribution", ["sc", "ku"])
@pytest.mark.parametrize("seed", [0, 2**40 + 5])
def test_a_redraw_is_the_cpus_bit_for_bit(channels_last: bool, distribution: str, seed: int) -> None:
    options = {"distribution": distribution, "seed": seed, "rate": 0.3, "every": 50}
    ours, theirs = begin(channels_last, **options)[2], begin(False, "cpu", **options)[2]
    for slot, other in zip(ours.slots, theirs.slots, strict=True):
        assert torch.equal(slot.latent.cpu(), other.latent)  # type: ignore[union-attr]
        other.mask.copy_(slot.mask.cpu())
    for number in (1, 2, 77):
        for pruner in (ours, theirs):
            for buffers in pruner.attached_engine().buffers:
                buffers.redraw_weights(number)
        for slot, other in zip(ours.slots, theirs.slots, strict=True):
            assert torch.equal(slot.weight.cpu(), other.weight)  # type: ignore[union-attr, arg-type]
            assert torch.equal(slot.draw_number.cpu(), other.draw_number)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("allocation", ["uniform", "global", "erk"])
def test_the_fused_step_is_the_plain_one(channels_last: bool, allocation: str) -> None:
    """Fused kernels, and the moves one by one, from the same gradients."""
    options = {"sparsity": 0.6, "every": 5, "rate": 0.5, "allocation": allocation, "schedule": pm.Linear(until=0.2)}
    torch.backends.cudnn.deterministic = True
    model, optimizer, pruner = begin(channels_last, **options)
    other, plain, twin = begin(channels_last, **options)
    for buffers in twin.attached_engine().buffers:
        buffers.kernels = buffers.top_k = None
        buffers.set_sparsity = lambda sparsity: None
    for at in range(25):
        assert pruner.attached_engine().buffers[0].top_k is not None
        step(model, optimizer, at)
        step(other, plain, at)
        for slot, mine in zip(twin.slots, pruner.slots, strict=True):
            assert torch.equal(slot.latent, mine.latent)  # type: ignore[arg-type]
            assert torch.equal(slot.mask, mine.mask)
            assert torch.equal(slot.weight, mine.weight)  # type: ignore[arg-type]
            assert torch.equal(slot.parameter, mine.parameter)
        kept = sum(int(m.sum()) for m in pruner.masks().values())
        assert kept > 0


def test_a_step_never_waits_for_the_device() -> None:
    model, optimizer, pruner = begin(True, every=3, rate=0.1, schedule=pm.Linear())
    for at in range(4):
        step(model, optimizer, at)
    x, y = torch.randn(8, 3, 9, 9, device="cuda"), torch.arange(8, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pruner.step == 10
