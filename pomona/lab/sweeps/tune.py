"""Choose a number, as the authors of DPF chose their learning rates (appendix A.2).

A linear grid is evaluated, and widened by its own step while the best lies at one of its ends. What is best is
told by a validation part of the training data after the last epoch; the test data is not looked at.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError, require, unknown_name_error

from ..recipes.recipe import Recipe, put, read
from ..runs.run import Interrupted
from . import sweep

SHARE = 0.1  # of the training data, for validation, where the recipe holds out none: 5,000 of CIFAR's 50,000
LIMIT = 12  # points beyond the grid, after which the search is given up

Point = dict[str, Any]


def tune(
    source: str | Path | Mapping[str, Any],
    key: str,
    grid: Sequence[float] | None = None,
    out: str | Path = "runs/tune",
    *,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    report: sweep.Report | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Find the best value of a setting, such as "lr" or "finetune.optimizer.lr".

    Without a grid it is four equal steps up to the recipe's own value. Every point is a run (one for each of
    `seeds`) in `out`, so that what is there already is not trained again. The rest is as in `sweep.run`.
    """
    out, given = Path(out), prepared(source, overrides)
    key, values = plan(given, key, grid)
    seeds = [Recipe.load(given).seed] if seeds is None else list(seeds)
    points: dict[float, Point] = {}
    first = len(values)
    try:
        while todo := [value for value in values if value not in points]:
            points |= evaluate(given, key, todo, seeds, out, len(points), report, how)
            values = sorted([*values, *wider(values, points, given, key)])
            if len(values) > first + LIMIT:
                break
    except (Interrupted, KeyboardInterrupt) as stopped:
        raise sweep.Stopped(out, len(points), len(values)) from stopped
    told = [points[value] for value in sorted(points)]
    best = choose(points)
    require(points[best]["mean"] is not None, f"no run came to an end at any {key}: {told[0]['error']}")
    inside = min(points) < best < max(points)
    return {"key": key, "best": best, "inside": inside, "seeds": seeds, "points": told, "out": str(out)}


def choose(points: Mapping[float, Point]) -> float:
    """The value that is best; of several one inside the grid, and of those the least."""
    inside = sorted(points)[1:-1]
    return max(sorted(points), key=lambda value: (score(points[value]), value in inside))


def plan(
    source: str | Path | Mapping[str, Any],
    key: str,
    grid: Sequence[float] | None = None,
    overrides: Sequence[str] = (),
) -> tuple[str, list[float]]:
    """The setting by its whole name, and the grid with which its search begins; all of it can be trained."""
    given = prepared(source, overrides)
    key = setting(given, key)
    require(key != "data.validation", "data.validation is what judges, so it cannot be tuned: choose another setting.")
    values = check(key, grid if grid is not None else steps(value_of(given, key)))
    require(
        len({recipe(given, key, value).fingerprint() for value in values}) == len(values),
        f"{key} decides nothing in this recipe: "
        + ("set finetune.epochs." if key.startswith("finetune.") else "choose another setting."),
    )
    return key, values


