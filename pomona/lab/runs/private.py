"""Private runs: a recipe with a section [private], trained within a budget that is settled before it begins.

    [private]
    method = "gip"     # or dpsgd, random, public
    epsilon = 2.0
    delta = 1e-5
    keep = 0.1

It is a run like any other (see `run`) whose steps are those of `pomona.privacy`. Three things differ. A batch is
a Poisson sample, and an epoch as many of them as hold all rows on average. σ, and what an index draw may cost,
are solved by the accountant and stand in the folder's recipe.toml under `budget`, so that a machine without the
accountant trains from there. And the folder holds nothing of the training data that was not made private: no
training loss; only a checkpoint of seeded randomness foretells noise, and is not to be published.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import statistics
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pomona.data import keyed_random
from pomona.errors import PomonaError, require, unknown_name_error
from pomona.privacy import METHODS, Budget, PrivateStep, Source, problems
from pomona.privacy import splits as predict
from pomona.privacy.budget_split import SHARES
from pomona.privacy.private_step import DEFAULT_SCHEDULE
from pomona.registry import spec_to_dict, validate_type
from pomona.schedules import SCHEDULES, Schedule

from ..recipes.recipe import DENSE, Recipe, _lines, read
from . import checkpoint
from .distributed import assembled
from .evaluate import cross_entropy
from .loops import SETUP, Eager
from .run import Note, Progress, Run, compare_recipes, own_random, signals
from .run import check_folder as check_plain
from .stages import Stage

PASSIVE = ("micro", "budget")  # they decide nothing: the one bounds the memory, the other follows from the rest
WARM = 10  # steps after which the running average of the weights remembers about as many


@dataclass(frozen=True)
class PrivateOptions:
    """How a run is made private."""

    epsilon: float
    delta: float = 1e-5
    method: str = "gip"
    keep: float = 0.1  # share of coordinates at the end of the schedule
    schedule: Schedule = DEFAULT_SCHEDULE
    group: int = 256  # coordinates that have a top-k of their own; 0 is one for all
    share: float = 0.01  # of ε for the indices, of gip
    clip: float = 1.0
    micro: int = 256  # rows whose gradients are held at a time
    views: int = 1  # augmented copies of a row, whose gradients are averaged
    average: float = 0.0  # decay of the running mean of the weights that is measured and kept; 0 is none
    secure: bool = False  # a cryptographic generator; without it the recipe's seed decides the noise
    budget: Budget | None = field(default=None, compare=False)  # solved

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown_name_error("private method", self.method, METHODS)
        require(0 <= self.average < 1, f"private.average is a decay in [0, 1), got {self.average}.")
        require(self.group >= 0, f"private.group is a count of coordinates, or 0, got {self.group}.")

    @classmethod
    def load(cls, given: Mapping[str, Any]) -> PrivateOptions:
        """The section of a recipe, checked."""
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
        if options.get("budget") is not None:
            options["budget"] = Budget.from_dict(options["budget"])
        if options.get("method", cls.method) != "gip":
            require(not options.get("share"), f"private.share is for gip: '{options['method']}' has no use for it.")
            options["share"] = 0.0
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        budget = None if self.budget is None else self.budget.to_dict()
        return plain | {"schedule": spec_to_dict(self.schedule), "budget": budget}

    def settings(self) -> dict[str, Any]:
        """All that decides the result."""
        return {key: value for key, value in self.to_dict().items() if key not in PASSIVE}

    def settled(self, rows: int, batch_size: int, steps: int) -> PrivateOptions:
        """With the budget of a run of this size; one that was solved before must be for the same."""
        asked: dict[str, Any] = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "rows": rows,
            "batch_size": min(batch_size, rows),
            "steps": steps,
            "share": self.share,
        }
        if self.budget is None:
            return dataclasses.replace(self, budget=Budget.solve(**asked))
        solved = self.budget.to_dict()
        other = [f"{key}: {value}, not {solved[key]}" for key, value in asked.items() if value != solved[key]]
        require(
            not other,
            f"private.budget was solved for another run ({'; '.join(other)}): leave it out, and it is solved anew.",
        )
        self.budget.verify()
        return self


@dataclass(frozen=True)
class PrivateRecipe:
    """A recipe and how it is made private."""

    recipe: Recipe
    private: PrivateOptions

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> PrivateRecipe:
        """As `Recipe.load`, with the section [private]."""
        given = read(source, overrides)
        section = given.pop("private", None)
        require(
            isinstance(section, Mapping),
            "a private recipe has a section [private] with its epsilon: add one, or train it with `pomona train`.",
        )
        recipe = Recipe.load(given)
        require(
            recipe.method["name"] == DENSE and not recipe.finetune.epochs and recipe.origin.run is None,
            "a private run has no method, finetune or origin of its own: the gradient is pruned by [private].",
        )
        require(
            not recipe.train.clip and not recipe.train.label_smoothing and recipe.train.precision == "float32",
            "private training clips each example by private.clip: leave out train.clip, label_smoothing and precision.",
        )
        require(not recipe.train.average, "private training has a mean of its own: set private.average, not train's.")
        eager = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, loop="eager"))
        return cls(eager, PrivateOptions.load(section))

    def to_dict(self) -> dict[str, Any]:
        return self.recipe.to_dict() | {"private": self.private.to_dict()}

    def to_toml(self) -> str:
        return "\n".join(_lines(self.to_dict())) + "\n"

    def fingerprint(self) -> str:
        """Of all that decides the run."""
        text = json.dumps([self.recipe.fingerprint(), self.private.settings()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def train(
    recipe: PrivateRecipe,
    folder: Path | str,
    *,
    resume: bool = False,
    data_dir: Path | str | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    note: Note = warnings.warn,
) -> dict[str, Any]:
    """Train a private recipe in a folder and return its summary, as `run.train` does."""
    folder = Path(folder)
    with assembled(recipe.recipe.train.device) as (team, device), own_random(device):
        done = check_folder(recipe, folder, resume)
        if done is not None:
            return done
        with SETUP:
            made = PrivateRun(recipe, folder, team, device, data_dir, progress, note)
        try:
            with SETUP:
                made.open(resume)
            with signals() as asked:
                made.train(lambda: asked() or (stop is not None and stop()))
            return made.finish()
        finally:
            made.close()


def plan(recipe: PrivateRecipe, *, data_dir: Path | str | None = None) -> dict[str, Any]:
    """What `train` would do, and the recipe with its budget solved; nothing is trained or written."""
    with assembled(recipe.recipe.train.device) as (team, device), own_random(device):
        made = PrivateRun(recipe, Path(), team, device, data_dir)
        made.begin(0)
        return {
            "recipe": made.full.to_dict(),
            "fingerprint": recipe.fingerprint(),
            "device": str(device),
            "data": made.data.describe(),
            "params": made.private.size,
            "steps": made.total,
            "private": made.private.facts(),
        }


def splits(recipe: PrivateRecipe, *, data_dir: Path | str | None = None) -> list[dict[str, Any]]:
    """What other shares of ε for the indices of gip would lead to in the last step, by `privacy.splits`."""
    require(recipe.private.method == "gip", f"only gip splits its budget, and this is '{recipe.private.method}'.")
    with assembled(recipe.recipe.train.device) as (team, device), own_random(device):
        made = PrivateRun(recipe, Path(), team, device, data_dir)
        made.begin(0)
    step, budget = made.private, made.private.budget
    sizes, kept = step.mechanism(budget.steps - 1).groups(step.size)
    asked = {key: getattr(budget, key) for key in ("epsilon", "delta", "rows", "batch_size", "steps")}
    found = predict(sizes, kept, clip=step.clip, shares=(*SHARES, budget.share), **asked)
    return [dataclasses.asdict(split) | {"error": split.error} for split in sorted(found, key=lambda one: one.share)]


class PrivateRun(Run):
    """A run whose steps are private."""

    def __init__(self, recipe: PrivateRecipe, folder: Path, *rest: Any, **options: Any) -> None:
        super().__init__(recipe.recipe, folder, *rest, **options)
        require(
            self.team.world == 1, f"private training is for one process, got {self.team.world}: leave torchrun out."
        )
        require(self.data.kind != "text", f"'{self.data.name}' is one long text, in which no row is a person's own.")
        offer = 'set model.norm = "group"' if "norm" in self.built else "choose a model without it, such as private_cnn"
        for problem in problems(self.model):
            raise PomonaError(f"'{problem.name}' is a {problem.layer}, which {problem.reason}: {offer}.")
        self.stages = [PrivateStage("train", recipe.recipe.train.epochs, recipe.recipe.optimizer, recipe.recipe.rate)]
        rows, steps = len(self.data.train), self.per_epoch * recipe.recipe.train.epochs
        settled = recipe.private.settled(rows, self.options.batch_size, steps)
        self.full = dataclasses.replace(recipe, private=settled)
        self.averaged: nn.Module = copy.deepcopy(self.model) if settled.average else self.model

    def begin(self, index: int, resumed: bool = False) -> None:
        super().begin(index, resumed)
        options = self.full.private
        assert options.budget is not None
        self.private = PrivateStep(
            self.model,
            self.optimizer,
            options.budget,
            method=options.method,
            keep=options.keep,
            schedule=options.schedule,
            group=options.group or None,
            clip=options.clip,
            loss=cross_entropy,
            micro=options.micro,
            views=options.views,
            public=self.held_out() if options.method == "public" else None,
            source=Source(self.device, seed=None if options.secure else self.recipe.seed, secure=options.secure),
        )
        self.loop = PoissonLoop(self)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """The validation rows, which stand for public data."""
        require(
            self.data.valid is not None,
            "method 'public' takes the held-out rows as public data: set data.validation to their count.",
        )
        return next(self.data.batches(len(self.data.part("valid")), part="valid").evaluate())

    # ---- the folder

    def make_folder(self) -> None:
        super().make_folder()
        checkpoint.replace(self.folder / "recipe.toml", self.full.to_toml().encode())

    def state(self) -> dict[str, Any]:
        averaged = self.averaged.state_dict() if self.full.private.average else {}
        return super().state() | {"loss": 0.0, "private": self.private.state_dict(), "averaged": averaged}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.private.load_state_dict(state["private"])
        if state["averaged"]:
            self.averaged.load_state_dict(state["averaged"])

    def write(self, row: dict[str, Any]) -> None:
        kept = self.private.kept_share(self.private.steps_taken - 1)
        row |= {"epsilon": self.private.spent, "kept": kept}  # shown live, too
        super().write({key: value for key, value in row.items() if key != "loss"})

    # ---- measuring

    def end_epoch(self) -> dict[str, Any]:
        return {key: value for key, value in super().end_epoch().items() if key != "loss"}

    def score(self, model: nn.Module, part: str) -> dict[str, float]:
        return super().score(self.averaged, part)

    def end_stage(self) -> None:
        if self.full.private.average:
            self.model.load_state_dict(self.averaged.state_dict())
        super().end_stage()

    @torch.no_grad()
    def follow(self) -> None:
        """The running mean of the weights, quick at first."""
        decay = min(self.full.private.average, self.private.steps_taken / (self.private.steps_taken + WARM))
        if decay:
            for ours, theirs in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
                ours.lerp_(theirs, 1 - decay)


class PoissonLoop(Eager):
    """Steps on Poisson samples."""

    run: PrivateRun

    def epoch(self, epoch: int, start: int) -> Iterator[None]:
        run = self.run
        for step in range(epoch * run.per_epoch + start, (epoch + 1) * run.per_epoch):
            for group in run.optimizer.param_groups:
                group["lr"] = run.rate(step)
            inputs, targets = self.gather(run.private.draw(), step)
            self.taken.append(run.private(inputs, targets))
            run.follow()
            yield

    def gather(self, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The rows, in so many augmented views as are asked for."""
        batches, views = self.run.batches, self.run.full.private.views
        many, plan = rows.repeat_interleave(views) if views > 1 else rows, None
        if batches.augment is not None:
            u = keyed_random.uniform((len(many), batches.augment.uniforms_per_image), batches.seed, step, 2)
            plan = torch.from_numpy(batches.augment.draw_params(u, *batches.split.x.shape[2:])).to(rows.device)
        inputs, targets = batches.gather_batch(many, plan)
        return (inputs, targets) if views == 1 else (inputs.unflatten(0, (-1, views)), targets[::views])


