"""Grid search for one numeric setting, as the authors of DPF tuned their learning rates (Lin et al., 2020, A.2).

A linear grid is evaluated, and extended by its own step while the best value lies at one of its ends. Values are
compared on a validation part of the training data after the last epoch; the test data is not used.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError, require, unknown_name_error

from ..recipes.overrides import read_recipe, set_setting
from ..recipes.recipe import Recipe
from ..runs.interruption import Interrupted
from . import sweep
from .axes import SweepRun, run_folder, run_label

VALIDATION_SHARE = 0.1  # of the training data, where the recipe has no validation part: 5,000 of CIFAR's 50,000
MAX_EXTENSIONS = 12  # values beyond the initial grid, after which the search ends
INITIAL_STEPS = 4  # values of the default grid

SearchPoint = dict[str, Any]  # what the runs of one value reached


def tune(
    source: str | Path | Mapping[str, Any],
    key: str,
    grid: Sequence[float] | None = None,
    out: str | Path = "runs/tune",
    *,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    on_result: sweep.ResultCallback | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Find the best value of a setting, such as "lr" or "finetune.optimizer.lr", and return it with all points.

    The default grid has four equal steps up to the recipe's own value. Every point is one run in `out` for each of
    `seeds`; runs that are complete there are not trained again. The other options are those of `sweep.train_runs`.

    Raises:
        SweepInterrupted: on Ctrl-C, once the runs under way have written a checkpoint.
    """
    out, settings = Path(out), read_settings(source, overrides)
    key, values = resolve_search(settings, key, grid)
    seeds = [Recipe.load(settings).seed] if seeds is None else list(seeds)
    points: dict[float, SearchPoint] = {}
    initial = len(values)
    try:
        while remaining := [value for value in values if value not in points]:
            points |= evaluate_values(settings, key, remaining, seeds, out, len(points), on_result, options)
            values = sorted([*values, *next_values(values, points, settings, key)])
            if len(values) > initial + MAX_EXTENSIONS:
                break
    except (Interrupted, KeyboardInterrupt) as stopped:
        raise sweep.SweepInterrupted(out, len(points), len(values)) from stopped
    ordered = [points[value] for value in sorted(points)]
    best = best_value(points)
    require(points[best]["mean"] is not None, f"every run failed, at all values of {key}: {ordered[0]['error']}")
    inside = min(points) < best < max(points)
    return {"key": key, "best": best, "inside": inside, "seeds": seeds, "points": ordered, "out": str(out)}


def best_value(points: Mapping[float, SearchPoint]) -> float:
    """Return the value with the best score; of several a value inside the grid, and of those the smallest."""
    inside = sorted(points)[1:-1]
    return max(sorted(points), key=lambda value: (score_point(points[value]), value in inside))


def resolve_search(
    source: str | Path | Mapping[str, Any],
    key: str,
    grid: Sequence[float] | None = None,
    overrides: Sequence[str] = (),
) -> tuple[str, list[float]]:
    """Return the full key of a setting and the initial grid, all of whose values make valid recipes."""
    settings = read_settings(source, overrides)
    key = find_key(settings, key)
    require(
        key != "data.validation",
        "data.validation cannot be tuned, since values are compared on that part: choose another setting.",
    )
    values = validate_grid(key, grid if grid is not None else default_grid(number_in_recipe(settings, key)))
    require(
        len({point_recipe(settings, key, value).fingerprint() for value in values}) == len(values),
        f"{key} has no effect in this recipe: "
        + ("set finetune.epochs." if key.startswith("finetune.") else "choose another setting."),
    )
    return key, values


