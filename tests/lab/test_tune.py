"""Tuning: a linear grid, widened while the best lies at its end, judged on a validation part and never on test."""

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


class Curve:
    """Stands in for `sweep.run`: what a run reaches is a function of its recipe, on test the opposite."""

    def __init__(self, reach, fail=lambda recipe: False):
        self.reach, self.fail, self.seen = reach, fail, []

    def __call__(self, cells, **how):
        for index, cell in enumerate(cells):
            self.seen.append(cell.recipe)
            if self.fail(cell.recipe):
                yield index, {"error": "the loss is nan"}
            else:
                value = self.reach(cell.recipe)
                yield index, {"valid_accuracy": value, "accuracy": -value}


def search(monkeypatch, tmp_path, curve, key="lr", grid=None, **options):
    monkeypatch.setattr(sweep, "train_runs", curve)
    return grid_search.tune(BASE, key, grid, tmp_path, **options)


def peak(at):
    return lambda recipe: -abs(recipe.optimizer.lr - at)


def test_the_grid_of_the_authors():
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
def test_the_grid_is_widened_while_the_best_lies_at_its_end(monkeypatch, tmp_path, at, best, tried):
    result = search(monkeypatch, tmp_path, Curve(peak(at)))
    assert result["key"] == "optimizer.lr"
    assert result["best"] == best
    assert result["inside"]
    assert [point["value"] for point in result["points"]] == tried
    assert max(result["points"], key=lambda point: point["mean"])["value"] == best


@settings(max_examples=20, deadline=None)
@given(at=st.floats(0.003, 0.7), low=st.floats(0.01, 0.1), step=st.floats(0.02, 0.1), count=st.integers(2, 5))
def test_the_best_ends_up_inside(at, low, step, count):
    with pytest.MonkeyPatch.context() as patch:
        grid = [low + k * step for k in range(count)]
        result = search(patch, "nowhere", Curve(peak(at)), grid=grid)
    values = [point["value"] for point in result["points"]]
    assert min(values) > 0
    assert set(grid) <= set(values)
    assert result["inside"] or len(values) > count + grid_search.MAX_EXTENSIONS - 1
    assert abs(result["best"] - at) == min(abs(value - at) for value in values)


def test_what_always_rises_is_given_up(monkeypatch, tmp_path):
    result = search(monkeypatch, tmp_path, Curve(lambda recipe: recipe.optimizer.lr))
    assert not result["inside"]
    assert len(result["points"]) == 4 + grid_search.MAX_EXTENSIONS


def test_of_equals_one_inside_is_taken(monkeypatch, tmp_path):
    result = search(monkeypatch, tmp_path, Curve(lambda recipe: 90.0))
    assert (result["best"], len(result["points"])) == (0.1, 4)


def test_a_validation_part_judges(monkeypatch, tmp_path):
    curve = Curve(peak(0.11))
    search(monkeypatch, tmp_path, curve)
    assert {recipe.data.validation for recipe in curve.seen} == {0.1}
    own = Curve(peak(0.11))
    search(monkeypatch, tmp_path, own, overrides=["data.validation=300"])
    assert {recipe.data.validation for recipe in own.seen} == {300}
    assert curve.seen[0].differences(Recipe.load(BASE, ["data.validation=0.1", "optimizer.lr=0.05"])) == []


def test_the_mean_over_seeds_decides(monkeypatch, tmp_path):
    def reach(recipe):
        lucky = recipe.seed == 0 and recipe.optimizer.lr == 0.15
        return 99.0 if lucky else 90.0 - 100 * abs(recipe.optimizer.lr - 0.1)

    result = search(monkeypatch, tmp_path, Curve(reach), seeds=[0, 1, 2])
    point = next(p for p in result["points"] if p["value"] == 0.15)
    assert (point["mean"], point["runs"]) == (pytest.approx((99 + 85 + 85) / 3), 3)
    assert result["best"] == 0.1


