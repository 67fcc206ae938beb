"""Recipes: every default visible, every mistake named, and what is written is what is read."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pomona import models
from pomona.errors import PomonaError
from pomona.lab.recipes import sections, toml_writer
from pomona.lab.recipes.options import TrainOptions
from pomona.lab.recipes.recipe import Recipe
from pomona.methods import METHODS

BASE = {"data": "digits", "model": "mlp"}


def test_the_shortest_recipe_shows_every_default():
    table = tomllib.loads(Recipe.load({**BASE, "method": "dpf"}).to_toml())
    sections = {"data", "model", "origin", "teacher", "method", "optimizer", "rate", "train", "finetune"}
    assert set(table) == {"name", "seed", *sections}
    assert set(table["train"]) == {f.name for f in dataclasses.fields(TrainOptions)}
    assert table["method"]["sparsity"] == 0.9
    assert table["method"]["schedule"] == {"name": "cubic", "start": 0.0, "until": 0.75}
    assert table["method"]["settle"] == 0.1
    assert table["optimizer"] == {
        "name": "sgd",
        "lr": 0.1,
        "weight_decay": 1e-4,
        "momentum": 0.9,
        "nesterov": True,
    }
    assert table["model"]["hidden"] == [512, 512]
    assert "num_classes" not in table["model"]  # follows from the data


def test_an_option_that_is_not_set_is_a_comment():
    assert "# theta is not set" in toml_writer.format_toml({"method": {"theta": None}})


@pytest.mark.parametrize("method", ["dpf", "dpf(printed=true)", "dpf(pattern='filter')", "st3(compressor='none')"])
def test_a_resolved_recipe_says_which_options_are_off(method: str):
    recipe = Recipe.load({**BASE, "method": method})
    written = recipe.to_toml()
    assert ('compressor = "none"' in written) == (recipe.method["compressor"] is None)
    assert ("feedback = inf" in written) == (recipe.method["feedback"] is None)
    assert Recipe.load(tomllib.loads(written)) == recipe


OLD_DPF = {"name": "dpf", "sparsity": 0.9, "every": 16, "settle": 0.1}  # as the first version wrote it


@pytest.mark.parametrize("extra", [{}, {"compressor": None}, {"compressor": None, "feedback": None}])
def test_a_stored_recipe_is_read_by_the_options_of_its_time(extra: dict[str, None]):
    stored = Recipe.load_stored({**BASE, "method": OLD_DPF | extra})
    assert (stored.method["compressor"], stored.method["feedback"]) == (None, None)
    assert stored == Recipe.load({**BASE, "method": "dpf(every=16, compressor='none', feedback=inf)"})
    assert stored.fingerprint() == "334637708af4"  # of the first version
    assert stored.fingerprint() != Recipe.load({**BASE, "method": OLD_DPF}).fingerprint()


def test_the_printed_algorithm_is_part_of_the_fingerprint_by_its_options_only():
    printed = Recipe.load({**BASE, "method": "dpf(printed=true)"})
    assert "printed" not in printed.to_dict()["method"]
    spelled = Recipe.load({**BASE, "method": "dpf(every=16, settle=0, compressor='none', feedback=inf)"})
    assert printed.fingerprint() == spelled.fingerprint()


def with_length(method: str, **settings: Any) -> str:
    """Return the fingerprint of a recipe that trains a perceptron by a method."""
    return Recipe.load({**BASE, "model": "mlp", "method": method, **settings}).fingerprint()


def test_the_default_interval_has_the_fingerprint_of_its_number():
    """1,347 digits in batches of 64 are 22 steps, or 21 with full batches alone; without 447 of them they are 15."""
    short = {"data": "digits", "train": {"epochs": 16, "batch_size": 64}}
    assert with_length("dpf", **short) == with_length("dpf(every=3)", **short)
    held_out = {**short, "data": "digits(validation=447)"}
    assert with_length("dpf", **held_out) == with_length("dpf(every=2)", **held_out)
    dropped = {"data": "digits", "train": {"epochs": 19, "batch_size": 64, "drop_last": True}}
    assert with_length("dpf", **dropped) == with_length("dpf(every=3)", **dropped)
    long = {"data": "digits", "train": {"epochs": 80, "batch_size": 64}}
    assert with_length("dpf", **long) == with_length("dpf(every=16)", **long)
    of_unknown_length = {"data": "imagefolder", "train": {"epochs": 1}}
    assert with_length("dpf", **of_unknown_length) == with_length("dpf(every=16)", **of_unknown_length)


@pytest.mark.parametrize("name", [*METHODS, "dense"])
def test_every_method_round_trips(name):
    recipe = Recipe.load({**BASE, "method": name})
    assert Recipe.load(tomllib.loads(recipe.to_toml())) == recipe
    assert Recipe.load(recipe.to_dict()) == recipe


numbers = st.floats(1e-6, 1e3, allow_nan=False)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "name": st.text(st.characters(exclude_characters="/\\"), min_size=1, max_size=12).filter(
                lambda name: name.isprintable() and name not in (".", "..")
            ),
            "seed": st.integers(0, 2**63 - 1),
            "method": st.sampled_from(
                [
                    "dense",
                    "oneshot(sparsity=0.5, at=0.75)",
                    {"name": "dpf", "sparsity": 0.5, "pattern": {"name": "balanced", "block": 4}},
                    {"name": "incremental", "include": ['we"ird.*', "ünï\\code"], "allocation": "erk"},
                ]
            ),
            "optimizer": st.fixed_dictionaries({"lr": numbers, "weight_decay": numbers}),
            "rate": st.fixed_dictionaries({"milestones": st.lists(st.integers(0, 300) | st.floats(0, 1), max_size=4)}),
            "train": st.fixed_dictionaries({"epochs": st.integers(1, 999), "clip": numbers}),
        }
    )
)
def test_recipes_round_trip_through_toml(given):
    recipe = Recipe.load({**BASE, **given})
    again = Recipe.load(tomllib.loads(recipe.to_toml()))
    assert again == recipe
    assert again.to_toml() == recipe.to_toml()
    assert again.fingerprint() == recipe.fingerprint()
    assert again.differences(recipe) == []


@given(st.text())
def test_any_text_can_be_written_as_toml(text):
    text = text.encode("utf-8", "ignore").decode()
    assert tomllib.loads(f"x = {toml_writer.format_value(text)}") == {"x": text}
    assert tomllib.loads(f"{toml_writer.format_key(text)} = 1") == {text: 1}


def test_a_file_without_a_name_is_named_after_itself(tmp_path):
    path = tmp_path / "quick.toml"
    path.write_text('data = "digits"\nmodel = "mlp"\n[train]\nepochs = 3\n')
    recipe = Recipe.load(path, ["seed=7"])
    assert (recipe.name, recipe.seed, recipe.train.epochs) == ("quick", 7, 3)


def test_overrides():
    source = {**BASE, "method": "dpf(sparsity=0.8)", "train": {"epochs": 4}}
    recipe = Recipe.load(
        source,
        [
            "train.epochs=9",
            "method.sparsity = 0.95",
            "method.pattern=filter",
            "method.schedule.name=linear",
            "model.hidden=[32, 16]",
            "rate=cosine(warmup=1)",
            "optimizer.nesterov=false",
            "train.precision=bf16",
            'name="a = b"',
        ],
    )
    assert recipe.train.epochs == 9
    assert recipe.method["sparsity"] == 0.95
    assert recipe.method["pattern"]["name"] == "filter"
    assert recipe.method["schedule"]["name"] == "linear"
    assert recipe.model["hidden"] == [32, 16]
    assert (recipe.rate.name, recipe.rate.warmup) == ("cosine", 1)
    assert recipe.optimizer.nesterov is False
    assert recipe.train.precision == "bf16"
    assert recipe.name == "a = b"
    assert source == {**BASE, "method": "dpf(sparsity=0.8)", "train": {"epochs": 4}}  # left as it was


@pytest.mark.parametrize(
    "name", ["../escaped", "/tmp/escaped", "a/b", "a\\b", "..", "", "\x1b[31mred", "n" * 201, "a\nb"]
)
def test_a_name_that_is_no_folder_is_refused(name):
    """The name is the run's folder: it must stay inside `runs/`, and print nothing but itself."""
    with pytest.raises(PomonaError, match="name must be a folder's name") as error:
        Recipe.load({"name": name, "data": "digits", "model": "mlp"})
    assert str(error.value).isprintable()


