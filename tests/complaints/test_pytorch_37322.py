"""https://github.com/pytorch/pytorch/issues/37322: copy.deepcopy() breaks when pruning is set on a Sequential."""

from __future__ import annotations

import copy

import torch
from engine_helpers import count_hooks
from torch import nn

import pomona as pm


class Encoder(nn.Module):
    """A module whose layers are in a Sequential, pruned while it is trained, as in the complaint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_a_model_can_be_copied_while_it_is_pruned() -> None:
    """deepcopy raised an error, because a pruned weight was no longer a parameter but the result of a product."""
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pruner = pm.DPF(sparsity=0.75, every=2, include=["*.weight"]).attach(model, optimizer, total_steps=8)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    copied = copy.deepcopy(model)
    assert [*copied.state_dict()] == [*Encoder().state_dict()]
    assert not any(count_hooks(copied, torch.optim.SGD(copied.parameters())).values())
    before = copy.deepcopy(model.state_dict())
    for name, mask in pruner.masks().items():
        assert not copied.get_parameter(name)[~mask].any()
    torch.optim.SGD(copied.parameters(), lr=0.1).step()
    copied(torch.randn(4, 8)).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
