"""Layers that a traced forward does not call: heads for another mode, another argument or another method."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_output_layers import Model, list_outputs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import pomona as pm
from pomona.core.tracing import trace_both_modes


class AuxiliaryHead(nn.Module):
    """A classifier with an auxiliary head behind a norm, which only training calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.deep = nn.Linear(8, 8), nn.Linear(8, 8)
        self.branch, self.norm, self.aux = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 6)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.body(x))
        out = self.head(F.relu(self.deep(x)))
        return (out, self.aux(F.relu(self.norm(self.branch(x))))) if self.training else out


class TwoTasks(nn.Module):
    """A model with a head for each task, of which an argument with a default names one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.deep, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor, task: str = "a") -> Tensor:
        x = F.relu(self.deep(F.relu(self.body(x))))
        return self.a(x) if task == "a" else self.b(x)


def remove_filters(model: nn.Module, **options: Any) -> pm.Pruner:
    """Attach one-shot pruning of half of the filters to a model."""
    return pm.OneShot(sparsity=0.5, pattern=pm.Filter(), **options).attach(model, SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("training", [True, False])
def test_a_head_that_only_training_calls_keeps_its_outputs(training: bool) -> None:
    torch.manual_seed(0)
    model = AuxiliaryHead().train(training)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner = remove_filters(model)
    assert list(pruner.masks()) == ["body.weight", "deep.weight", "branch.weight"]
    removed = ~pruner.masks()["branch.weight"].any(1)
    assert not model.norm.weight[removed].any(), "the norm of the auxiliary branch follows its layer"
    assert all(module.training == training for module in model.modules())
    outputs = model.train()(torch.randn(16, 8))
    assert all((output.std(0) > 0).all() for output in outputs)


def test_a_head_for_another_argument_is_left_dense_with_a_warning() -> None:
    model = TwoTasks()
    with pytest.warns(UserWarning, match=r"^b\.weight: left dense, as the traced forward calls no such layer"):
        pruner = remove_filters(model)
    assert list(pruner.masks()) == ["body.weight", "deep.weight"]
    assert (model(torch.randn(16, 8), "b").std(0) > 0).all()
    reasons = {choice.target.name: choice.reason for choice in pm.prunable(model)}
    assert reasons["b.weight"] == "not called by the traced forward, so that its outputs may be the network's"
    assert reasons["a.weight"] == "a layer whose outputs are the network's"


def test_an_uncalled_layer_is_pruned_where_it_is_included() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner = remove_filters(TwoTasks(), include=["body", "b"])
    assert list(pruner.masks()) == ["body.weight", "b.weight"]


def test_layers_whose_weights_are_read_or_shared_are_called() -> None:
    model = Model(
        lambda m, x: m.head(F.linear(F.linear(x, m.one.weight), m.two.weight.t())),
        one=nn.Linear(8, 8),
        two=nn.Linear(8, 8),
        tied=nn.Linear(8, 8),
        encoder=nn.TransformerEncoderLayer(8, 2),
        head=nn.Linear(8, 3),
        shape=nn.Linear(8, 8),
    )
    model.tied.weight = model.one.weight
    model.run = lambda m, x, run=model.run: run(m, m.encoder(x).to(m.shape.weight.dtype))
    assert list_outputs(model) == ["head.weight", "shape.weight"]


def test_where_no_layer_is_called_the_order_of_definition_decides() -> None:
    model = Model(lambda m, x: x, body=nn.Linear(8, 8), head=nn.Linear(8, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(remove_filters(model).masks()) == ["body.weight"]


def test_a_model_of_which_only_the_head_is_called_is_refused_with_the_names() -> None:
    model = Model(lambda m, x: m.head(x), body=nn.Linear(8, 8), head=nn.Linear(8, 3))
    with (
        pytest.warns(UserWarning, match=r"^body\.weight: left dense"),
        pytest.raises(pm.PomonaError, match=r"nothing to prune.*include="),
    ):
        remove_filters(model)


def test_tracing_leaves_modes_and_random_state() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.head(model.body(x) if torch.rand(1) >= 0 else x)

    model = Model(forward, body=torch.jit.script(nn.Linear(8, 8)), head=nn.Linear(8, 3))
    model.head.eval()
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    assert len(trace_both_modes(model)) == 2
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
