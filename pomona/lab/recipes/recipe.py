"""Recipes: every setting that decides a run in one TOML file, with every default visible once it is resolved.

    name = "resnet20-dpf"
    data = "cifar10"
    model = "resnet20"
    method = "dpf(sparsity=0.9)"

    [optimizer]
    lr = 0.2

    [train]
    epochs = 300

    [finetune]
    epochs = 60

A named choice is written as a section or as text, `"name(option=value, …)"`. The section `[sweep]` is read by
`pomona sweep` and ignored everywhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pomona.errors import require
from pomona.methods import METHODS
from pomona.methods._periodic import LONGEST_INTERVAL, Periodic, default_interval
from pomona.registry import flatten_settings, resolve_type_hints, spec_options, spec_to_dict
from pomona.untrusted import reading

from .learning_rates import LearningRate, StepDecay
from .optimizers import SGD, OptimizerSpec
from .options import DENSE, DataOptions, FinetuneOptions, OriginOptions, TeacherOptions, TrainOptions
from .overrides import name_source, read_recipe
from .sections import parse_finetune, parse_sections, validate_keys
from .toml_writer import format_toml

# Settings that do not change the result of a run, and so are not part of its fingerprint: names, folders, and how
# the run is executed and observed.
SETTINGS_WITHOUT_EFFECT = {"name", "data.workers", "origin.run", "teacher.run", "teacher.file"} | {
    f"train.{key}"
    for key in (
        "device",
        "loop",
        "eval_every",
        "eval_batch_size",
        "checkpoint_every",
        "checkpoint_steps",
        "log_every",
    )
}

# Settings that only add figures to the result of a run. Earlier versions had them in the fingerprint, where they count
# with these values, their defaults. A run that was begun is only resumed with the same ones.
OBSERVING_SETTINGS = {"train.track": False}

# Options added after the first release, with the value at which they change nothing. They are left out of the
# fingerprint at that value, so that earlier runs keep theirs.
NEUTRAL_DEFAULTS = {
    "train.average": 0,
    "train.nonfinite": "stop",
    "train.ema": 0,
    "method.feedback": None,
    "model.block": "basic",
    "model.weight_standardization": False,
    "data.stream": None,
}

# How a recipe says that an option is off where its default is another value; in a resolved recipe the option is None.
OFF_VALUES = {"method.compressor": "none", "method.feedback": math.inf}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a run, validated and with every default filled in."""

    name: str = "run"
    seed: int = 0
    data: DataOptions
    model: dict[str, Any]
    origin: OriginOptions = OriginOptions()
    teacher: TeacherOptions = TeacherOptions()
    method: dict[str, Any] = field(default_factory=lambda: {"name": DENSE})
    optimizer: OptimizerSpec = SGD()
    rate: LearningRate = StepDecay()
    train: TrainOptions = TrainOptions()
    finetune: FinetuneOptions = FinetuneOptions()

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
        """Return the recipe in a TOML file or mapping, with overrides of the form "dotted.key=value" applied.

        The value of an override is a TOML value, or else a string without quotes. A file that sets no name is named
        after itself. Raises PomonaError for an unknown key, an option of the wrong type or a value out of range.
        """
        given = read_recipe(source, overrides)
        with reading(name_source(source)):
            return cls.parse(given)

    @classmethod
    def parse(cls, given: Mapping[str, Any], parsed: Mapping[str, Any] = MappingProxyType({})) -> Recipe:
        """Return the recipe of settings as written; those of its sections that are in `parsed` are taken from there."""
        validate_keys(given)
        for section in ("data", "model"):
            require(section in given, f'a recipe needs a {section}: {section} = "…".')
        written = {key: value for key, value in given.items() if key not in parsed}
        recipe = cls(**parsed, **parse_sections(written))
        method = recipe.method["name"]
        averaging = "average" if recipe.train.average else "ema" if recipe.train.ema else ""
        require(
            not averaging or method == DENSE or METHODS[method].weights != "score",
            f"train.{averaging} averages trained weights, and {method} selects among random ones: leave it out.",
        )
        second_stage = parse_finetune(given.get("finetune", {}), recipe.optimizer, recipe.rate, recipe.method)
        return dataclasses.replace(recipe, finetune=second_stage)

    @classmethod
    def load_stored(cls, source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
        """Return the resolved recipe of a run, from its folder or its record, with overrides as in `load`.

        A resolved recipe has a value for every option that had one. An option of the method that is not there was None,
        or did not exist: it is off, whatever its default is now.
        """
        given = read_recipe(source, overrides)
        method = given.get("method")
        if isinstance(method, Mapping) and method.get("name") in METHODS:
            spec = METHODS[str(method["name"])]
            hints = resolve_type_hints(spec)
            optional = [key for key in spec_options(spec) if type(None) in typing.get_args(hints[key])]
            given["method"] = {**dict.fromkeys(optional), **method}
        with reading(name_source(source)):
            return cls.parse(given)

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as nested plain values, every default included."""
        return {
            "name": self.name,
            "seed": self.seed,
            "data": self.data.to_dict(),
            "model": self.model,
            "origin": dict(vars(self.origin)),
            "teacher": dict(vars(self.teacher)),
            "method": self.method,
            "optimizer": spec_to_dict(self.optimizer),
            "rate": spec_to_dict(self.rate),
            "train": dict(vars(self.train)),
            "finetune": self.finetune.to_dict(),
        }

    def required_runs(self) -> list[Path]:
        """Return the folders of the finished runs whose weights the run reads."""
        return [Path(run) for run in (self.origin.run, self.teacher.run) if run is not None]

    def to_toml(self) -> str:
        """Return the recipe as TOML; an option without a value is written as a comment, or by how it is turned off."""
        off = {key: OFF_VALUES.get(f"method.{key}") for key, value in self.method.items() if value is None}
        return format_toml(self.to_dict() | {"method": self.method | off})

    def fingerprint(self) -> str:
        """Return a short hash of the settings that decide the result of the run."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        return hash_settings(self.settings() | OBSERVING_SETTINGS)

    def differences(self, other: Recipe) -> list[str]:
        """Return the settings in which this recipe differs from another, each as "key: own value, not other value"."""
        own, others = self.settings(), other.settings()
        keys = [key for key in {**own, **others} if own.get(key) != others.get(key)]
        return [f"{key}: {own.get(key)!r}, not {others.get(key)!r}" for key in keys]

    def settings(self) -> dict[str, Any]:
        """Return dotted key → value of every setting that decides the result; unused sections are left out."""
        is_used = {
            "origin": self.origin.run is not None,
            "teacher": self.teacher.is_named,
            "finetune": self.finetune.epochs > 0,
        }
        used = {section: options for section, options in self.to_dict().items() if is_used.get(section, True)}
        return {
            key: _normalize_number(value)
            for key, value in (*flatten_settings(used), *self._resolve_interval())
            if key not in SETTINGS_WITHOUT_EFFECT and not (key in NEUTRAL_DEFAULTS and value == NEUTRAL_DEFAULTS[key])
        }

    def _resolve_interval(self) -> Iterator[tuple[str, Any]]:
        """Yield the setting method.every where the method takes it from the length of training.

        Runs of one length have one fingerprint then, whether the number was given or not. Where the length is not known
        without the data, it is taken to be a long one.
        """
        if (
            "every" in self.method
            and self.method["every"] is None
            and issubclass(METHODS[self.method["name"]], Periodic)
        ):
            rows = self.data.training_rows
            yield "method.every", LONGEST_INTERVAL if rows is None else default_interval(self.train.count_steps(rows))


def hash_settings(settings: Any) -> str:
    """Return the fingerprint of plain values: the first 12 hexadecimal digits of a SHA-256 of their JSON."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _normalize_number(value: Any) -> Any:
    """Return 1.0 as 1, so that both have one fingerprint. Lists are left as they are: a milestone 1 is not 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
