"""Outputs that do not depend on the input, where the forward cannot be traced: found by running the model."""

from __future__ import annotations

import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.core.input_dependence import has_constant_outputs


class Branching(nn.Module):
    """Two convolutions and a classifier, behind a branch on the data."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 3)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        h = F.relu(self.one(x))
        if h.sum() > 1e9:
            h = 2 * h
        return {"logits": self.head(self.dropout(F.relu(self.norm(self.two(h)))).mean((2, 3)))}


def train_cut(data: Any, norm: bool = True, cut: bool = True) -> list[str]:
    """Return the warnings of `finish` on a network of which the second layer reads what the first has lost."""
    torch.manual_seed(0)
    model = Branching(norm)
    with torch.no_grad():
        model.one.weight.fill_(1e-5)
        model.one.weight[0] = 1
        model.two.weight.fill_(1e-5)
        model.two.weight[:, 3 if cut else 0] = 1
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    pruner = pm.DPF(0.86, printed=True, every=1).attach(model, optimizer, total_steps=4)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.rand(4, 1, 8, 8))["logits"].square().mean().backward()
        optimizer.step()
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pruner.finish(data)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught if "batch-norm" not in str(warning.message)]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("form", ["pairs", "names", "one row"])
def test_a_network_that_is_cut_in_two_is_named_from_its_outputs(form: str, norm: bool) -> None:
    x = torch.rand(6, 1, 8, 8)
    data = {"pairs": [(x, 1)], "names": iter([UserDict(x=x, label=x)]), "one row": [x[:1]]}[form]
    messages = train_cut(data, norm)
    assert [message.startswith("the outputs of Branching do not depend on its input") for message in messages] == (
        [] if form == "one row" else [True]
    )


def test_nothing_is_said_of_a_connected_network_and_without_data() -> None:
    assert train_cut([torch.rand(6, 1, 8, 8)], cut=False) == []
    assert train_cut(None) == []


def test_batches_that_the_model_does_not_take_tell_nothing() -> None:
    model = Branching()
    assert not has_constant_outputs(model, (torch.rand(6, 2, 8, 8), 1))
    assert not has_constant_outputs(model, torch.ones(6, 1, 8, 8))
    assert not has_constant_outputs(model, 3)