def test_a_whole_section_is_replaced_by_a_name():
    recipe = Recipe.load({**BASE, "method": {"name": "dpf", "every": 4}}, ["method=incremental(every=8)"])
    assert (recipe.method["name"], recipe.method["every"]) == ("incremental", 8)


def test_an_optimizer_without_a_name_is_the_default_one():
    assert Recipe.load({**BASE, "optimizer": {"lr": 0.3}}).optimizer.name == "sgd"


def test_the_block_of_a_network_counts_unless_it_is_the_one_of_earlier_runs():
    plain, basic, bottleneck = (
        Recipe.load({**BASE, "data": "cifar10", "model": {"name": "resnet56", **block}})
        for block in ({}, {"block": "basic"}, {"block": "bottleneck"})
    )
    assert plain.fingerprint() == basic.fingerprint() != bottleneck.fingerprint()
    assert plain.differences(bottleneck) == ["model.block: None, not 'bottleneck'"]


def test_the_fingerprint_depends_on_settings_and_not_on_the_name():
    recipe = Recipe.load({**BASE, "name": "a"})
    assert recipe.fingerprint() == Recipe.load({**BASE, "name": "b"}).fingerprint()
    assert recipe.fingerprint() == Recipe.load({**BASE, "train": {"clip": 0}}).fingerprint()
    assert recipe.fingerprint() == Recipe.load({**BASE, "train": {"device": "cpu"}}).fingerprint()
    assert recipe.fingerprint() != Recipe.load({**BASE, "seed": 1}).fingerprint()
    assert len({Recipe.load({**BASE, "method": m}).fingerprint() for m in METHODS}) == len(list(METHODS))
    # Here 1 is an epoch and 1.0 a share of training.
    whole, share = ({**BASE, "rate": {"milestones": [m]}} for m in (1, 1.0))
    assert Recipe.load(whole).fingerprint() != Recipe.load(share).fingerprint()


