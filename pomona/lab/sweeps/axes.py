"""The axes of a sweep, and the runs that they expand to.

An axis is a setting and the values that it takes, as in the [sweep] section of a recipe:

    [sweep]
    method = ["dense", "oneshot(at=0.5)", "dpf"]
    "method.sparsity" = [0.8, 0.9, 0.95]
    seed = [0, 1]

A sweep has one run for every combination of values. Along an axis `method`, a method takes over those options of the
recipe's own method that it has too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pomona.errors import PomonaError, require
from pomona.methods import METHODS
from pomona.registry import spec_options
from pomona.untrusted import reading

from ..recipes.options import DENSE
from ..recipes.overrides import parse_value, read_recipe, set_setting
from ..recipes.recipe import Recipe
from ..recipes.sections import parse_sections, validate_keys
from ..runs.folder import read_summary

MAX_RUNS = 100_000  # of a sweep
Axes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: a recipe and the folder in which it is trained."""

    recipe: Recipe
    folder: Path
    setting: dict[str, Any]  # values on the axes, besides method, sparsity and seed
    dropped: tuple[str, ...] = ()  # keys of options that its method does not have

    def state(self) -> str:
        """Return "complete", "begun" or "missing"."""
        if self.load_summary() is not None:
            return "complete"
        return "begun" if self.folder.is_dir() and any(self.folder.iterdir()) else "missing"

    def load_summary(self) -> dict[str, Any] | None:
        """Return the summary in the folder; None unless the run is complete and has these settings."""
        found = read_summary(self.folder)
        return found if found is not None and found["fingerprint"] == self.recipe.fingerprint() else None


def expand_runs(
    source: str | Path | Mapping[str, Any], axes: Axes, out: str | Path, overrides: Sequence[str] = ()
) -> list[SweepRun]:
    """Return every run of a sweep once, each with a valid recipe and the folder `out/NAME-FINGERPRINT`.

    `axes` replace the axes of the same name in the recipe's [sweep] section.
    """
    settings = read_recipe(source, overrides)
    section = settings.pop("sweep", {})
    require(isinstance(section, Mapping), f"[sweep] takes settings and lists of their values, got {section!r}.")
    axes = {**section, **axes}
    for key, values in axes.items():
        listed = isinstance(values, Sequence) and not isinstance(values, str)
        require(listed and len(values) > 0, f"the axis '{key}' takes a list of values, got {values!r}.")
    order = sorted(axes, key=lambda key: key.count("."))  # a method before its options
    count = math.prod(len(values) for values in axes.values())
    require(count <= MAX_RUNS, f"the axes have more than {MAX_RUNS:,} combinations: leave out some values.")
    combinations = itertools.product(*(axes[key] for key in order))
    parsed = parse_common_sections(settings, axes)
    runs = [make_run(settings, dict(zip(order, values, strict=True)), Path(out), parsed) for values in combinations]
    for key in order:
        require(
            not all(key in run.dropped for run in runs),
            f"none of the methods of this sweep has the option '{key.removeprefix('method.')}'.",
        )
    return list({run.folder: run for run in runs}.values())


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Return the key and values of an axis on the command line.

    Examples: "method.sparsity=0.8,0.9" and "method=dpf,oneshot(at=0.5)".
    """
    key, equals, values = text.partition("=")
    parts = split_at_commas(values)
    require(
        bool(equals and key.strip()) and all(part.strip() for part in parts),
        f"'{text}' is not of the form key=value,value,… (seed=0,1,2).",
    )
    return key.strip(), [parse_value(part.strip()) for part in parts]


def split_at_commas(text: str) -> list[str]:
    """Return the parts of a text between commas that are not inside brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not parts[-1][-1:].isalnum():  # not an apostrophe
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def parse_common_sections(settings: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
    """Return the sections of a recipe that no axis changes, parsed: all runs of a sweep have them in common."""
    changed = {key.partition(".")[0] for key in axes}
    with reading("the recipe"):
        validate_keys(settings)
        return parse_sections({key: value for key, value in settings.items() if key not in changed})


def make_run(
    settings: Mapping[str, Any],
    values: Mapping[str, Any],
    out: Path,
    parsed: Mapping[str, Any] = MappingProxyType({}),
) -> SweepRun:
    """Return the run of a recipe's settings with these values on the axes; `parsed` has the sections without any."""
    recipe = dict(settings)
    dropped: list[str] = []
    setting: dict[str, Any] = {}
    for key, value in values.items():
        if key == "method":
            recipe["method"], lost = replace_method(recipe.get("method", DENSE), value)
            dropped += lost
            options = {k: v for k, v in method_section(value).items() if k != "name"}
            setting |= {"options": options} if options else {}
        elif "method" in values and key.startswith("method.") and not has_option(recipe["method"], key.split(".")[1]):
            dropped.append(key)
        else:
            set_setting(recipe, key, value)
            if key not in ("seed", "method.sparsity"):
                setting[key] = value
    with reading("the recipe"):
        made = Recipe.parse(recipe, parsed)
    name = run_label({k: v for k, v in values.items() if k not in dropped}) or made.name
    named = dataclasses.replace(made, name=name)
    return SweepRun(named, run_folder(out, named), setting, tuple(dropped))


def run_folder(out: Path, recipe: Recipe) -> Path:
    """Return the folder of a recipe's run below `out`."""
    return out / f"{recipe.name}-{recipe.fingerprint()}"


def replace_method(old: Any, new: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the new method with the old method's options that it has too, and the keys of those it does not have."""
    options, new = method_section(old), method_section(new)
    options.pop("name", None)
    lost = [key for key in options if not has_option(new, key)]
    inherited = {key: value for key, value in options.items() if key not in lost}
    return {**inherited, **new}, [f"method.{key}" for key in lost]


def method_section(method: Any) -> dict[str, Any]:
    """Return a method, given as text or as a section of a recipe, as a section: its name and options."""
    if isinstance(method, Mapping):
        return dict(method)
    if not isinstance(method, str):
        raise PomonaError(f"an axis of methods takes names, such as 'dpf' or 'dpf(every=4)', got {method!r}.")
    return METHODS.parse(method)


def has_option(method: Mapping[str, Any], option: str) -> bool:
    """Return whether a method has an option; true for an unknown method, which the recipe refuses with a suggestion."""
    name = str(method.get("name"))
    if name == DENSE:
        return False
    return name not in METHODS or option in spec_options(METHODS[name])


def run_label(values: Mapping[str, Any]) -> str:
    """Return a name for values on the axes: "dpf-95-seed0", or "dpf-95-every4-seed0" for "dpf(every=4)"."""
    parts = []
    if "method" in values:
        method = method_section(values["method"])
        parts.append(str(method.pop("name", None)))
        values = {f"method.{key}": value for key, value in method.items()} | dict(values)
        del values["method"]
    for key, value in sorted(values.items(), key=lambda item: item[0] != "method.sparsity"):
        if key == "method.sparsity":
            parts.append(f"{100 * value:g}" if isinstance(value, (int, float)) else str(value))
        else:
            parts.append(f"{key.split('.')[-1]}{value}")
    return "-".join(re.sub(r"[^\w.]+", "_", part) for part in parts)
