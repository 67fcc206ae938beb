"""`attach`: shared and frozen parameters, several pruners, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import TOTAL, ignore_warnings, make_closure, make_hard, make_soft, soft_and_hard
from engine_helpers import (
    TARGETS,
    Net,
    attach_to_network,
    count_global_hooks,
    count_hooks,
    is_identical,
    make_sgd,
    obeys_masks,
    train,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import pomona as pm


class TiedLayers(nn.Module):
    """Two linear layers that share one weight, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.two(F.relu(self.one(x)))))


@soft_and_hard
def test_a_tied_tensor_is_one_target(kind: Callable[..., pm.Pruner]) -> None:
    model = TiedLayers()
    optimizer = make_sgd(model)
    pruner = kind().attach(model, optimizer, total_steps=TOTAL)
    assert list(pruner.masks()) == ["one.weight"]
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    assert obeys_masks(model, pruner)
    assert model.one.weight is model.two.weight
    assert pruner.sparsity() == round(0.8 * 36) / 36


@soft_and_hard
def test_two_pruners_may_share_an_optimizer_but_not_a_parameter(kind: Callable[..., pm.Pruner]) -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    one = kind(include="conv*").attach(model, optimizer, total_steps=TOTAL)
    with pytest.raises(pm.PomonaError, match=r"conv1\.weight is pruned by another pruner"):
        kind().attach(model, optimizer, total_steps=TOTAL)
    two = make_soft(include="hidden", sparsity=0.5).attach(model, optimizer, total_steps=TOTAL)
    for step in range(TOTAL):
        if step % 2:
            train(model, optimizer, [step])
        else:
            optimizer.step(make_closure(model, optimizer, step))
        assert obeys_masks(model, one)
        assert obeys_masks(model, two)
    assert (one.step, two.step) == (TOTAL, TOTAL)
    state = copy.deepcopy(optimizer.state_dict())
    for slot in (*one.slots, *two.slots):
        slot.mask.fill_(True)
    optimizer.load_state_dict(state)
    assert one.sparsity() == pytest.approx(0.8, abs=1e-3)
    assert two.sparsity() == pytest.approx(0.5, abs=1e-3)


def test_an_optimizer_carries_the_state_of_each_pruner_separately() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    one, two, three = (make_soft(include=name) for name in TARGETS)
    one.attach(model, optimizer, total_steps=TOTAL)
    two.attach(model, optimizer, total_steps=TOTAL)
    one.finish()
    three.attach(model, optimizer, total_steps=TOTAL)
    state = optimizer.state_dict()
    carried = [set(v["masks"]) for k, v in state.items() if k.startswith("pomona")]
    assert sorted(carried, key=str) == [{"conv2.weight"}, {"hidden.weight"}]
    optimizer.load_state_dict(copy.deepcopy(state))


@soft_and_hard
def test_attaching_twice_is_refused(kind: Callable[..., pm.Pruner]) -> None:
    model, optimizer, pruner = attach_to_network(kind())
    with pytest.raises(pm.PomonaError, match="attached already"):
        pruner.attach(model, optimizer, total_steps=TOTAL)
    with ignore_warnings():
        pruner.finish()
    with pytest.raises(pm.PomonaError, match="finished: make a new one"):
        pruner.attach(model, optimizer, total_steps=TOTAL)


def set_one_weight(model: Net, value: float) -> None:
    """Set the first weight of the hidden layer."""
    with torch.no_grad():
        model.hidden.weight[0, 0] = value


@soft_and_hard
def test_weights_without_values_are_refused(kind: Callable[..., pm.Pruner]) -> None:
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(pm.PomonaError, match=r"weight is on the meta device, where it has no values: reload"):
        kind(sparsity=0.5).attach(model, optimizer, total_steps=10)


@soft_and_hard
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(kind: Callable[..., pm.Pruner], value: float) -> None:
    model = Net()
    set_one_weight(model, value)
    with pytest.raises(pm.PomonaError, match=r"hidden\.weight holds NaN or inf"):
        kind().attach(model, make_sgd(model), total_steps=TOTAL)


