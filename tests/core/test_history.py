"""Flips, overlap, δ and settling, against bookkeeping that keeps every mask."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import Net, make_adam, make_sgd, save_and_load, train
from torch import Tensor, nn

import pomona as pm
from pomona.methods import METHODS, make_pruner

TOTAL, EPOCH = 40, 5
every_method = pytest.mark.parametrize("name", [name for name in METHODS if name not in ("lottery", "finetune")])


def make(name: str, **more: Any) -> pm.Pruner:
    """A pruner that updates often."""
    options: dict[str, Any] = {"sparsity": 0.6, **more}
    if name in ("set", "rigl", "sparse_momentum", "dsr", "dpf", "incremental"):
        options["every"] = 4
    if METHODS[name].weights == "score":
        options["every"] = 1
    if name == "dsr":
        options |= {"threshold": 0.05, "churn": 0.1}
    return make_pruner({"name": name, **options})


def net(name: str) -> Net:
    """A network in float64; scores leave no norm to train."""
    model = Net().double()
    model.norm.requires_grad_(METHODS[name].weights != "score")
    return model


class Books:
    """The masks in force after each step, all of them kept. An update in place of a step is one of the step before."""

    def __init__(self, ours: pm.Pruner) -> None:
        self.ours = ours
        self.masks = {-1: {name: torch.ones_like(mask) for name, mask in ours.masks().items()}}
        self.note(0)

    def note(self, step: int) -> None:
        self.masks[step] = {name: mask.clone() for name, mask in self.ours.masks().items()}

    def train(self, model: nn.Module, optimizer: Any) -> None:
        for t in range(TOTAL):
            train(model, optimizer, [t])
            if self.ours.method.updates_before_step and self.ours.history and self.ours.history[-1]["step"] == t:
                self.note(t)
            self.note(t + 1)

    def flat(self, step: int) -> np.ndarray:
        return np.concatenate([mask.numpy().ravel() for mask in self.masks[step].values()])


@every_method
def test_history_against_consecutive_masks(name: str) -> None:
    model = net(name)
    optimizer = make_sgd(model)
    ours = make(name).attach(model, optimizer, total_steps=TOTAL, steps_per_epoch=EPOCH)
    books = Books(ours)
    books.train(model, optimizer)
    updates = [record["step"] for record in ours.history]
    assert updates, "nothing was recorded"
    assert updates == sorted(set(updates)), "one record an update"
    changed = {t for t in range(TOTAL + 1) if not np.array_equal(books.flat(t - 1), books.flat(t))}
    assert changed <= set(updates), "a mask changed without a record"
    for record in ours.history:
        old, new = books.flat(record["step"] - 1), books.flat(record["step"])
        assert record["flips"] == (old != new).sum()
        assert record["iou"] == pytest.approx((old & new).sum() / (old | new).sum(), rel=1e-6)
        layers = [float((~mask).double().mean()) for mask in books.masks[record["step"]].values()]
        assert record["layers"] == pytest.approx(layers, abs=1e-6)


def test_the_first_record_of_snip() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    ours = pm.SNIP(sparsity=0.6).attach(model, optimizer)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, range(3))
    (record,) = ours.history
    pruned = sum(int((~mask).sum()) for mask in ours.masks().values())
    count = sum(mask.numel() for mask in ours.masks().values())
    assert (record["step"], record["flips"]) == (0, pruned)
    assert record["iou"] == pytest.approx(1 - pruned / count)
    assert record["delta"] == pytest.approx(delta(weights, ours.masks()))


def delta(weights: dict[str, Tensor], masks: dict[str, Tensor]) -> float:
    """δ = ‖w − m ⊙ w‖² / ‖w‖² over the targets."""
    lost = sum(float((weights[n][~m] ** 2).sum()) for n, m in masks.items())
    return lost / sum(float((weights[n] ** 2).sum()) for n in masks)


@pytest.mark.parametrize("name", ["dpf", "sfp", "oneshot", "incremental"])
def test_delta_against_the_dense_weights(name: str) -> None:
    """What the optimizer had moved when the mask came: the latent, or for hard and free methods the weight itself."""
    model = Net().double()
    optimizer = make_sgd(model)
    ours = make(name).attach(model, optimizer, total_steps=TOTAL, steps_per_epoch=EPOCH)
    seen: list[dict[str, Tensor]] = []

    def look(*_: Any) -> None:  # runs before the pruner's own hook, with the weights as the optimizer left them
        seen.append({n: p.detach().clone() for n, p in model.named_parameters()})

    handle = optimizer.register_step_post_hook(look)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    checked = 0
    for t in range(TOTAL):
        train(model, optimizer, [t])
        if ours.history[-1]["step"] == t + 1:
            assert ours.history[-1]["delta"] == pytest.approx(delta(seen[-1], ours.masks()), rel=1e-9)
            checked += ours.history[-1]["delta"] > 0
    assert checked > 0 or name == "oneshot"
    fresh = {n: p.detach() for n, p in Net().double().named_parameters()}
    cut = pm.OneShot(sparsity=0.6)
    other = Net().double()
    assert cut.attach(other, make_sgd(other)).history[0]["delta"] == pytest.approx(delta(fresh, cut.masks()))


@every_method
def test_settled_against_every_mask(name: str) -> None:
    model = net(name)
    optimizer = make_adam(model)
    ours = make(name).attach(model, optimizer, total_steps=TOTAL, steps_per_epoch=EPOCH, track=True)
    books = Books(ours)
    books.train(model, optimizer)
    masks = np.array([books.flat(t) for t in range(TOTAL + 1)])
    # The share of entries that are what they are at the end from the end of an epoch on.
    expected = [float((masks[epoch * EPOCH :] == masks[-1]).all(0).mean()) for epoch in range(TOTAL // EPOCH + 1)]
    shares = ours.settled()
    assert shares == pytest.approx(expected[: len(shares)], abs=1e-6)
    assert shares[-1] == 1.0
    assert expected[len(shares) :] == [1.0] * (len(expected) - len(shares)), "told up to the last change"


def test_settled_by_hand() -> None:
    """Four weights; the sparsity rises a quarter of the way at a time, an epoch is two steps."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 1))
    model[0].weight.data.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ours = pm.Incremental(sparsity=0.75, every=1, schedule=pm.Linear(until=1.0), include=["0"])
    ours.attach(model, optimizer, total_steps=6, steps_per_epoch=2, track=True)
    for _ in range(6):
        optimizer.zero_grad()
        model[0].weight.sum().backward()
        optimizer.step()
    # With epochs the sparsity moves at their start: 0 until step 2, then 0.25, from 4 on 0.5, at 6 0.75. The weights
    # 1, 2, 3 go after steps 2, 4, 6, which end epochs 1, 2, 3; the 4 never does.
    assert [record["step"] for record in ours.history if record["flips"]] == [2, 4, 6]
    assert ours.settled() == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", ["dpf", "rigl", "sfp", "dsr"])