def test_a_run_that_fails_is_the_worst(monkeypatch, tmp_path):
    rising = Curve(lambda recipe: recipe.optimizer.lr, fail=lambda recipe: recipe.optimizer.lr > 0.12)
    result = search(monkeypatch, tmp_path, rising)
    assert (result["best"], result["inside"]) == (0.1, True)
    assert [point["error"] for point in result["points"]] == [None, None, "the loss is nan", "the loss is nan"]
    with pytest.raises(PomonaError, match="every run failed, at all values of optimizer.lr: the loss is nan"):
        search(monkeypatch, tmp_path, Curve(lambda recipe: 0.0, fail=lambda recipe: True))


def test_of_perplexities_the_lowest_is_best(monkeypatch, tmp_path):
    class Text(Curve):
        def __call__(self, cells, **how):
            for index, found in super().__call__(cells, **how):
                yield index, {"valid_perplexity": -found["valid_accuracy"], "perplexity": found["valid_accuracy"]}

    result = search(monkeypatch, tmp_path, Text(peak(0.16)))
    assert (result["best"], result["points"][0]["measure"]) == (0.15, "valid_perplexity")


def test_what_is_told_on_the_way_counts_all_runs(monkeypatch, tmp_path):
    told: list[tuple] = []
    search(monkeypatch, tmp_path, Curve(peak(0.21)), seeds=[0, 1], on_result=lambda *t: told.append(t[:2]))
    assert told == [*((k, 8) for k in range(1, 9)), (9, 10), (10, 10)]


def test_a_recipe_with_axes_is_tuned_without_them(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "train_runs", Curve(peak(0.11)))
    result = grid_search.tune(BASE | {"sweep": {"seed": [0, 1]}}, "lr", None, tmp_path)
    assert (result["best"], result["seeds"]) == (0.1, [0])


def test_nothing_is_tried_below_the_least_whole_number(monkeypatch, tmp_path):
    """0 batches would be another thing: no re-estimation at all."""
    curve = Curve(lambda recipe: -recipe.train.reestimate)
    result = search(monkeypatch, tmp_path, curve, "reestimate", [2, 3])
    assert ([point["value"] for point in result["points"]], result["inside"]) == ([1, 2, 3], False)


def test_any_number_can_be_tuned(monkeypatch, tmp_path):
    every = search(monkeypatch, tmp_path, Curve(lambda r: -abs(r.method["every"] - 2)), "every", [4, 8])
    assert (every["key"], every["best"]) == ("method.every", 2)
    assert [point["value"] for point in every["points"]] == [1, 2, 4, 8]
    # The mask cannot be at rest for the whole of training: what a setting refuses is its end.
    settle = search(monkeypatch, tmp_path, Curve(lambda r: r.method["settle"]), "method.settle", [0.05, 0.15])
    assert (settle["best"], settle["inside"]) == (0.25, False)
    tuned = ["finetune.epochs=1"]
    rate = Curve(lambda r: -abs(r.finetune.optimizer.lr - 0.02))
    found = search(monkeypatch, tmp_path, rate, "finetune.optimizer.lr", [0.01, 0.02, 0.03], overrides=tuned)
    assert (found["best"], {recipe.optimizer.lr for recipe in rate.seen}) == (0.02, {0.2})


@pytest.mark.parametrize(
    ("key", "grid", "says"),
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
def test_what_cannot_be_tuned(tmp_path, key, grid, says):
    with pytest.raises(PomonaError, match=says):
        grid_search.resolve_search(BASE, key, grid)
    with pytest.raises(PomonaError, match=says):
        grid_search.tune(BASE, key, grid, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_search_goes_on_from_what_is_there(tmp_path):
    torch.set_num_threads(1)
    told: list[tuple] = []
    first = grid_search.tune(BASE, "lr", [0.1, 0.2, 0.3], tmp_path, jobs=1, on_result=lambda *t: told.append(t))
    assert len(told) == len(first["points"])
    again = grid_search.tune(BASE, "lr", [0.1, 0.2, 0.3], tmp_path, jobs=1, on_result=lambda *t: told.append(t))
    assert again == first
    assert len(told) == len(first["points"])
    assert first["points"][0]["measure"] == "valid_accuracy"
