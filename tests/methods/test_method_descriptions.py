"""Descriptions of methods: every option has a meaning, and the examples run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pomona.methods import METHODS, describe_method

BUILT_IN = [name for name in METHODS if METHODS[name].__module__.startswith("pomona.methods.")]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_option_has_a_default_and_a_meaning(name):
    found = describe_method(name)
    assert list(found["meanings"]) == list(found["options"])
    assert [option for option, meaning in found["meanings"].items() if not meaning] == []
    assert METHODS.resolve({"name": name, **found["options"]}) == METHODS[name]()


def test_the_description_of_dpf_is_that_of_its_source():
    found = describe_method("dpf")
    assert found["description"].startswith("The model runs on the pruned weights; the gradient taken there")
    assert found["meanings"]["every"].startswith("p: steps between mask updates. None is the paper's 16, and")
    assert found["options"]["printed"] is False  # sets other options, and is no field of the record


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_example_runs(name):
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 10))
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "criterion": nn.functional.cross_entropy,
        "loader": [(torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))) for _ in range(4)],
        "epochs": 2,
    }
    exec(describe_method(name)["python"], names)
    zeros, weights = sum(int((p == 0).sum()) for p in model.parameters()), model[2].weight.numel()
    assert zeros >= round(0.3 * METHODS[name]().sparsity * weights)
