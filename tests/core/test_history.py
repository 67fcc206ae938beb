"""Flips, overlap, δ and `settled` of the history, against a log of every mask."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import Net, make_adam, make_sgd, save_and_load, train
from torch import Tensor, nn

import pomona as pm
from pomona.core import history
from pomona.methods import METHODS, make_pruner

TOTAL, EPOCH = 40, 5
every_method = pytest.mark.parametrize("name", [name for name in METHODS if name not in ("lottery", "finetune")])


def make_frequent_pruner(name: str, **more: Any) -> pm.Pruner:
    """Return a pruner that updates its masks often."""
    options: dict[str, Any] = {"sparsity": 0.6, **more}
    if name in ("set", "rigl", "sparse_momentum", "dsr", "dpf", "incremental"):
        options["every"] = 4
    if METHODS[name].weights == "score":
        options["every"] = 1
    if name == "dsr":
        options |= {"threshold": 0.05, "churn": 0.1}
    return make_pruner({"name": name, **options})


def make_model(name: str) -> Net:
    """Return a network in float64; its norm is frozen for score methods, which refuse a trained one."""
    model = Net().double()
    model.norm.requires_grad_(METHODS[name].weights != "score")
    return model


class MaskLog:
    """The masks after each step. An update that replaces a step belongs to the step before it."""

    def __init__(self, pruner: pm.Pruner) -> None:
        self.pruner = pruner
        self.masks = {-1: {name: torch.ones_like(mask) for name, mask in pruner.masks().items()}}
        self.save(0)

    def save(self, step: int) -> None:
        self.masks[step] = {name: mask.clone() for name, mask in self.pruner.masks().items()}

    def train(self, model: nn.Module, optimizer: Any) -> None:
        for t in range(TOTAL):
            train(model, optimizer, [t])
            if self.pruner.method.updates_before_step and self.pruner.history and self.pruner.history[-1]["step"] == t:
                self.save(t)
            self.save(t + 1)

    def get_flat(self, step: int) -> np.ndarray:
        return np.concatenate([mask.numpy().ravel() for mask in self.masks[step].values()])


@every_method
def test_entries_match_consecutive_masks(name: str) -> None:
    model = make_model(name)
    optimizer = make_sgd(model)
    pruner = make_frequent_pruner(name).attach(model, optimizer, total_steps=TOTAL, steps_per_epoch=EPOCH)
    log = MaskLog(pruner)
    log.train(model, optimizer)
    updates = [entry["step"] for entry in pruner.history]
    assert updates, "the history is empty"
    assert updates == sorted(set(updates)), "an update has more than one entry"
    changed = {t for t in range(TOTAL + 1) if not np.array_equal(log.get_flat(t - 1), log.get_flat(t))}
    assert changed <= set(updates), "a mask changed without an entry"
    for entry in pruner.history:
        old, new = log.get_flat(entry["step"] - 1), log.get_flat(entry["step"])
        assert entry["flips"] == (old != new).sum()
        assert entry["iou"] == pytest.approx((old & new).sum() / (old | new).sum(), rel=1e-6)
        layers = [float((~mask).double().mean()) for mask in log.masks[entry["step"]].values()]
        assert entry["layers"] == pytest.approx(layers, abs=1e-6)


def test_the_entry_of_snip() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SNIP(sparsity=0.6).attach(model, optimizer)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, range(3))
    (entry,) = pruner.history
    pruned = sum(int((~mask).sum()) for mask in pruner.masks().values())
    count = sum(mask.numel() for mask in pruner.masks().values())
    assert (entry["step"], entry["flips"]) == (0, pruned)
    assert entry["iou"] == pytest.approx(1 - pruned / count)
    assert entry["delta"] == pytest.approx(compute_delta(weights, pruner.masks()))


def compute_delta(weights: dict[str, Tensor], masks: dict[str, Tensor]) -> float:
    """Return δ = ‖w − m ⊙ w‖² / ‖w‖² over the targets."""
    lost = sum(float((weights[n][~m] ** 2).sum()) for n, m in masks.items())
    return lost / sum(float((weights[n] ** 2).sum()) for n in masks)


@pytest.mark.parametrize("name", ["dpf", "sfp", "oneshot", "incremental"])
def test_delta_matches_the_dense_weights(name: str) -> None:
    """δ is measured on what the optimizer moves: the latent, or the weight itself for hard and free methods."""
    model = Net().double()
    optimizer = make_sgd(model)
    plain = {"compressor": "none"} if name == "dpf" else {}
    pruner = make_frequent_pruner(name, **plain).attach(model, optimizer, total_steps=TOTAL, steps_per_epoch=EPOCH)
    seen: list[dict[str, Tensor]] = []

    def save_weights(*_: Any) -> None:  # runs before the pruner's hook, on the weights that the optimizer wrote
        seen.append({n: p.detach().clone() for n, p in model.named_parameters()})

    handle = optimizer.register_step_post_hook(save_weights)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    checked = 0
    for t in range(TOTAL):
        train(model, optimizer, [t])
        if pruner.history[-1]["step"] == t + 1:
            assert pruner.history[-1]["delta"] == pytest.approx(compute_delta(seen[-1], pruner.masks()), rel=1e-9)
            checked += pruner.history[-1]["delta"] > 0
    assert checked > 0 or name == "oneshot"
    fresh = {n: p.detach() for n, p in Net().double().named_parameters()}
    oneshot = pm.OneShot(sparsity=0.6)
    other = Net().double()
    assert oneshot.attach(other, make_sgd(other)).history[0]["delta"] == pytest.approx(
        compute_delta(fresh, oneshot.masks())
    )


@every_method
def test_settled_matches_all_masks(name: str) -> None:
    model = make_model(name)
    optimizer = make_adam(model)
    pruner = make_frequent_pruner(name).attach(model, optimizer, total_steps=TOTAL, steps_per_epoch=EPOCH, track=True)
    log = MaskLog(pruner)
    log.train(model, optimizer)
    masks = np.array([log.get_flat(t) for t in range(TOTAL + 1)])
    # The share of mask entries that keep their final value from the end of an epoch on.
    expected = [float((masks[epoch * EPOCH :] == masks[-1]).all(0).mean()) for epoch in range(TOTAL // EPOCH + 1)]
    shares = pruner.settled()
    assert shares == pytest.approx(expected[: len(shares)], abs=1e-6)
    assert shares[-1] == 1.0
    assert expected[len(shares) :] == [1.0] * (len(expected) - len(shares)), "epochs after the last change are left out"


def test_settled_by_hand() -> None:
    """Four weights; the sparsity rises by a quarter at a time, and an epoch has two steps."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 1))
    model[0].weight.data.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pruner = pm.Incremental(sparsity=0.75, every=1, schedule=pm.Linear(until=1.0), include=["0"])
    pruner.attach(model, optimizer, total_steps=6, steps_per_epoch=2, track=True)
    for _ in range(6):
        optimizer.zero_grad()
        model[0].weight.sum().backward()
        optimizer.step()
    # With epochs the sparsity changes at their start: 0 until step 2, then 0.25, 0.5 from step 4, 0.75 at step 6. The
    # weights 1, 2, 3 are pruned after steps 2, 4, 6, which end epochs 1, 2, 3; the 4 is never pruned.
    assert [entry["step"] for entry in pruner.history if entry["flips"]] == [2, 4, 6]
    assert pruner.settled() == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", ["dpf", "rigl", "sfp", "dsr"])