@dataclass(frozen=True)
class PrivateStage(Stage):
    """The one stage of a private run; its outcome tells what was promised, and what the choice was worth."""

    def outcome(self, run: Run) -> dict[str, Any]:
        assert isinstance(run, PrivateRun)
        facts = run.private.facts()
        told = {"method": facts["method"], "fingerprint": run.full.fingerprint(), "private": facts}
        return super().outcome(run) | told


def check_folder(recipe: PrivateRecipe, folder: Path, resume: bool) -> dict[str, Any] | None:
    """Refuse a folder that is in use, or of another recipe or budget; the summary if its run is complete."""
    written = folder / "recipe.toml"
    if not resume or not written.is_file():
        return check_plain(recipe.recipe, folder, resume)
    theirs = PrivateRecipe.load(written)
    compare_recipes(recipe.recipe, theirs.recipe, folder)
    mine, old = recipe.private.settings(), theirs.private.settings()
    other = [f"{key}: {mine[key]}, not {old[key]}" for key in mine if mine[key] != old[key]]
    require(
        not other,
        f"the run in '{folder}' was begun with another budget or method ({'; '.join(other[:3])}): what is spent "
        "cannot be moved to a new one, so resume it as it was begun, or give another folder.",
    )
    done = folder / "summary.json"
    return json.loads(done.read_bytes()) if done.is_file() else None


