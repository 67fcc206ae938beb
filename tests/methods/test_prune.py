"""`pm.prune`: a model is pruned at once, in place, as OneShot prunes it at `attach`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_helpers import Net, count_global_hooks, count_hooks, is_identical, make_sgd, train
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_after
from torch import nn

import pomona as pm


def make_stack(*weights: list[list[float]]) -> nn.Sequential:
    """Return linear layers of given weights, without biases, and a classifier of ones behind them."""
    layers = [nn.Linear(len(rows[0]), len(rows), bias=False) for rows in weights]
    model = nn.Sequential(*layers, nn.Linear(len(weights[-1]), 2, bias=False))
    with torch.no_grad():
        for layer, rows in zip(layers, weights, strict=True):
            layer.weight.copy_(torch.tensor(rows))
        model[-1].weight.fill_(1.0)
    return model


def test_the_smallest_weights_are_zero_by_hand() -> None:
    model = make_stack([[1.0, -5.0, 2.0], [4.0, -3.0, 0.5]], [[6.0, -0.1], [0.2, 7.0]])
    report = pm.prune(model, 0.5)
    # Of 6, 4 and the classifier's 4, which stays dense: the five smallest of |w| are 0.1, 0.2, 0.5, 1 and 2.
    assert model[0].weight.tolist() == [[0, -5, 0], [4, -3, 0]]
    assert model[1].weight.tolist() == [[6, 0], [0, 7]]
    assert model[2].weight.tolist() == [[1, 1], [1, 1]]
    assert report.sparsity == 0.5
    assert report.masks["0.weight"].tolist() == [[False, True, False], [True, True, False]]
    assert list(report.masks) == ["0.weight", "1.weight"]


def test_a_pattern_by_hand() -> None:
    model = make_stack([[1.0, -5.0, 2.0, 4.0], [4.0, -3.0, 0.5, 9.0]])
    report = pm.prune(model, pattern="2:4")
    assert model[0].weight.tolist() == [[0, -5, 0, 4], [4, 0, 0, 9]]
    assert repr(report) == ("<PruningReport: 50.00% of 8 weights in 1 layer pruned, NM(n=2, m=4), allocation global>")


OPTIONS: list[dict[str, Any]] = [
    {"sparsity": 0.9},
    {"sparsity": 0.5, "pattern": "filter"},
    {"sparsity": 0.7, "pattern": "balanced(12)", "allocation": "uniform"},
    {"sparsity": 0.8, "allocation": "erk"},
    {"pattern": pm.NM(1, 4)},
    {"sparsity": 0.6, "pattern": "block(2, 2)", "include": ["conv*"]},
    {"sparsity": 0.9, "allocation": "global(floor=0.02)", "exclude": "conv1"},
    {"sparsity": 0.5, "include": "head"},
    {},
]


@pytest.mark.parametrize("options", slow_after(6, OPTIONS), ids=str)
def test_the_model_is_what_oneshot_leaves(options: dict[str, Any]) -> None:
    model, other = Net(), Net()
    report = pm.prune(model, **options)
    pruner = pm.OneShot(**options)
    pruner.attach(other, make_sgd(other))
    pruner.finish()
    assert is_identical(model.state_dict(), other.state_dict())
    assert is_identical(report.masks, pruner.masks())
    assert report.sparsity == pruner.sparsity()
    assert report.method == pruner.method


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 0.95), st.integers(0, 5))
def test_the_count_of_zeros_is_the_one_asked_for(sparsity: float, seed: int) -> None:
    model = Net(seed)
    report = pm.prune(model, sparsity)
    count = sum(mask.numel() for mask in report.masks.values())
    zeros = sum(int((model.get_parameter(name) == 0).sum()) for name in report.masks)
    assert zeros == round(sparsity * count)
    assert report.sparsity == pytest.approx(zeros / count, abs=1e-12)
    assert report.sparsity.zeros == zeros / count


def test_nothing_is_left_on_the_model() -> None:
    model = Net()
    untouched, hooks, everywhere = copy.deepcopy(model), count_hooks(model, make_sgd(model)), count_global_hooks()
    parameters = dict(model.named_parameters())
    model.train()
    pm.prune(model, 0.9)
    assert count_hooks(model, make_sgd(model)) == hooks
    assert count_global_hooks() == everywhere
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in parameters.values())
    assert model.training
    untouched.load_state_dict(model.state_dict())


def test_finetune_trains_with_the_zeros() -> None:
    model = Net().double()
    report = pm.prune(model, 0.9)
    before = copy.deepcopy(model.state_dict())
    optimizer = make_sgd(model)
    pruner = pm.Finetune()
    pruner.attach(model, optimizer)
    train(model, optimizer, range(10))
    pruner.finish()
    for name, mask in report.masks.items():
        weight = model.get_parameter(name)
        assert torch.equal(weight != 0, mask)
        assert not torch.equal(weight, before[name])


def test_batch_norm_statistics_are_estimated_from_data() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(8, 4, 5, 5) for _ in range(4)]
    model, other = Net(), Net()
    pm.prune(model, 0.9)
    assert not model.norm.running_mean.any()  # as it was
    pm.prune(other, 0.9, data=batches, max_batches=2)
    images = torch.stack([other.conv1(batch) for batch in batches[:2]])
    assert torch.allclose(other.norm.running_mean, images.mean((0, 1, 3, 4)), atol=1e-6)
    assert is_identical(
        {name: p.detach() for name, p in model.named_parameters()},
        {name: p.detach() for name, p in other.named_parameters()},
    )


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Net(), {"sparsity": 1.0}, r"must lie in \[0, 1\), got 1.0"),
        (Net(), {"sparsity": 0.9, "pattern": "2:4"}, "fixes the sparsity at 0.5, got 0.9"),
        (Net(), {"pattern": "filtr"}, "did you mean 'filter'"),
        (Net(), {"allocation": "globl"}, "did you mean 'global'"),
        (Net(), {"include": "conv3"}, "unknown layer 'conv3'"),
        (nn.ReLU(), {}, "ReLU has no parameters"),
        (nn.LayerNorm(4), {}, "LayerNorm has nothing to prune"),
    ],
)
def test_what_cannot_be_pruned_is_refused(model: nn.Module, options: dict[str, Any], message: str) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(pm.PomonaError, match=message):
        pm.prune(model, **options)
    assert is_identical(dict(model.state_dict()), dict(before))
