"""Grid search: a linear grid, extended while the best value is at its end, compared on the validation part only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pomona.errors import PomonaError
from pomona.lab.recipes.recipe import Recipe
from pomona.lab.sweeps import grid_search, sweep

BASE = {
    "name": "small",
    "data": "digits",
    "model": "mlp(hidden=[8])",
    "method": "dpf(sparsity=0.5, every=4)",
    "optimizer": {"lr": 0.2},
    "train": {"epochs": 1, "batch_size": 450, "device": "cpu"},
}


class FakeTraining:
    """A replacement of `sweep.train_runs`: `reach` gives the validation accuracy, and minus it is the test accuracy."""

    def __init__(self, reach, fail=lambda recipe: False):
        self.reach, self.fail, self.seen = reach, fail, []

    def __call__(self, runs, **options):
        for index, run in enumerate(runs):
            self.seen.append(run.recipe)
            if self.fail(run.recipe):
                yield index, {"error": "the loss is nan"}
            else:
                value = self.reach(run.recipe)
                yield index, {"valid_accuracy": value, "accuracy": -value}


def search(monkeypatch, tmp_path, training, key="lr", grid=None, **options):
    """Return the result of a grid search with replaced training."""
    monkeypatch.setattr(sweep, "train_runs", training)
    return grid_search.tune(BASE, key, grid, tmp_path, **options)


def peak(at):
    """Return an accuracy that is highest at one learning rate."""
    return lambda recipe: -abs(recipe.optimizer.lr - at)


def test_the_default_grid():
    assert grid_search.resolve_search(BASE, "lr") == ("optimizer.lr", [0.05, 0.1, 0.15, 0.2])
    assert grid_search.default_grid(16) == [4, 8, 12, 16]
    assert grid_search.default_grid(1) == [1, 2]


@pytest.mark.parametrize(
    ("at", "best", "tried"),
    [
        (0.11, 0.1, [0.05, 0.1, 0.15, 0.2]),
        (0.26, 0.25, [0.05, 0.1, 0.15, 0.2, 0.25, 0.3]),
        (0.04, 0.05, [0.025, 0.05, 0.1, 0.15, 0.2]),  # 0.05 − 0.05 would be none: halved
        (0.011, 0.0125, [0.00625, 0.0125, 0.025, 0.05, 0.1, 0.15, 0.2]),
    ],
)
def test_the_grid_is_extended_while_the_best_value_is_at_its_end(monkeypatch, tmp_path, at, best, tried):
    result = search(monkeypatch, tmp_path, FakeTraining(peak(at)))
    assert result["key"] == "optimizer.lr"
    assert result["best"] == best
    assert result["inside"]
    assert [point["value"] for point in result["points"]] == tried
    assert max(result["points"], key=lambda point: point["mean"])["value"] == best


@settings(max_examples=20, deadline=None)
@given(at=st.floats(0.003, 0.7), low=st.floats(0.01, 0.1), step=st.floats(0.02, 0.1), count=st.integers(2, 5))
def test_the_best_value_ends_inside_the_grid(at, low, step, count):
    with pytest.MonkeyPatch.context() as patch:
        grid = [low + k * step for k in range(count)]
        result = search(patch, "nowhere", FakeTraining(peak(at)), grid=grid)
    values = [point["value"] for point in result["points"]]
    assert min(values) > 0
    assert set(grid) <= set(values)
    assert result["inside"] or len(values) > count + grid_search.MAX_EXTENSIONS - 1
    assert abs(result["best"] - at) == min(abs(value - at) for value in values)


def test_the_search_ends_where_the_score_always_rises(monkeypatch, tmp_path):
    result = search(monkeypatch, tmp_path, FakeTraining(lambda recipe: recipe.optimizer.lr))
    assert not result["inside"]
    assert len(result["points"]) == 4 + grid_search.MAX_EXTENSIONS


def test_a_value_inside_the_grid_wins_a_tie(monkeypatch, tmp_path):
    result = search(monkeypatch, tmp_path, FakeTraining(lambda recipe: 90.0))
    assert (result["best"], len(result["points"])) == (0.1, 4)


def test_values_are_compared_on_the_validation_part(monkeypatch, tmp_path):
    training = FakeTraining(peak(0.11))
    search(monkeypatch, tmp_path, training)
    assert {recipe.data.validation for recipe in training.seen} == {0.1}
    own = FakeTraining(peak(0.11))
    search(monkeypatch, tmp_path, own, overrides=["data.validation=300"])
    assert {recipe.data.validation for recipe in own.seen} == {300}
    assert training.seen[0].differences(Recipe.load(BASE, ["data.validation=0.1", "optimizer.lr=0.05"])) == []


def test_the_mean_over_seeds_decides(monkeypatch, tmp_path):
    def reach(recipe):
        lucky = recipe.seed == 0 and recipe.optimizer.lr == 0.15
        return 99.0 if lucky else 90.0 - 100 * abs(recipe.optimizer.lr - 0.1)

    result = search(monkeypatch, tmp_path, FakeTraining(reach), seeds=[0, 1, 2])
    point = next(p for p in result["points"] if p["value"] == 0.15)
    assert (point["mean"], point["runs"]) == (pytest.approx((99 + 85 + 85) / 3), 3)
    assert result["best"] == 0.1


def test_a_value_with_a_failed_run_is_the_worst(monkeypatch, tmp_path):
    rising = FakeTraining(lambda recipe: recipe.optimizer.lr, fail=lambda recipe: recipe.optimizer.lr > 0.12)
    result = search(monkeypatch, tmp_path, rising)
    assert (result["best"], result["inside"]) == (0.1, True)
    assert [point["error"] for point in result["points"]] == [None, None, "the loss is nan", "the loss is nan"]
    with pytest.raises(PomonaError, match="every run failed, at all values of optimizer.lr: the loss is nan"):
        search(monkeypatch, tmp_path, FakeTraining(lambda recipe: 0.0, fail=lambda recipe: True))


def test_the_lowest_validation_perplexity_is_best(monkeypatch, tmp_path):
    class Text(FakeTraining):
        def __call__(self, runs, **options):
            for index, found in super().__call__(runs, **options):
                yield index, {"valid_perplexity": -found["valid_accuracy"], "perplexity": found["valid_accuracy"]}

    result = search(monkeypatch, tmp_path, Text(peak(0.16)))
    assert (result["best"], result["points"][0]["measure"]) == (0.15, "valid_perplexity")


def test_callbacks_count_all_runs(monkeypatch, tmp_path):
    calls: list[tuple] = []
    search(monkeypatch, tmp_path, FakeTraining(peak(0.21)), seeds=[0, 1], on_result=lambda *t: calls.append(t[:2]))
    assert calls == [*((k, 8) for k in range(1, 9)), (9, 10), (10, 10)]


def test_axes_of_the_recipe_are_ignored(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "train_runs", FakeTraining(peak(0.11)))
    result = grid_search.tune(BASE | {"sweep": {"seed": [0, 1]}}, "lr", None, tmp_path)
    assert (result["best"], result["seeds"]) == (0.1, [0])


def test_whole_numbers_below_one_are_not_tried(monkeypatch, tmp_path):
    """With 0 batches statistics would not be re-estimated, which is a different setting."""
    training = FakeTraining(lambda recipe: -recipe.train.reestimate)
    result = search(monkeypatch, tmp_path, training, "reestimate", [2, 3])
    assert ([point["value"] for point in result["points"]], result["inside"]) == ([1, 2, 3], False)


def test_any_number_can_be_tuned(monkeypatch, tmp_path):
    every = search(monkeypatch, tmp_path, FakeTraining(lambda r: -abs(r.method["every"] - 2)), "every", [4, 8])
    assert (every["key"], every["best"]) == ("method.every", 2)
    assert [point["value"] for point in every["points"]] == [1, 2, 4, 8]
    # The mask cannot be fixed for the whole training: the search ends where the recipe refuses a value.
    settle = search(monkeypatch, tmp_path, FakeTraining(lambda r: r.method["settle"]), "method.settle", [0.05, 0.15])
    assert (settle["best"], settle["inside"]) == (0.25, False)
    tuned = ["finetune.epochs=1"]
    rate = FakeTraining(lambda r: -abs(r.finetune.optimizer.lr - 0.02))
    found = search(monkeypatch, tmp_path, rate, "finetune.optimizer.lr", [0.01, 0.02, 0.03], overrides=tuned)
    assert (found["best"], {recipe.optimizer.lr for recipe in rate.seen}) == (0.02, {0.2})


@pytest.mark.parametrize(
    ("key", "grid", "message"),
    [
        ("lrr", None, "unknown setting 'lrr': did you mean 'lr'"),
        ("optimizer.lrr", [0.1, 0.2], "did you mean 'lr'"),
        ("precision", None, "train.precision is 'float32' in the recipe: give a grid"),
        ("clip", None, "train.clip is 0.0 in the recipe: give a grid, as in --tune train.clip=0.1,0.2"),
        ("lr", [0.1], "a grid of optimizer.lr takes two numbers or more, got 0.1"),
        ("lr", ["a", "b"], "a grid of optimizer.lr takes two numbers or more, got a, b"),
        ("finetune.optimizer.lr", [0.1, 0.2], "finetune.optimizer.lr has no effect in this recipe: set finetune"),
        ("lr", [0, 0.1], "lr must be above 0 and finite, got 0"),
        ("lr", [0.1, float("nan")], "lr must be above 0 and finite, got nan"),
        ("data.validation", [0.1, 0.2], "data.validation cannot be tuned, since values are compared on that part"),
        ("seeds", [1, 2], "unknown setting 'seeds'"),
        ("log_every", [1, 2], "train.log_every has no effect in this recipe: choose another"),
    ],
)
def test_settings_that_cannot_be_tuned_are_refused(tmp_path, key, grid, message):
    with pytest.raises(PomonaError, match=message):
        grid_search.resolve_search(BASE, key, grid)
    with pytest.raises(PomonaError, match=message):
        grid_search.tune(BASE, key, grid, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_search_continues_from_existing_runs(tmp_path):
    torch.set_num_threads(1)
    calls: list[tuple] = []
    first = grid_search.tune(BASE, "lr", [0.1, 0.2, 0.3], tmp_path, jobs=1, on_result=lambda *t: calls.append(t))
    assert len(calls) == len(first["points"])
    again = grid_search.tune(BASE, "lr", [0.1, 0.2, 0.3], tmp_path, jobs=1, on_result=lambda *t: calls.append(t))
    assert again == first
    assert len(calls) == len(first["points"])
    assert first["points"][0]["measure"] == "valid_accuracy"