# ---- the table


RECORD = Path("results/private-cifar10.json")


def table(record: Path | str | None = None) -> dict[str, Any]:
    """`gip`, the table of benchmarks/private_cifar.py: each arm at each ε over its seeds, with E[i]/m beside it.

    The record is looked for here, then in the checkout. The paper's own tables cannot be had.
    """
    places = [Path(record)] if record is not None else [RECORD, Path(__file__).resolve().parents[3] / RECORD]
    found = next((place for place in places if place.is_file()), None)
    try:
        cells = [] if found is None else arms(json.loads(found.read_bytes())["runs"])
    except (ValueError, KeyError, TypeError) as error:
        raise PomonaError(
            f"the record '{found}' is damaged: `python benchmarks/private_cifar.py run` makes it anew."
        ) from error
    return {
        "title": "Private training on CIFAR-10: does choosing the indices help? Accuracy in %",
        "paper": "Yang et al., Gradients Index Pruning, 2023, whose tables are not at hand",
        "notes": "E[i]/m is the share of the true top-k that the indices of the last step are expected to miss.",
        "columns": list(dict.fromkeys(one["column"] for one in cells)),
        "across": False,
        "cells": cells,
    }


def arms(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A cell for each arm at each ε; the row of an arm tells E[i]/m, from the least to the most over the ε."""
    groups: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    lost: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: (run["private"]["target"], run["seed"])):
        groups.setdefault((run["private"]["target"], run["arm"]), []).append(run)
        lost.setdefault(run["arm"], []).append(run["private"]["lost"]["end"])
    ends = {arm: dict.fromkeys(f"{end:.3f}" for end in (min(some), max(some))) for arm, some in lost.items()}
    rows = {arm: f"E[i]/m = {' to '.join(ends[arm])}" if any(some) else "" for arm, some in lost.items()}
    return [cell(arm, rows[arm], group) for (_, arm), group in groups.items()]


def cell(arm: str, row: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The runs of an arm that differ in their seeds; `sparsity` is that of the gradient at the end."""
    first, values = runs[0], [run["accuracy"] for run in runs]
    told = first["private"]
    return {
        "label": arm,
        "row": row,
        "own": row,
        "column": f"ε = {told['target']:g}",
        "model": first["model"],
        "method": first["method"],
        "sparsity": 1 - told["keep"],
        "setting": {
            "data": first["data"],
            "arm": arm,
            "epsilon": told["target"],
            "delta": told["delta"],
            "share": told["share"],
            "schedule": told["schedule"]["name"],
            "sigma": told["sigma"],
            "lost": told["lost"],  # E[i] / m
            "random_loses": told["random_loses"],
            "epochs": first["epoch"],
            "seeds": [run["seed"] for run in runs],
        },
        "mean": statistics.mean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "runs": len(values),
        "paper": None,
    }


TABLES = {"gip": table}
