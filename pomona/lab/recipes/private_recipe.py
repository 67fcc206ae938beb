"""Private recipes: a recipe with a section [private], whose budget is solved before the run.

    [private]
    method = "gip"     # or dpsgd, random, public, datalens
    epsilon = 2.0
    delta = 1e-5
    keep = 0.1

The noise multiplier σ and the cost of an index draw are solved by the accountant and written into the run's
recipe.toml under `budget`. A machine without the accountant can train from that file.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pomona.errors import require, unknown_name_error
from pomona.privacy import METHODS, Budget, Clipping, Ramp
from pomona.privacy.budget import RAMPS
from pomona.privacy.private_options import PRECISIONS
from pomona.privacy.private_step import DEFAULT_SCHEDULE
from pomona.privacy.ramp import CONSTANT
from pomona.registry import spec_to_dict, validate_type
from pomona.schedules import SCHEDULES, Schedule
from pomona.untrusted import reading

from .options import DENSE
from .overrides import name_source, read_recipe
from .recipe import Recipe, hash_settings
from .toml_writer import format_toml

# Private options that do not change the result: `micro` only bounds the memory, `budget` follows from the others.
SETTINGS_WITHOUT_EFFECT = ("micro", "budget")

# Options added later, with the value at which they change nothing: runs that were made before keep their fingerprint.
NEUTRAL_DEFAULTS = [
    ("grouping", "model"),
    ("precision", "float32"),
    ("ghost", True),
    ("clipping", {}),
    ("noise_ramp", CONSTANT.to_dict()),
    ("index_ramp", CONSTANT.to_dict()),
]


@dataclass(frozen=True)
class PrivateOptions:
    """The section [private] of a recipe: the budget, the mechanism and its clipping."""

    epsilon: float
    delta: float = 1e-5
    method: str = "gip"
    keep: float = 0.1  # share of coordinates kept at the end of the schedule
    schedule: Schedule = DEFAULT_SCHEDULE
    group: int = 256  # coordinates among which one top-k is taken; 0 takes one over all coordinates
    grouping: str = "model"  # or "parameter": groups lie within one parameter, as in the authors' code
    share: float = 0.01  # share of ε spent on the indices by gip
    clip: float = 1.0
    clipping: Clipping = field(default_factory=Clipping)  # by layer, on a ramp, or to norms that follow a quantile
    noise_ramp: Ramp = CONSTANT  # the factor of σ over the steps
    index_ramp: Ramp = CONSTANT  # the factor of the ε of an index draw over the steps
    micro: int = 256  # rows whose per-example gradients are held in memory at a time
    views: int = 1  # augmented copies of a row whose gradients are averaged
    precision: str = "float32"  # of the gradients of examples; "bfloat16" is several times faster on a GPU
    ghost: bool = True  # dpsgd takes norms and sums from the inputs of layers where that costs less (ghost clipping)
    average: float = 0.0  # decay of the moving average of the weights, which is evaluated and saved; 0 is none
    secure: bool = True  # draw from the operating system's key; otherwise the seed decides the noise: not private
    budget: Budget | None = field(default=None, compare=False)  # the solved budget

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown_name_error("private method", self.method, METHODS)
        if self.precision not in PRECISIONS:
            raise unknown_name_error("private.precision", self.precision, PRECISIONS)
        require(0 <= self.average < 1, f"private.average is a decay in [0, 1), got {self.average}.")
        require(self.group >= 0, f"private.group is a count of coordinates, or 0, got {self.group}.")

    @classmethod
    def load(cls, given: Mapping[str, Any]) -> PrivateOptions:
        """Return the options of a section [private] as written; raise PomonaError for an unknown or bad one."""
        hints = typing.get_type_hints(cls)
        options = dict(given)
        for key, value in options.items():
            if key not in hints:
                raise unknown_name_error("option of private", key, hints)
            validate_type(f"private.{key}", value, hints[key])
            options[key] = float(value) if hints[key] is float else value  # 8 is 8.0
        require("epsilon" in options, "a private recipe needs private.epsilon.")
        if "schedule" in options:
            options["schedule"] = SCHEDULES.resolve(options["schedule"])
        if "clipping" in options:
            options["clipping"] = Clipping.of(options["clipping"])
        options |= {key: Ramp.of(options[key]) for key in RAMPS & options.keys()}
        if options.get("budget") is not None:
            options["budget"] = Budget.from_dict(options["budget"])
        if options.get("method", cls.method) != "gip":
            require(not options.get("share"), f"private.share is for gip: '{options['method']}' has no use for it.")
            options["share"] = 0.0
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as nested plain values, every default included."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        budget = None if self.budget is None else self.budget.to_dict()
        plain = {key: options[key].to_dict() for key in ("clipping", *sorted(RAMPS))}
        return options | plain | {"schedule": spec_to_dict(self.schedule), "budget": budget}

    def settings(self) -> dict[str, Any]:
        """Return the options that decide the result."""
        return {
            key: value
            for key, value in self.to_dict().items()
            if key not in SETTINGS_WITHOUT_EFFECT and (key, value) not in NEUTRAL_DEFAULTS
        }

    def with_budget(self, rows: int, batch_size: int, steps: int) -> PrivateOptions:
        """Return the options with the budget of a run of this size.

        A budget that is already there is verified. Raises PomonaError if it was solved for other numbers.
        """
        wanted: dict[str, Any] = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "rows": rows,
            "batch_size": min(batch_size, rows),
            "steps": steps,
            "share": self.share,
            "noise_ramp": self.noise_ramp,
            "index_ramp": self.index_ramp,
        }
        if self.budget is None:
            return dataclasses.replace(self, budget=Budget.solve(**wanted))
        solved = {key: getattr(self.budget, key) for key in wanted}
        other = [f"{key}: {value}, not {solved[key]}" for key, value in wanted.items() if value != solved[key]]
        require(
            not other,
            f"private.budget was solved for another run ({'; '.join(other)}): leave it out to solve it again.",
        )
        self.budget.verify()
        return self


@dataclass(frozen=True)
class PrivateRecipe:
    """A recipe together with its private options."""

    recipe: Recipe
    private: PrivateOptions

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> PrivateRecipe:
        """Return the private recipe in a TOML file or mapping, with overrides applied as in `Recipe.load`.

        Raises PomonaError without a section [private], or for an option that private training does not support.
        """
        given = read_recipe(source, overrides)
        with reading(name_source(source)):
            return cls._parse(given)

    @classmethod
    def _parse(cls, given: dict[str, Any]) -> PrivateRecipe:
        """Return the private recipe of settings as written."""
        section = given.pop("private", None)
        require(
            isinstance(section, Mapping),
            "a private recipe has a section [private] with its epsilon: add one, or train it with `pomona train`.",
        )
        recipe = Recipe.load(given)
        require(
            recipe.method["name"] == DENSE and not recipe.finetune.epochs,
            "a private run has no method or finetune: the gradient is pruned by the section [private].",
        )
        require(
            recipe.origin.run is None or recipe.origin.weights != "new",
            'origin.weights = "new" takes nothing from a run: choose "final" or "matching", or leave the origin out.',
        )
        require(
            not recipe.teacher.is_named,
            "a private run has no teacher: its outputs would reveal the data it was trained on, outside the budget.",
        )
        require(
            not recipe.train.clip and not recipe.train.label_smoothing and recipe.train.precision == "float32",
            "private training clips each example by private.clip: leave out train.clip, label_smoothing and precision.",
        )
        require(
            recipe.train.nonfinite == "stop",
            "which steps a private training leaves out would tell about its examples: leave out train.nonfinite.",
        )
        require(not recipe.train.average, "private training averages by private.average: leave out train.average.")
        eager = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, loop="eager"))
        return cls(eager, PrivateOptions.load(section))

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe and its section [private] as nested plain values.

        A seed that was not asked for is left out. It decides the initial weights, and not the noise, unless
        `private.secure` is false.
        """
        values = self.recipe.to_dict() | {"private": self.private.to_dict()}
        if not self.names_seed:
            del values["seed"]
        return values

    @property
    def names_seed(self) -> bool:
        """Return whether files of the run name the seed: if it is not the default, or if it decides the noise."""
        return self.recipe.seed != Recipe.seed or not self.private.secure

    def to_toml(self) -> str:
        """Return the recipe and its section [private] as TOML."""
        return format_toml(self.to_dict())

    def fingerprint(self) -> str:
        """Return a short hash of the settings that decide the result of the run."""
        # Both kinds of randomness have the fingerprint of the first versions, in which seeds were the default.
        return hash_settings([self.recipe.fingerprint(), self.private.settings() | {"secure": False}])
