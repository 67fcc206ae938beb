"""Masks that kernels pick for all layers at once are those that the method takes layer by layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pomona as pm
from pomona.methods.dpf import DPF

pytestmark = pytest.mark.gpu


def train(allocation: str, layout: torch.memory_format, sparsity: float) -> tuple[pm.Pruner, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(256, 5))
    model = model.cuda().to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    pruner = pm.DPF(sparsity=sparsity, every=2, allocation=allocation)
    pruner.attach(model, optimizer, total_steps=24, steps_per_epoch=4)
    for step in range(20):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(16, 3, 8, 8, device="cuda", generator=generator).to(memory_format=layout)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return pruner, {name: mask.clone() for name, mask in pruner.masks().items()}


@pytest.mark.parametrize("allocation", ["global", "global(floor=0.04)", "uniform", "erk"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.95])
def test_picked_is_selected(monkeypatch, allocation, layout, sparsity):
    picked, ours = train(allocation, layout, sparsity)
    assert picked._engine.buffers[0].magnitude is not None  # it went that way
    monkeypatch.setattr(DPF, "ranks", False)
    selected, theirs = train(allocation, layout, sparsity)
    assert selected._engine.buffers[0].magnitude is None
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [r["flips"] for r in picked.history] == [r["flips"] for r in selected.history]
    assert picked.sparsity() == selected.sparsity()


def test_float64_and_other_patterns_go_the_usual_way():
    model = nn.Linear(8, 8).cuda().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pruner = pm.DPF(sparsity=0.5, every=1, include=["weight"]).attach(model, optimizer, total_steps=4)
    model(torch.ones(1, 8, device="cuda", dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert pruner._engine.buffers[0].magnitude is None
