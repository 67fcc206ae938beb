"""Layers that a pattern does not divide: left dense with a warning, refused where they are included."""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from typing import Any

import pytest
from engine_helpers import Net, is_identical, make_sgd, save_and_load, train
from hypothesis import given, settings
from hypothesis import strategies as st
from run_helpers import StopAfter, digits_recipe, have_same_weights
from torch import nn

import pomona as pm
from pomona.lab import Interrupted, describe_run
from pomona.lab.runs.train import train as train_run

# In Net, whose rows have 36 (conv1), 72 (conv2) and 12 (hidden) weights, groups of 8 divide conv2 alone.
LEFT_OUT = "conv1.weight", "hidden.weight"


def attach_with_warnings(pruner: pm.Pruner, model: nn.Module, optimizer: Any, **options: Any) -> list[str]:
    """Attach a pruner, and return the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pruner.attach(model, optimizer, **{"total_steps": 40, **options})
    return [str(warning.message) for warning in caught]


def test_a_layer_that_the_pattern_does_not_divide_is_left_dense() -> None:
    model = Net()
    pruner = pm.DPF(pattern="4:8", every=4)
    messages = attach_with_warnings(pruner, model, make_sgd(model))
    assert list(pruner.masks()) == ["conv2.weight"]
    assert messages == [
        "conv1.weight is left dense: groups of 8 do not divide the rows of conv1.weight (8×36): m=4 would fit, or "
        "leave the layer out with exclude=['conv1.weight'].",
        "hidden.weight is left dense: groups of 8 do not divide the rows of hidden.weight (16×12): m=4 would fit, or "
        "leave the layer out with exclude=['hidden.weight'].",
    ]


@pytest.mark.parametrize("kind", [pm.DPF, pm.OneShot, pm.SET], ids=["dpf", "oneshot", "set"])
def test_training_is_that_of_a_model_whose_layers_are_excluded(kind: Any) -> None:
    states = []
    for exclude in ((), LEFT_OUT):
        model = Net().double()
        optimizer = make_sgd(model)
        options = {} if kind is pm.OneShot else {"every": 4}
        pruner = kind(pattern="4:8", allocation="uniform", exclude=exclude, **options)
        assert len(attach_with_warnings(pruner, model, optimizer)) == (0 if exclude else 2)
        train(model, optimizer, range(40))
        pruner.finish()
        assert pruner.sparsity() == 0.5
        assert all(model.get_parameter(name).all() for name in LEFT_OUT)
        states.append((model.state_dict(), optimizer.state_dict()["state"], pruner.masks()))
    assert is_identical(*states)


def test_a_resumed_training_is_the_uninterrupted_one() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    attach_with_warnings(pm.DPF(pattern="4:8", every=4), model, optimizer)
    train(model, optimizer, range(17))
    saved = save_and_load(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    again = Net(seed=1).double()
    resumed = make_sgd(again)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    pruner = pm.DPF(pattern="4:8", every=4)
    assert len(attach_with_warnings(pruner, again, resumed)) == 2
    assert pruner.step == 17
    for net, stepping in ((model, optimizer), (again, resumed)):
        train(net, stepping, range(17, 40))
    assert is_identical(model.state_dict(), again.state_dict())


@pytest.mark.parametrize("include", ["hidden", ["hidden.weight"], ["conv2", "hid*"]])
def test_an_included_layer_is_refused(include: Any) -> None:
    model = Net()
    with pytest.raises(pm.PomonaError, match=r"^groups of 8 do not divide the rows of hidden\.weight \(16×12\)"):
        pm.DPF(pattern="4:8", include=include).attach(model, make_sgd(model), total_steps=9)
    with pytest.raises(pm.PomonaError, match=r"^groups of 8 do not divide"):
        pm.prunable(model, include, pattern="4:8")


def test_a_model_without_a_layer_that_fits_is_refused() -> None:
    model = Net()
    for prune in (
        lambda: pm.Incremental(pattern="block(5, 5)").attach(model, make_sgd(model), total_steps=9),
        lambda: pm.Lottery(pattern="block(5, 5)").rounds(model, lambda *_: None),
        lambda: pm.prune(model, pattern="block(5, 5)"),
    ):
        with pytest.raises(pm.PomonaError, match=r"fits no layer of Net: blocks of 5×5 do not divide conv1\.weight"):
            prune()


def test_prunable_lists_the_layer_with_the_reason() -> None:
    found = pm.prunable(Net(), pattern="4:8")
    assert [target.name for target in found.targets] == ["conv2.weight"]
    assert [choice.target.name for choice in found.misfits] == list(LEFT_OUT)
    assert "  hidden.weight  16×12            groups of 8 do not divide the rows of" in str(found)
    assert str(found) == str(pm.prunable(Net(), pattern=pm.NM(4, 8)))
    assert not pm.prunable(Net()).misfits
    assert not pm.prunable(Net(), exclude=LEFT_OUT, pattern="4:8").misfits
    with pytest.raises(pm.PomonaError, match="unknown pattern 'balansed': did you mean 'balanced'"):
        pm.prunable(Net(), pattern="balansed(8)")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=5), st.integers(2, 9))
def test_the_targets_are_the_layers_that_groups_divide(widths: list[int], group: int) -> None:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 3))
    expected = [f"{i}.weight" for i, width in enumerate(widths[:-1]) if width % group == 0]
    found = pm.prunable(model, pattern=f"1:{group}")
    assert [target.name for target in found.targets] == expected
    assert len(found.targets) + len(found.misfits) == len(layers)


def test_the_lottery_prunes_the_layers_that_fit() -> None:
    model = Net()

    def training(model: nn.Module, pruner: pm.Pruner, index: int) -> list[str]:
        optimizer = make_sgd(model)
        pruner.attach(model, optimizer, total_steps=2)
        train(model.double(), optimizer, range(2))
        pruner.finish()
        return list(pruner.masks())

    model.double()
    with pytest.warns(UserWarning, match="is left dense"):
        rounds = pm.Lottery(pattern="4:8", retrainings=1).rounds(model, training)
    assert [entry["result"] for entry in rounds] == [["conv2.weight"]] * 2
    assert int((model.conv2.weight == 0).sum()) == model.conv2.weight.numel() // 2
    assert model.conv1.weight.all()


@pytest.mark.parametrize("method", ["dpf(pattern='2:4', every=4)", "lottery(pattern='2:4', retrainings=1)"])
def test_a_run_of_the_laboratory_leaves_the_layer_out_and_resumes(method: str, tmp_path: Any) -> None:
    recipe = digits_recipe(method, epochs=2)
    warning = re.escape("groups of 4 do not divide the rows of features.0.weight (8×9)")
    with pytest.warns(UserWarning, match=warning):
        pruned = describe_run(recipe)["pruned"]
    assert "features.0.weight" not in pruned
    assert "features.3.weight" in pruned
    with pytest.warns(UserWarning, match=warning):
        summary = train_run(recipe, tmp_path / "whole")
    assert summary["sparsity"] == 0.5
    assert summary["stages"][-1]["layers"].keys() == pruned.keys()
    with pytest.warns(UserWarning, match=warning), pytest.raises(Interrupted):
        train_run(recipe, tmp_path / "parts", stop=StopAfter(5))
    with pytest.warns(UserWarning, match=warning):
        train_run(recipe, tmp_path / "parts", resume=True)
    assert have_same_weights(tmp_path / "whole", tmp_path / "parts")