def test_the_fingerprint_depends_on_the_teacher_and_not_on_its_place(tmp_path):
    def fingerprint(**teacher) -> str:
        return Recipe.load({**BASE, "teacher": teacher}).fingerprint()

    assert Recipe.load(BASE).fingerprint() == fingerprint() == fingerprint(weight=0.5)  # without a teacher
    ours = fingerprint(run="here", fingerprint="abc")
    assert ours == fingerprint(run="there", fingerprint="abc", weight=0.9, temperature=4)
    others = [
        Recipe.load(BASE).fingerprint(),
        fingerprint(run="here", fingerprint="abd"),
        fingerprint(run="here", fingerprint="abc", weight=0.8),
        fingerprint(run="here", fingerprint="abc", temperature=2.0),
    ]
    assert len({ours, *others}) == 5
    for name, content in (("a", b"weights"), ("b", b"weights"), ("c", b"others")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (fingerprint(file=str(tmp_path / name)) for name in "abc")
    assert a == b != c


def test_differences_name_the_setting():
    a, b = Recipe.load(BASE), Recipe.load({**BASE, "name": "other", "train": {"epochs": 3}})
    assert b.differences(a) == ["train.epochs: 3, not 10"]


def test_augmentation_is_a_named_choice():
    assert Recipe.load(BASE).data.augment == "auto"
    recipe = Recipe.load(BASE, ["data.augment=standard(pad=1)"])
    assert recipe.data.to_dict() == {
        "name": "digits",
        "validation": 0,
        "augment": {"name": "standard", "pad": 1},
    }
    assert Recipe.load(tomllib.loads(recipe.to_toml())) == recipe


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"optimiser": {}}, "unknown key of the recipe 'optimiser': did you mean 'optimizer'"),
        ({"epochs": 3}, "did you mean 'train.epochs'"),
        ({"sparsity": 0.5}, "did you mean 'method.sparsity'"),
        ({"train": {"epoch": 3}}, "unknown option of train 'epoch': did you mean 'epochs'"),
        ({"train": {"epochs": "three"}}, "train.epochs takes int, got 'three'"),
        ({"train": {"epochs": True}}, "train.epochs takes int, got True"),
        ({"train": {"epochs": 0}}, "train.epochs must be at least 1, got 0"),
        ({"train": {"precision": "fp16"}}, "unknown precision 'fp16'"),
        ({"train": {"device": "gpu"}}, "unknown device 'gpu'"),
        ({"train": {"label_smoothing": 1.0}}, "label_smoothing must be in"),
        ({"train": 3}, "train is a section of options"),
        ({"seed": -1}, "seed must be in"),
        ({"seed": "x"}, "seed takes int"),
        ({"name": 3}, "name takes str"),
        ({"method": "dfp"}, "unknown method 'dfp': did you mean 'dpf'"),
        ({"method": "dens"}, "did you mean 'dense'"),
        ({"method": "dense(sparsity=0.9)"}, "prunes nothing and has no option 'sparsity'"),
        ({"method": {"sparsity": 0.9}}, "a method needs a name"),
        ({"method": "dpf(sparsity=1.0)"}, r"\[0, 1\), got 1.0"),
        ({"method": "dpf(sparsity=-0.1)"}, r"\[0, 1\), got -0.1"),
        ({"method": "dpf(sparsty=0.9)"}, "did you mean 'sparsity'"),
        ({"method": "dpf(sparsity=0.9"}, "is not of the form"),
        ({"method": {"name": "dpf", "pattern": "filtr"}}, "did you mean 'filter'"),
        ({"model": "resnet21"}, "unknown model 'resnet21': did you mean 'resnet2"),
        ({"model": "resnet20(depth=3)"}, "option of model 'resnet20'"),
        ({"model": {"name": "resnet20", "affine": 3}}, "affine takes bool, got 3"),
        ({"model": {}}, "model needs a name"),
        ({"data": "digit"}, "did you mean 'digits'"),
        ({"data": "digits(validaton=3)"}, "did you mean 'validation'"),
        ({"data": "digits(validation='x')"}, "data.validation takes int or float"),
        ({"data": {"name": "digits", "augment": "standrd"}}, "did you mean 'standard'"),
        ({"optimizer": {"lr": "high"}}, "lr takes float, got 'high'"),
        ({"optimizer": 3}, "3 is not a valid optimizer"),
        ({"rate": {"gama": 0.1}}, "did you mean 'gamma'"),
        ({"temperature": 4.0}, "did you mean 'teacher.temperature'"),
        ({"teacher": {"run": "nowhere"}}, "teacher.run names 'nowhere', which is not a finished run"),
        ({"teacher": {"file": "nowhere"}}, "teacher.file names 'nowhere', which cannot be read: No such file"),
        ({"teacher": {"run": "a", "file": "b"}}, r"give teacher.run \('a'\) or teacher.file \('b'\)"),
        ({"teacher": {"weight": 0.0}}, r"teacher.weight is a share of the loss in \(0, 1\], got 0.0"),
        ({"teacher": {"temperature": 0.0}}, "teacher.temperature must be above 0, got 0.0"),
    ],
)
def test_mistakes_are_refused(change, says):
    with pytest.raises(PomonaError, match=says):
        Recipe.load({**BASE, **change})


