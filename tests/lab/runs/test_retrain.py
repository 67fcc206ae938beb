"""Retraining: the mask is the run's, the weights begin where they should, and both cost what was asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pomona.errors import PomonaError
from pomona.lab import Interrupted, Recipe, train
from pomona.lab.recipes.learning_rates import CosineDecay, StepDecay
from pomona.lab.runs import masks
from pomona.lab.runs.retrain import mac_shares, milestones_as_shares, prepare_retraining, retrain, training_cost


def recipe(method, epochs=2, model="mlp(hidden=[16])", finetune=0, **sections) -> Recipe:
    """Three steps an epoch; the network has 64·16 + 16·10 MACs, of which the first part is pruned."""
    training = {"epochs": epochs, "batch_size": 450, "device": "cpu", "reestimate": 0}
    base = {"name": "test", "data": "digits", "model": model, "method": method, "train": training}
    return Recipe.load(base | {"finetune": {"epochs": finetune}} | sections)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    return (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


HALF = (512 + 160) / 1184  # the cost of an epoch with half of the first layer


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A run that cuts half of its weights after half of its two epochs."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("pruned") / "run"
    train(recipe("oneshot(sparsity=0.5, at=0.5)"), folder)
    return folder


# ---- where the weights begin


@pytest.mark.parametrize("method", ["random(sparsity=0.8)", "snip(sparsity=0.8)"])
def test_a_mask_found_at_the_start_trains_to_the_same_weights_again(tmp_path, method):
    train(recipe(method), tmp_path / "run")
    result = retrain(tmp_path / "run", "init")
    assert same(tmp_path / "run", tmp_path / "run-retrain-init")
    before, after = result["runs"]
    assert (before["how"], after["how"]) == ("as trained", "retrained from init")
    assert before["accuracy"] == after["accuracy"]
    assert before["sparsity"] == after["sparsity"] == pytest.approx(0.8, abs=1e-3)
    assert before["epochs"] == after["epochs"] == 2
    assert before["cost"] == pytest.approx(after["cost"])


def test_a_random_start_has_other_weights_and_the_same_mask(tmp_path, pruned):
    result = retrain(pruned, "random", out=tmp_path / "one")
    retrain(pruned, "random", out=tmp_path / "two", seed=5)
    assert result["runs"][1]["seed"] != 0
    assert not same(tmp_path / "one", tmp_path / "two")
    found = masks.load(pruned)
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert all(torch.equal(masks.load(folder)[name], mask) for name, mask in found.items())
        assert all(not weights(folder)[name][~mask].any() for name, mask in found.items())


def test_retraining_from_final_restarts_the_learning_rate(tmp_path):
    train(recipe("oneshot(sparsity=0.5, at=0.5)", optimizer="sgd(lr=1e-7)"), tmp_path / "run")
    retrain(tmp_path / "run", "final")
    before, after = weights(tmp_path / "run"), weights(tmp_path / "run-retrain-final")
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-5)
    first = json.loads((tmp_path / "run-retrain-final" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["lr"] == pytest.approx(1e-7)


def test_removed_filters_stay_removed_with_their_bias_and_norm(tmp_path):
    method = {"name": "dpf", "sparsity": 0.5, "every": 1, "pattern": "filter"}
    train(recipe(method, model="digits_cnn(rho=0.25)"), tmp_path / "run")
    retrain(tmp_path / "run", "init")
    before, after = weights(tmp_path / "run"), weights(tmp_path / "run-retrain-init")
    vectors = [n for n, v in before.items() if v.ndim == 1 and v.is_floating_point() and "running" not in n]
    assert sum(int((before[n] == 0).sum()) for n in vectors) > 0
    assert all(not after[n][before[n] == 0].any() for n in vectors)
    assert all(
        torch.equal(masks.load(tmp_path / "run-retrain-init")[n], m) for n, m in masks.load(tmp_path / "run").items()
    )


def test_a_retraining_is_a_run_that_can_be_resumed(tmp_path, pruned):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    retrain(pruned, out=whole)
    left = iter(range(3))
    with pytest.raises(Interrupted):
        retrain(pruned, out=parts, stop=lambda: next(left, None) is None)
    train(Recipe.load(parts / "recipe.toml"), parts, resume=True)
    assert same(whole, parts)
    with pytest.raises(PomonaError, match="is not empty"):
        retrain(pruned, out=parts)
    assert retrain(pruned, out=parts, resume=True)["runs"][1]["run"] == str(parts)


# ---- what it costs


def test_the_cost_of_one_shot_pruning_by_hand(pruned):
    assert list(mac_shares(pruned).values()) == pytest.approx([1024 / 1184, 160 / 1184])
    assert training_cost(pruned) == pytest.approx(1 + HALF)  # an epoch dense, an epoch with half


def test_the_flops_budget_sets_the_number_of_epochs(pruned):
    made, folder = prepare_retraining(pruned, budget="flops")
    assert made.train.epochs == round((1 + HALF) / HALF) == 3
    assert folder.name == "run-retrain-init-flops"
    assert prepare_retraining(pruned)[0].train.epochs == 2
    assert not folder.exists()


@pytest.mark.parametrize(
    ("method", "finetune", "epochs"),
    [
        ("sfp(sparsity=0.5)", 0, 2.0),  # grows freely between cuts
        ("sfp(sparsity=0.5)", 1, None),
        ("lottery(sparsity=0.5, retrainings=1)", 0, 2 + 2 * HALF),
        ("random(sparsity=0.5)", 1, 3 * HALF),
        ("oneshot(sparsity=0.5, at=1)", 3, 2 + 3 * HALF),
    ],
)
def test_the_cost_of_stages(tmp_path, method, finetune, epochs):
    sfp = method.startswith("sfp")
    summary = train(
        recipe(method, model="digits_cnn(rho=0.25)" if sfp else "mlp(hidden=[16])", finetune=finetune), tmp_path / "run"
    )
    if epochs is None:
        epochs = 2 + summary["macs_left"] / summary["macs"]
    assert training_cost(tmp_path / "run") == pytest.approx(epochs)


def test_the_cost_follows_the_mask(tmp_path):
    train(recipe("dpf(sparsity=0.8, every=2, settle=0)", epochs=4), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = {line["step"]: line["layers"][0] for line in lines if line["kind"] == "update"}
    now, spent = 0.0, 0.0
    for step in range(12):
        now = updates.get(step, now)
        spent += (1024 * (1 - now) + 160) / 1184
    assert training_cost(tmp_path / "run") == pytest.approx(spent / 3)
    assert 4 > training_cost(tmp_path / "run") > 4 * (1024 * 0.2 + 160) / 1184


def test_milestones_as_shares_of_training():
    assert milestones_as_shares(StepDecay(milestones=(150, 225)), 300) == StepDecay(milestones=(0.5, 0.75))
    assert milestones_as_shares(StepDecay(milestones=(0.3, 0.6)), 300) == StepDecay(milestones=(0.3, 0.6))
    assert milestones_as_shares(CosineDecay(), 300) == CosineDecay()


# ---- what is refused


def test_bad_input_is_refused_and_nothing_is_written(tmp_path, pruned):
    train(recipe("dense", epochs=1), tmp_path / "dense")
    with pytest.raises(Interrupted):
        train(recipe("random"), tmp_path / "begun", stop=lambda: True)
    later = recipe("random", epochs=1, origin={"run": str(tmp_path / "dense")})
    train(later, tmp_path / "later")
    before = set(tmp_path.iterdir())
    for arguments, says in [
        ((pruned, "initial"), "unknown start of a retraining 'initial': did you mean 'init'"),
        ((pruned, "init", "flop"), "unknown budget 'flop': did you mean 'flops'"),
        ((tmp_path,), "is not a run: it has no recipe.toml"),
        ((tmp_path / "begun",), "is not complete: go on with pomona train --resume"),
        ((tmp_path / "dense",), "is dense: there is no mask to retrain"),
        ((tmp_path / "later", "init"), "itself started from the weights of .*: retrain it from random or final"),
    ]:
        with pytest.raises(PomonaError, match=says):
            retrain(*arguments)
    with pytest.raises(PomonaError, match="a seed is for a random start, and this one is from init"):
        retrain(pruned, seed=3)
    assert set(tmp_path.iterdir()) == before
    retrain(tmp_path / "later", "final")