def list_refused_attachments() -> dict[str, tuple[Callable[[Net, Optimizer], Any], str]]:
    """Return calls of `attach` that are refused, with a part of the message."""
    return {
        "nan": (lambda m, o: (set_one_weight(m, torch.nan), make_soft().attach(m, o, total_steps=9)), "NaN"),
        "no steps": (lambda m, o: make_soft().attach(m, o), "needs total_steps"),
        "steps": (lambda m, o: make_soft().attach(m, o, total_steps=0), "got 0"),
        "glob": (lambda m, o: make_soft(exclude="conv3").attach(m, o, total_steps=9), "did you mean 'conv"),
        "shape": (
            lambda m, o: make_soft(pattern=pm.NM(2, 5), sparsity=None).attach(m, o, total_steps=9),
            "fits no layer of Net: groups of 5 do not divide",
        ),
        "named": (
            lambda m, o: make_soft(pattern="5:8", sparsity=None, include="hidden").attach(m, o, total_steps=9),
            r"^groups of 8 do not divide the rows of hidden\.weight \(16×12\): m=4 would fit",
        ),
        "nothing": (lambda m, o: make_soft(exclude="*").attach(m, o, total_steps=9), "nothing to prune"),
        "optimizer": (
            lambda m, o: make_soft().attach(m, SGD([m.head.weight]), total_steps=9),
            "in no attached optimizer",
        ),
        "no optimizer": (
            lambda m, o: make_soft().attach(m, 3, total_steps=9),
            "needs a torch.optim.Optimizer, got int",
        ),
        "epochs": (lambda m, o: make_soft().attach(m, o, total_steps=9, steps_per_epoch=-1), "steps_per_epoch"),
    }


@pytest.mark.parametrize("case", list_refused_attachments())
def test_an_attach_that_raises_changes_nothing(case: str) -> None:
    act, message = list_refused_attachments()[case]
    model = Net()
    optimizer = make_sgd(model)
    train(model, optimizer, range(2))
    before = count_hooks(model, optimizer)
    weights = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(pm.PomonaError, match=message):
        act(model, optimizer)
    assert count_hooks(model, optimizer) == before
    weights[0]["hidden.weight"][0, 0] = model.hidden.weight[0, 0].detach()
    assert case == "nan" or is_identical((model.state_dict(), optimizer.state_dict()), weights)
    set_one_weight(model, 0.1)
    make_soft().attach(model, optimizer, total_steps=9)


def test_a_method_that_fails_at_attach_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = make_sgd(model)
    before, weights = (count_hooks(model, optimizer), count_global_hooks()), copy.deepcopy(model.state_dict())
    pruner = make_hard()

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(pruner.method), "update", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            pruner.attach(model, optimizer, total_steps=TOTAL)
    assert (count_hooks(model, optimizer), count_global_hooks()) == before
    assert is_identical(model.state_dict(), weights)
    pruner.attach(model, optimizer, total_steps=TOTAL)


@soft_and_hard
def test_frozen_parameters_are_left_dense_by_default(kind: Callable[..., pm.Pruner]) -> None:
    model = Net().double()
    model.conv1.weight.requires_grad_(False)
    before = model.conv1.weight.clone()
    pruner = kind().attach(model, SGD(model.parameters(), lr=0.1), total_steps=TOTAL)
    train(model, pruner.optimizers[0], range(6))
    assert list(pruner.masks()) == ["conv2.weight", "hidden.weight"]
    assert torch.equal(model.conv1.weight, before)


@soft_and_hard
def test_frozen_parameters_that_are_included_are_pruned_and_not_trained(kind: Callable[..., pm.Pruner]) -> None:
    model = Net().double()
    model.conv1.weight.requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.warns(UserWarning, match=r"conv1\.weight: pruned as included, but frozen"):
        pruner = kind(allocation="uniform", include=["conv1", "conv2"]).attach(model, optimizer, total_steps=TOTAL)
    before = model.conv1.weight.clone()
    assert not before.all()
    train(model, optimizer, range(6))
    assert obeys_masks(model, pruner)
    assert torch.equal(model.conv1.weight, before)
    model.conv1.weight.requires_grad_(True)  # now trained, and added to the optimizer
    optimizer.add_param_group({"params": [model.conv1.weight]})
    train(model, optimizer, range(6, 12))
    assert obeys_masks(model, pruner)
    assert not torch.equal(model.conv1.weight, before)


@soft_and_hard
def test_parameter_groups_may_be_empty_or_added_later(kind: Callable[..., pm.Pruner]) -> None:
    model = Net().double()
    extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = SGD([{"params": []}, {"params": list(model.parameters())}], lr=0.1)
    pruner = kind().attach(model, optimizer, total_steps=TOTAL)
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones_like(extra)
    train(model, optimizer, range(3))
    assert obeys_masks(model, pruner)
    assert pruner.step == 3