def prepared(source: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The recipe, with a validation part."""
    given = read(source, overrides)
    if not Recipe.load(given).data.validation:
        put(given, "data.validation", SHARE)
    return given


def setting(given: Mapping[str, Any], key: str) -> str:
    """A setting by its dotted key; a bare name is looked for in the recipe's sections."""
    options = Recipe.load(given).to_dict()
    sections = ("optimizer", "method", "train", "rate", "model", "data")
    if "." in key:
        return key
    for section in sections:
        if key in options[section]:
            return f"{section}.{key}"
    raise unknown_name_error("setting", key, [option for section in sections for option in options[section]])


def value_of(given: Mapping[str, Any], key: str) -> Any:
    """What the recipe has for a setting."""
    value: Any = Recipe.load(given).to_dict()
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise unknown_name_error("setting", key, value if isinstance(value, Mapping) else [])
        value = value[part]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(number and value > 0, f"{key} is {value!r} in the recipe: give a grid, as in --tune {key}=0.1,0.2.")
    return value


def steps(value: float) -> list[float]:
    """Four equal steps up to a value: 0.05, 0.1, 0.15, 0.2."""
    if isinstance(value, int):
        return sorted({max(1, round(value * k / 4)) for k in (1, 2, 3, 4)} | {max(2, value)})
    return [float(f"{value * k / 4:.6g}") for k in (1, 2, 3, 4)]


def check(key: str, values: Sequence[Any]) -> list[float]:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    require(
        numbers and len(set(values)) >= 2,
        f"a grid of {key} takes two numbers or more, got {', '.join(map(str, values))}.",
    )
    return sorted(set(values))


def wider(values: Sequence[float], points: Mapping[float, Point], given: Mapping[str, Any], key: str) -> list[float]:
    """The next point beyond the end at which the best lies; none where it lies inside, or nothing lies beyond."""
    best = choose(points)
    if best == values[-1]:
        beyond = values[-1] + (values[-1] - values[-2])
    elif best == values[0]:
        beyond = values[0] - (values[1] - values[0])
        beyond = beyond if beyond > 0 else values[0] / 2
    else:
        return []
    beyond = int(beyond) if all(isinstance(value, int) for value in values) else float(f"{beyond:.6g}")
    try:
        recipe(given, key, beyond)
    except PomonaError:  # the end of what the setting can be
        return []
    return [beyond] if beyond > 0 else []


def score(point: Point) -> float:
    """The higher the better; a run that failed is the worst."""
    if point["mean"] is None:
        return float("-inf")
    return float(-point["mean"] if point["measure"] == "valid_perplexity" else point["mean"])


def recipe(given: Mapping[str, Any], key: str, value: float, seed: int = 0) -> Recipe:
    """The run at one point of the grid."""
    settings = read(given)
    put(settings, key, value)
    made = Recipe.load({**settings, "seed": seed})
    return dataclasses.replace(made, name=sweep.label({key: value, "seed": seed}))


def evaluate(
    given: Mapping[str, Any],
    key: str,
    values: Sequence[float],
    seeds: Sequence[int],
    out: Path,
    known: int,
    report: sweep.Report | None,
    how: Mapping[str, Any],
) -> dict[float, Point]:
    """The points of the grid, by their values."""
    made = {(value, seed): recipe(given, key, value, seed) for value in values for seed in seeds}
    cells = [sweep.Cell(one, out / f"{one.name}-{one.fingerprint()}", {}) for one in made.values()]
    outcomes = {i: summary for i, cell in enumerate(cells) if (summary := cell.summary()) is not None}
    todo = [i for i in range(len(cells)) if i not in outcomes]
    with closing(sweep.run([cells[i] for i in todo], **how)) as coming:
        for k, outcome in coming:
            outcomes[todo[k]] = outcome
            if report is not None:
                report(known * len(seeds) + len(outcomes), known * len(seeds) + len(cells), cells[todo[k]], outcome)
    reached = dict(zip(made, (outcomes[i] for i in range(len(cells))), strict=True))
    return {value: point(value, [reached[value, seed] for seed in seeds]) for value in values}


def point(value: float, outcomes: Sequence[Mapping[str, Any]]) -> Point:
    """What the runs of one value reached on the validation part."""
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if errors:
        return {"value": value, "measure": None, "mean": None, "std": None, "runs": 0, "error": errors[0]}
    measure = "valid_accuracy" if "valid_accuracy" in outcomes[0] else "valid_perplexity"
    reached = [outcome[measure] for outcome in outcomes]
    std = statistics.stdev(reached) if len(reached) > 1 else None
    told = {"value": value, "measure": measure, "mean": statistics.mean(reached), "std": std, "runs": len(reached)}
    return {**told, "error": None}
