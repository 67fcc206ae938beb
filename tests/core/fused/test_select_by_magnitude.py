"""Masks that kernels select by magnitude for all layers at once equal those that the method selects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pomona as pm
from pomona.methods.dpf import DPF

pytestmark = pytest.mark.gpu


def train_dpf(
    allocation: str, layout: torch.memory_format, sparsity: float, pattern: str = "unstructured"
) -> tuple[pm.Pruner, dict[str, torch.Tensor]]:
    """Train with DPF and return the pruner and copies of its masks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(256, 5))
    model = model.cuda().to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    pruner = pm.DPF(sparsity=sparsity, every=2, allocation=allocation, pattern=pattern)
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
@pytest.mark.parametrize(
    ("pattern", "sparsity"),
    [
        ("unstructured", 0.0),
        ("unstructured", 0.5),
        ("unstructured", 0.95),
        ("filter(of='filters')", 0.4),
        ("block(2, 1)", 0.5),
    ],
)
def test_kernels_select_the_masks_of_the_method(monkeypatch, allocation, layout, pattern, sparsity):
    by_kernels, masks = train_dpf(allocation, layout, sparsity, pattern)
    assert by_kernels.attached_engine().buffers[0].magnitude is not None  # kernels selected
    monkeypatch.setattr(DPF, "ranks_by_magnitude", False)
    by_method, expected = train_dpf(allocation, layout, sparsity, pattern)
    assert by_method.attached_engine().buffers[0].magnitude is None
    assert all(torch.equal(masks[name], expected[name]) for name in expected)
    assert [entry["flips"] for entry in by_kernels.history] == [entry["flips"] for entry in by_method.history]
    assert by_kernels.sparsity() == by_method.sparsity()


def test_float64_weights_are_selected_by_the_method():
    model = nn.Linear(8, 8).cuda().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pruner = pm.DPF(sparsity=0.5, every=1, include=["weight"]).attach(model, optimizer, total_steps=4)
    model(torch.ones(1, 8, device="cuda", dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert pruner.attached_engine().buffers[0].magnitude is None