@pytest.mark.parametrize(
    ("given", "overrides"),
    [
        ({"method": "dpf(0.5, pattern='2:4', every=4)"}, []),
        ({"method": {"name": "dpf", "sparsity": 0.5, "pattern": "nm(2, 4)", "every": 4}}, []),
        ({"method": "dpf(0.5)"}, ["method.every=4", "method.pattern=2:4"]),
        ({}, ["method=dpf(0.5, every=4)", "method.pattern=nm(2,4)"]),
    ],
)
def test_text_without_names_has_the_fingerprint_of_the_full_recipe(given, overrides):
    pattern = {"name": "nm", "n": 2, "m": 4}
    full = Recipe.load({**BASE, "method": {"name": "dpf", "sparsity": 0.5, "pattern": pattern, "every": 4}})
    short = Recipe.load({**BASE, **given}, overrides)
    assert short.method == full.method
    assert short.fingerprint() == full.fingerprint()


@pytest.mark.parametrize("section", ["data", "model"])
def test_data_and_model_are_needed(section):
    with pytest.raises(PomonaError, match=f"a recipe needs a {section}"):
        Recipe.load({key: value for key, value in BASE.items() if key != section})


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.epochs", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("train..epochs=3", "is not of the form key=value"),
        ("seed.x=3", "'seed.x' cannot be set: seed is 5, which has no options"),
        ("train.epochs=3x", "train.epochs takes int, got '3x'"),
        ("trian.epochs=3", "did you mean 'train'"),
    ],
)
def test_bad_overrides_are_refused(override, says):
    with pytest.raises(PomonaError, match=says):
        Recipe.load({**BASE, "seed": 5}, [override])


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(PomonaError, match="cannot be read: No such file"):
        Recipe.load(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("seed = = 3")
    with pytest.raises(PomonaError, match=r"bad.toml' is not valid TOML: .*line 1"):
        Recipe.load(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(PomonaError, match="is not valid TOML"):
        Recipe.load(bad)


class Ops(TorchDispatchMode):
    """Remembers what torch computes."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", models.names())
def test_validating_a_model_initializes_no_weights(name):
    """That takes seconds in a table of hundreds, most of them to load torch's compiler."""
    with Ops() as ops:
        sections.validate_model.__wrapped__(name, "{}")
    assert "empty" in ops.seen
    assert not {op for op in ops.seen if op in ("normal_", "uniform_", "bernoulli_", "random_")}