def test_a_resumed_run_has_the_same_history(name: str) -> None:
    def attach_new() -> tuple[Net, Any, pm.Pruner]:
        model = Net().double()
        optimizer = make_sgd(model)
        pruner = make_frequent_pruner(name).attach(
            model, optimizer, total_steps=TOTAL, steps_per_epoch=EPOCH, track=True
        )
        return model, optimizer, pruner

    model, optimizer, whole = attach_new()
    train(model, optimizer, range(TOTAL))

    model, optimizer, _ = attach_new()
    train(model, optimizer, range(17))
    state = save_and_load({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer, resumed = attach_new()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, range(17, TOTAL))
    assert resumed.history == whole.history
    assert resumed.settled() == whole.settled()
    assert len(whole.history) >= 5


def test_a_copied_pruner_has_a_separate_history() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = make_frequent_pruner("set").attach(model, optimizer, total_steps=TOTAL, track=True, steps_per_epoch=EPOCH)
    train(model, optimizer, range(10))
    other, other_optimizer, copied = copy.deepcopy((model, optimizer, pruner))
    train(other, other_optimizer, range(10, 30))
    assert len(copied.history) > len(pruner.history)
    assert copied.history[: len(pruner.history)] == pruner.history


def test_history_is_a_copy() -> None:
    model = Net()
    pruner = pm.OneShot(sparsity=0.5).attach(model, make_sgd(model))
    pruner.history[0]["flips"] = -1
    pruner.history.clear()
    assert pruner.history[0]["flips"] == sum(int((~mask).sum()) for mask in pruner.masks().values())


def test_history_holds_plain_numbers() -> None:
    model = Net()
    optimizer = make_sgd(model)
    pruner = make_frequent_pruner("dpf").attach(model, optimizer, total_steps=TOTAL)
    train(model, optimizer, range(10))
    assert json.loads(json.dumps(pruner.history)) == pruner.history


def test_settled_is_refused_without_tracking_or_epochs() -> None:
    model = Net()
    pruner = pm.OneShot(sparsity=0.5).attach(model, make_sgd(model), steps_per_epoch=5)
    with pytest.raises(pm.PomonaError, match="nothing was tracked: call attach\\(…, track=True\\)"):
        pruner.settled()
    model = Net()
    pruner = pm.OneShot(sparsity=0.5).attach(model, make_sgd(model), track=True)
    with pytest.raises(pm.PomonaError, match="epochs are not known: call attach\\(…, steps_per_epoch=…\\)"):
        pruner.settled()


def test_delta_of_zero_weights_is_zero() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1))
    nn.init.zeros_(model[0].weight)
    pruner = pm.OneShot(sparsity=0.5, include=["0"]).attach(model, make_sgd(model))
    assert pruner.history[0]["delta"] == 0.0
    assert pruner.history[0]["flips"] == 8


