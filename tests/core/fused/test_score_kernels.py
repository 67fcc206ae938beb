"""The kernels of score methods: the re-draw against the CPU, and the fused step against the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pomona as pm

pytestmark = pytest.mark.gpu


def make_network(channels_last: bool, device: str = "cuda", bias: bool = True) -> nn.Module:
    """Return a network whose layers do not fill the blocks of the kernels."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 70, 3, padding=1, bias=bias), nn.ReLU(), nn.Conv2d(70, 130, 3, bias=bias),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(130, 300, bias=bias), nn.ReLU(), nn.Linear(300, 10, bias=bias),
    ).to(device)  # fmt: skip
    return model.to(memory_format=torch.channels_last) if channels_last else model  # type: ignore[call-overload]


def attach_iterand(channels_last: bool, device: str = "cuda", **options: Any) -> tuple[nn.Module, Any, pm.Pruner]:
    """Return a network, its optimizer and IteRand attached to both; kernels do not mask the biases of units."""
    model = make_network(channels_last, device, bias="pattern" not in options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, pm.IteRand(**options).attach(model, optimizer, total_steps=100)


def train_step(model: nn.Module, optimizer: Any, seed: int) -> None:
    """Take one training step on random images."""
    x = torch.randn(8, 3, 9, 9, generator=torch.Generator().manual_seed(seed)).to(model[0].weight.device)
    optimizer.zero_grad()
    F.cross_entropy(model(x), torch.arange(8, device=x.device)).backward()
    optimizer.step()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("distribution", ["sc", "ku"])
@pytest.mark.parametrize("seed", [0, 2**40 + 5])
def test_a_redraw_gives_the_bits_of_the_cpu(channels_last: bool, distribution: str, seed: int) -> None:
    options = {"distribution": distribution, "seed": seed, "rate": 0.3, "every": 50}
    on_gpu, on_cpu = attach_iterand(channels_last, **options)[2], attach_iterand(False, "cpu", **options)[2]
    for slot, other in zip(on_gpu.slots, on_cpu.slots, strict=True):
        assert torch.equal(slot.latent.cpu(), other.latent)  # type: ignore[union-attr]
        other.mask.copy_(slot.mask.cpu())
    for number in (1, 2, 77):
        for pruner in (on_gpu, on_cpu):
            for buffers in pruner.attached_engine().buffers:
                buffers.redraw_weights(number)
        for slot, other in zip(on_gpu.slots, on_cpu.slots, strict=True):
            assert torch.equal(slot.weight.cpu(), other.weight)  # type: ignore[union-attr, arg-type]
            assert torch.equal(slot.draw_number.cpu(), other.draw_number)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("allocation", ["uniform", "global", "erk"])
@pytest.mark.parametrize("pattern", ["unstructured", "filter(of='filters')"])
def test_the_fused_step_equals_the_plain_step(
    channels_last: bool, allocation: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused kernels and separate operations give the same bits from the same gradients."""
    options = {"sparsity": 0.6, "every": 5, "rate": 0.5, "allocation": allocation, "schedule": pm.Linear(until=0.2)}
    if pattern != "unstructured":
        options["pattern"] = pattern
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    model, optimizer, pruner = attach_iterand(channels_last, **options)
    other, second_optimizer, unfused = attach_iterand(channels_last, **options)
    for buffers in unfused.attached_engine().buffers:
        buffers.kernels = buffers.top_k = None
        buffers.set_sparsity = lambda sparsity: None
    for at in range(25):
        assert pruner.attached_engine().buffers[0].top_k is not None
        train_step(model, optimizer, at)
        train_step(other, second_optimizer, at)
        for slot, fused_slot in zip(unfused.slots, pruner.slots, strict=True):
            assert torch.equal(slot.latent, fused_slot.latent)  # type: ignore[arg-type]
            assert torch.equal(slot.mask, fused_slot.mask)
            assert torch.equal(slot.weight, fused_slot.weight)  # type: ignore[arg-type]
            assert torch.equal(slot.parameter, fused_slot.parameter)
        kept = sum(int(m.sum()) for m in pruner.masks().values())
        assert kept > 0


def test_a_step_does_not_synchronize_with_the_device() -> None:
    model, optimizer, pruner = attach_iterand(True, every=3, rate=0.1, schedule=pm.Linear())
    for at in range(4):
        train_step(model, optimizer, at)
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