def test_dynamics_survive_a_resumed_run(name: str) -> None:
    def begin() -> tuple[Net, Any, pm.Pruner]:
        model = Net().double()
        optimizer = make_sgd(model)
        ours = make(name).attach(model, optimizer, total_steps=TOTAL, steps_per_epoch=EPOCH, track=True)
        return model, optimizer, ours

    model, optimizer, whole = begin()
    train(model, optimizer, range(TOTAL))

    model, optimizer, _ = begin()
    train(model, optimizer, range(17))
    state = save_and_load({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer, resumed = begin()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, range(17, TOTAL))
    assert resumed.history == whole.history
    assert resumed.settled() == whole.settled()
    assert len(whole.history) >= 5


def test_a_copied_pruner_keeps_its_own_history() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    ours = make("set").attach(model, optimizer, total_steps=TOTAL, track=True, steps_per_epoch=EPOCH)
    train(model, optimizer, range(10))
    other, twin_optimizer, twin = copy.deepcopy((model, optimizer, ours))
    train(other, twin_optimizer, range(10, 30))
    assert len(twin.history) > len(ours.history)
    assert twin.history[: len(ours.history)] == ours.history


def test_history_is_a_copy() -> None:
    model = Net()
    ours = pm.OneShot(sparsity=0.5).attach(model, make_sgd(model))
    ours.history[0]["flips"] = -1
    ours.history.clear()
    assert ours.history[0]["flips"] == sum(int((~mask).sum()) for mask in ours.masks().values())


def test_plain_numbers_only() -> None:
    model = Net()
    optimizer = make_sgd(model)
    ours = make("dpf").attach(model, optimizer, total_steps=TOTAL)
    train(model, optimizer, range(10))
    assert json.loads(json.dumps(ours.history)) == ours.history


def test_what_was_not_tracked_is_refused() -> None:
    model = Net()
    ours = pm.OneShot(sparsity=0.5).attach(model, make_sgd(model), steps_per_epoch=5)
    with pytest.raises(pm.PomonaError, match="nothing was tracked: call attach\\(…, track=True\\)"):
        ours.settled()
    model = Net()
    ours = pm.OneShot(sparsity=0.5).attach(model, make_sgd(model), track=True)
    with pytest.raises(pm.PomonaError, match="epochs are not known: call attach\\(…, steps_per_epoch=…\\)"):
        ours.settled()


def test_an_empty_layer_and_zero_weights_have_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1))
    nn.init.zeros_(model[0].weight)
    ours = pm.OneShot(sparsity=0.5, include=["0"]).attach(model, make_sgd(model))
    assert ours.history[0]["delta"] == 0.0
    assert ours.history[0]["flips"] == 8