def test_on_a_cpu_entries_hold_numbers_and_no_tensors():
    """Small tensors that live on keep the heap around them from being returned to the system."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pm.DPF(sparsity=0.5, every=1)
    pruner.attach(model, optimizer, total_steps=10)
    for _ in range(5):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    entries = pruner._history.entries
    assert len(entries) == 6  # with the one at `attach`
    assert all(isinstance(row, list) for entry in entries for part in entry["parts"] for row in part["figures"])


def train_small(steps: int, state: dict[str, Any] | None = None) -> tuple[pm.Pruner, dict[str, Any]]:
    """Train a small model with an update at every step, from a state if one is given; return pruner and state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pm.DPF(sparsity=0.5, every=1, settle=0.0).attach(model, optimizer, total_steps=200)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(pruner.step, steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    return pruner, save_and_load({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def test_a_long_history_keeps_the_latest_entries_and_some_early_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = train_small(60)
    monkeypatch.setattr(history, "MAX_ENTRIES", 16)
    thinned, _ = train_small(60)
    assert thinned.update_count == whole.update_count == 61
    assert len(thinned.history) <= 16
    assert thinned.history[-8:] == whole.history[-8:]
    steps = [entry["step"] for entry in thinned.history]
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert all(entry in whole.history for entry in thinned.history)


def test_a_thinned_history_goes_on_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_ENTRIES", 16)
    whole, _ = train_small(60)
    _, state = train_small(37)
    resumed, _ = train_small(60, state)
    assert resumed.history == whole.history
    assert resumed.update_count == 61


def test_a_state_with_a_list_of_entries_still_loads() -> None:
    pruner, _ = train_small(5)
    state = copy.deepcopy(pruner.state_dict()) | {"history": pruner.history}
    other, _ = train_small(0)
    other.load_state_dict(state)
    assert other.history == pruner.history
    assert other.update_count == 6


@pytest.mark.parametrize("damage", ["no column", "other layers", "other length", "text"])
def test_a_damaged_history_is_refused_and_changes_nothing(damage: str) -> None:
    pruner, _ = train_small(5)
    state = copy.deepcopy(pruner.state_dict())
    columns = state["history"]
    if damage == "no column":
        del columns["flips"]
    elif damage == "other layers":
        columns["layers"] = columns["layers"][:, :0]
    elif damage == "other length":
        columns["iou"] = columns["iou"][:-1]
    else:
        state["history"] = "none"
    other, _ = train_small(2)
    before, masks = other.history, {name: mask.clone() for name, mask in other.masks().items()}
    with pytest.raises(pm.PomonaError, match="history is not that of this model"):
        other.load_state_dict(state)
    assert other.history == before
    assert other.step == 2
    assert all(torch.equal(masks[name], mask) for name, mask in other.masks().items())


def test_a_saved_history_is_compact() -> None:
    entry = {"step": 1, "sparsity": 0.5, "delta": 0.1, "flips": 3, "iou": 0.9, "layers": [0.5] * 54}
    columns = history.UpdateHistory([entry] * 1000).to_columns([str(i) for i in range(54)])
    buffer = io.BytesIO()
    torch.save(columns, buffer)
    assert buffer.tell() < 1000 * (54 + 5) * 8 + 10_000


def test_a_large_model_is_measured_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_deltas() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = pm.DPF(sparsity=0.5, every=1, printed=True).attach(model, optimizer, total_steps=5)
        model(torch.ones(4, 30)).sum().backward()
        optimizer.step()
        return [entry["delta"] for entry in pruner.history]

    at_once = find_deltas()
    monkeypatch.setattr(history, "MAX_COPIED_WEIGHTS", 1)
    assert find_deltas() == pytest.approx(at_once, rel=1e-6)
    assert at_once[-1] > 0