def read_settings(source: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a recipe, with a validation part."""
    settings = read_recipe(source, overrides)
    if not Recipe.load(settings).data.validation:
        set_setting(settings, "data.validation", VALIDATION_SHARE)
    return settings


def find_key(settings: Mapping[str, Any], key: str) -> str:
    """Return the dotted key of a setting; a bare name is looked up in the sections of the recipe."""
    options = Recipe.load(settings).to_dict()
    sections = ("optimizer", "method", "train", "rate", "model", "data")
    if "." in key:
        return key
    for section in sections:
        if key in options[section]:
            return f"{section}.{key}"
    raise unknown_name_error("setting", key, [option for section in sections for option in options[section]])


def number_in_recipe(settings: Mapping[str, Any], key: str) -> Any:
    """Return the value of a setting in the recipe; raise PomonaError unless it is a positive number."""
    value: Any = Recipe.load(settings).to_dict()
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise unknown_name_error("setting", key, value if isinstance(value, Mapping) else [])
        value = value[part]
    require(
        is_number(value) and value > 0, f"{key} is {value!r} in the recipe: give a grid, as in --tune {key}=0.1,0.2."
    )
    return value


def default_grid(value: float) -> list[float]:
    """Return four equal steps up to a value: 0.05, 0.1, 0.15, 0.2; integers for an integer."""
    steps = range(1, INITIAL_STEPS + 1)
    if isinstance(value, int):
        return sorted({max(1, round(value * k / INITIAL_STEPS)) for k in steps} | {max(2, value)})
    return [float(f"{value * k / INITIAL_STEPS:.6g}") for k in steps]


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def validate_grid(key: str, values: Sequence[Any]) -> list[float]:
    """Return the values of a grid in order; raise PomonaError unless there are two different numbers or more."""
    require(
        all(map(is_number, values)) and len(set(values)) >= 2,
        f"a grid of {key} takes two numbers or more, got {', '.join(map(str, values))}.",
    )
    return sorted(set(values))


def next_values(
    values: Sequence[float], points: Mapping[float, SearchPoint], settings: Mapping[str, Any], key: str
) -> list[float]:
    """Return the next value beyond the end at which the best lies; none where it lies inside or no value follows."""
    best = best_value(points)
    if best == values[-1]:
        beyond = values[-1] + (values[-1] - values[-2])
    elif best == values[0]:
        beyond = values[0] - (values[1] - values[0])
        beyond = beyond if beyond > 0 else values[0] / 2
    else:
        return []
    beyond = int(beyond) if all(isinstance(value, int) for value in values) else float(f"{beyond:.6g}")
    try:
        point_recipe(settings, key, beyond)
    except PomonaError:  # outside the range of the setting
        return []
    return [beyond] if beyond > 0 else []


def score_point(point: SearchPoint) -> float:
    """Return a score of a point, higher is better; a point with a failed run has the lowest."""
    if point["mean"] is None:
        return float("-inf")
    return float(-point["mean"] if point["measure"] == "valid_perplexity" else point["mean"])


def point_recipe(settings: Mapping[str, Any], key: str, value: float, seed: int = 0) -> Recipe:
    """Return the recipe of one value and seed."""
    changed = read_recipe(settings)
    set_setting(changed, key, value)
    recipe = Recipe.load({**changed, "seed": seed})
    return dataclasses.replace(recipe, name=run_label({key: value, "seed": seed}))


def evaluate_values(
    settings: Mapping[str, Any],
    key: str,
    values: Sequence[float],
    seeds: Sequence[int],
    out: Path,
    evaluated: int,
    on_result: sweep.ResultCallback | None,
    options: Mapping[str, Any],
) -> dict[float, SearchPoint]:
    """Train the missing runs of some values and return the points by value; `evaluated` values came before."""
    recipes = {(value, seed): point_recipe(settings, key, value, seed) for value in values for seed in seeds}
    runs = [SweepRun(recipe, run_folder(out, recipe), {}) for recipe in recipes.values()]
    results = {i: summary for i, run in enumerate(runs) if (summary := run.load_summary()) is not None}
    remaining = [i for i in range(len(runs)) if i not in results]
    before = evaluated * len(seeds)
    with closing(sweep.train_runs([runs[i] for i in remaining], **options)) as coming:
        for k, result in coming:
            results[remaining[k]] = result
            if on_result is not None:
                on_result(before + len(results), before + len(runs), runs[remaining[k]], result)
    reached = dict(zip(recipes, (results[i] for i in range(len(runs))), strict=True))
    return {value: make_point(value, [reached[value, seed] for seed in seeds]) for value in values}


def make_point(value: float, results: Sequence[Mapping[str, Any]]) -> SearchPoint:
    """Return the mean over seeds of what the runs of one value reached on the validation part."""
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        return {"value": value, "measure": None, "mean": None, "std": None, "runs": 0, "error": errors[0]}
    measure = "valid_accuracy" if "valid_accuracy" in results[0] else "valid_perplexity"
    reached = [result[measure] for result in results]
    return {
        "value": value,
        "measure": measure,
        "mean": statistics.mean(reached),
        "std": statistics.stdev(reached) if len(reached) > 1 else None,
        "runs": len(reached),
        "error": None,
    }
