"""Axes: which runs they expand to, how they are parsed, and what is refused."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
from sweep_recipe import SMALL_RECIPE

from pomona.errors import PomonaError
from pomona.lab import Recipe
from pomona.lab.recipes import sections
from pomona.lab.sweeps.axes import expand_runs, parse_axis, replace_method
from pomona.lab.sweeps.sweep import sweep
from pomona.methods import METHODS


def test_runs_are_the_product_of_the_axes(tmp_path):
    axes = {"seed": [0, 1], "method.sparsity": [0.8, 0.9], "method": ["oneshot", "dpf(every=4)"], "train.clip": [1.0]}
    runs = expand_runs(SMALL_RECIPE, axes, tmp_path)
    assert len(runs) == 8
    made = {(run.recipe.seed, run.recipe.method["name"], run.recipe.method["sparsity"]) for run in runs}
    assert made == {(s, m, p) for s in (0, 1) for m in ("oneshot", "dpf") for p in (0.8, 0.9)}
    last = runs[-1]
    assert last.recipe.name == "dpf-90-every4-seed1-clip1.0"
    assert last.folder == tmp_path / f"{last.recipe.name}-{last.recipe.fingerprint()}"
    assert last.recipe.method["every"] == 4
    assert last.setting == {"options": {"every": 4}, "train.clip": 1.0}
    assert len({run.folder for run in runs}) == 8
    assert not list(tmp_path.iterdir())


def test_sections_that_no_axis_changes_are_parsed_once(tmp_path, monkeypatch):
    teacher = tmp_path / "teacher.safetensors"
    teacher.write_bytes(b"weights")
    hashed = []
    monkeypatch.setattr(sections, "read_bytes", lambda file: hashed.append(file) or Path(file).read_bytes())
    method = {"name": "dpf", "sparsity": 0.5, "schedule": {"name": "cubic"}}
    settings = SMALL_RECIPE | {"method": method, "teacher": {"file": str(teacher)}, "finetune": {"epochs": 1}}
    before = copy.deepcopy(settings)
    axes = {"rate.warmup": [0.0, 0.1], "method.schedule.until": [0.5, 0.6], "finetune.optimizer.lr": [0.1, 0.3]}
    runs = expand_runs(settings, axes, tmp_path)
    assert hashed == [str(teacher)]
    assert settings == before
    # Each run has the recipe that its settings have alone.
    for run, values in zip(runs, itertools.product(*axes.values()), strict=True):
        overrides = [f"{key}={value}" for key, value in zip(axes, values, strict=True)]
        assert run.recipe == Recipe.load(settings | {"name": run.recipe.name}, overrides)


def test_without_axes_there_is_one_run(tmp_path):
    (only,) = expand_runs(SMALL_RECIPE, {}, tmp_path)
    assert only.recipe == Recipe.load(SMALL_RECIPE)


def test_a_method_inherits_the_options_that_it_has(tmp_path):
    base = SMALL_RECIPE | {"method": {"name": "dpf", "every": 4, "settle": 0.2, "pattern": "filter"}}
    by_name = {
        run.recipe.method["name"]: run
        for run in expand_runs(base, {"method": ["dpf", "incremental", "dense"]}, tmp_path)
    }
    assert by_name["dpf"].recipe == Recipe.load(base | {"name": "dpf"})
    assert by_name["dpf"].dropped == ()
    assert by_name["incremental"].recipe.method["every"] == 4
    assert by_name["incremental"].recipe.method["pattern"]["name"] == "filter"
    assert by_name["incremental"].dropped == ("method.settle",)
    assert by_name["dense"].recipe.method == {"name": "dense"}
    # Defaults are not inherited: RigL has its own allocation.
    assert replace_method("dpf(sparsity=0.5)", "rigl") == ({"name": "rigl", "sparsity": 0.5}, [])
    assert replace_method("dpf(0.5)", "rigl") == ({"name": "rigl", "sparsity": 0.5}, [])


def test_dense_is_trained_once_for_all_sparsities(tmp_path):
    axes = {"method": ["dense", "oneshot"], "method.sparsity": [0.8, 0.9], "seed": [0, 1]}
    runs = expand_runs(SMALL_RECIPE, axes, tmp_path)
    assert [run.recipe.name for run in runs] == [
        "dense-seed0",
        "dense-seed1",
        *(f"oneshot-{s}-seed{k}" for k in (0, 1) for s in (80, 90)),
    ]
    assert runs[0].dropped == ("method.sparsity",)


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("seed=0,1,2", "seed", [0, 1, 2]),
        ("method = dense, oneshot(sparsity=0.5, at=1),dpf", "method", ["dense", "oneshot(sparsity=0.5, at=1)", "dpf"]),
        ("model.hidden=[8, 8],[16]", "model.hidden", [[8, 8], [16]]),
        ("train.precision=bf16", "train.precision", ["bf16"]),
        (
            "method=dpf(every=4, schedule=cubic(until=0.5)),rigl",
            "method",
            ["dpf(every=4, schedule=cubic(until=0.5))", "rigl"],
        ),
        ("column='a, b',c's, d's", "column", ["a, b", "c's", "d's"]),
    ],
)
def test_parse_axis(text, key, values):
    assert parse_axis(text) == (key, values)


@pytest.mark.parametrize("text", ["seed", "=1", "seed=", "seed=1,,2"])
def test_parse_axis_refuses_other_texts(text):
    with pytest.raises(PomonaError, match="is not of the form key=value,value"):
        parse_axis(text)


def test_given_axes_replace_those_of_the_recipe(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('data = "digits"\nmodel = "mlp"\n[sweep]\nseed = [0, 1, 2]\n"train.epochs" = [1, 2]\n')
    assert len(expand_runs(path, {}, tmp_path)) == 6
    assert [run.recipe.seed for run in expand_runs(path, {"seed": [7]}, tmp_path)] == [7, 7]
    assert Recipe.load(path).train.epochs == 10  # without a sweep the section has no effect


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"method": ["dpf", "rigel"]}, "unknown method 'rigel': did you mean 'rigl'"),
        ({"train.epoch": [1]}, "did you mean 'epochs'"),
        ({"sed": [1]}, "unknown key of the recipe 'sed': did you mean 'seed'"),
        ({"seed": 3}, "the axis 'seed' takes a list of values, got 3"),
        ({"seed": []}, "the axis 'seed' takes a list of values"),
        ({"method": "dpf"}, "the axis 'method' takes a list"),
        ({"method": [3]}, "an axis of methods takes names"),
        ({"method": ["dpf"], "method.sparsity": [1.5]}, r"must lie in \[0, 1\), got 1.5"),
        ({"method": ["oneshot", "dense"], "method.evry": [4]}, "none of the methods of this sweep has .* 'evry'"),
        ({"method.every": [4]}, "a method needs a name"),
    ],
)
def test_bad_axes_are_refused_before_training(tmp_path, axes, message):
    with pytest.raises(PomonaError, match=message):
        sweep(SMALL_RECIPE, axes, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_bundled_sweep_has_every_method():
    path = Path(__file__).parents[3] / "recipes" / "digits-sweep.toml"
    runs = expand_runs(path, {}, "out")
    made = {(run.recipe.method["name"], run.recipe.method.get("sparsity")) for run in runs}
    others = [name for name in METHODS if name not in ("finetune", "edge_popup", "iterand")]
    assert made == {("dense", None), *((name, s) for name in others for s in (0.8, 0.9, 0.95))}
    lottery = next(run.recipe for run in runs if run.recipe.method["name"] == "lottery")
    assert lottery.method["retrainings"] == 3
