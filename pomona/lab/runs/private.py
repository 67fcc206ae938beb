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
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pomona.data import draws
from pomona.errors import PomonaError, require
from pomona.privacy import PrivateStep, Source, problems
from pomona.privacy import splits as predict_splits
from pomona.privacy.accounting import SHARES

from ..recipes.private_recipe import PrivateRecipe
from . import checkpoint
from .distributed import joined_processes
from .evaluate import cross_entropy
from .loops import SHARED_STATE_LOCK, EagerLoop
from .run import NoteCallback, ProgressListener, Run, catch_stop_signals, isolated_random_state, require_same_recipe
from .run import validate_folder as check_plain
from .stages import Stage

AVERAGE_WARMUP_STEPS = 10  # steps after which the running average of the weights remembers about as many


def train(
    recipe: PrivateRecipe,
    folder: Path | str,
    *,
    resume: bool = False,
    data_dir: Path | str | None = None,
    progress: ProgressListener | None = None,
    stop: Callable[[], bool] | None = None,
    note: NoteCallback = warnings.warn,
) -> dict[str, Any]:
    """Train a private recipe in a folder and return its summary, as `run.train` does."""
    folder = Path(folder)
    with joined_processes(recipe.recipe.train.device) as (processes, device), isolated_random_state(device):
        done = validate_private_folder(recipe, folder, resume)
        if done is not None:
            return done
        with SHARED_STATE_LOCK:
            made = PrivateRun(recipe, folder, processes, device, data_dir, progress, note)
        try:
            with SHARED_STATE_LOCK:
                made.open(resume)
            with catch_stop_signals() as asked:
                made.train(lambda: asked() or (stop is not None and stop()))
            return made.finish()
        finally:
            made.close()


def describe_private_run(recipe: PrivateRecipe, *, data_dir: Path | str | None = None) -> dict[str, Any]:
    """What `train` would do, and the recipe with its budget solved; nothing is trained or written."""
    with joined_processes(recipe.recipe.train.device) as (processes, device), isolated_random_state(device):
        made = PrivateRun(recipe, Path(), processes, device, data_dir)
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


def compare_budget_shares(recipe: PrivateRecipe, *, data_dir: Path | str | None = None) -> list[dict[str, Any]]:
    """What other shares of ε for the indices of gip would lead to in the last step, by `privacy.splits`."""
    require(recipe.private.method == "gip", f"only gip splits its budget, and this is '{recipe.private.method}'.")
    with joined_processes(recipe.recipe.train.device) as (processes, device), isolated_random_state(device):
        made = PrivateRun(recipe, Path(), processes, device, data_dir)
        made.begin(0)
    step, budget = made.private, made.private.budget
    sizes, kept = step.mechanism(budget.steps - 1).groups(step.size)
    asked = {key: getattr(budget, key) for key in ("epsilon", "delta", "rows", "batch_size", "steps")}
    found = predict_splits(sizes, kept, clip=step.clip, shares=(*SHARES, budget.share), **asked)
    return [dataclasses.asdict(split) | {"error": split.error} for split in sorted(found, key=lambda one: one.share)]


class PrivateRun(Run):
    """A run whose steps are private."""

    def __init__(self, recipe: PrivateRecipe, folder: Path, *rest: Any, **options: Any) -> None:
        super().__init__(recipe.recipe, folder, *rest, **options)
        require(
            self.processes.world_size == 1,
            f"private training is for one process, got {self.processes.world_size}: leave torchrun out.",
        )
        require(self.data.kind != "text", f"'{self.data.name}' is one long text, in which no row is a person's own.")
        offer = 'set model.norm = "group"' if "norm" in self.built else "choose a model without it, such as private_cnn"
        for problem in problems(self.model):
            raise PomonaError(f"'{problem.name}' is a {problem.layer}, which {problem.why}: {offer}.")
        self.stages = [PrivateStage("train", recipe.recipe.train.epochs, recipe.recipe.optimizer, recipe.recipe.rate)]
        rows, steps = len(self.data.train), self.per_epoch * recipe.recipe.train.epochs
        settled = recipe.private.with_budget(rows, self.options.batch_size, steps)
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
        checkpoint.replace_file(self.folder / "recipe.toml", self.full.to_toml().encode())

    def state(self) -> dict[str, Any]:
        averaged = self.averaged.state_dict() if self.full.private.average else {}
        return super().state() | {"loss": 0.0, "private": self.private.state_dict(), "averaged": averaged}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.private.load_state_dict(state["private"])
        if state["averaged"]:
            self.averaged.load_state_dict(state["averaged"])

    def write(self, row: dict[str, Any]) -> None:
        row |= {"epsilon": self.private.spent, "kept": self.private.kept(self.private.done - 1)}  # shown live, too
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
        decay = min(self.full.private.average, self.private.done / (self.private.done + AVERAGE_WARMUP_STEPS))
        if decay:
            for ours, theirs in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
                ours.lerp_(theirs, 1 - decay)


class PoissonLoop(EagerLoop):
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
            u = draws.uniform((len(many), batches.augment.draws), batches.seed, step, 2)
            plan = torch.from_numpy(batches.augment.plan(u, *batches.split.x.shape[2:])).to(rows.device)
        inputs, targets = batches.gather(many, plan)
        return (inputs, targets) if views == 1 else (inputs.unflatten(0, (-1, views)), targets[::views])


@dataclass(frozen=True)
class PrivateStage(Stage):
    """The one stage of a private run; its outcome tells what was promised, and what the choice was worth."""

    def outcome(self, run: Run) -> dict[str, Any]:
        assert isinstance(run, PrivateRun)
        facts = run.private.facts()
        told = {"method": facts["method"], "fingerprint": run.full.fingerprint(), "private": facts}
        return super().outcome(run) | told


def validate_private_folder(recipe: PrivateRecipe, folder: Path, resume: bool) -> dict[str, Any] | None:
    """Refuse a folder that is in use, or of another recipe or budget; the summary if its run is complete."""
    written = folder / "recipe.toml"
    if not resume or not written.is_file():
        return check_plain(recipe.recipe, folder, resume)
    theirs = PrivateRecipe.load(written)
    require_same_recipe(recipe.recipe, theirs.recipe, folder)
    mine, old = recipe.private.settings(), theirs.private.settings()
    other = [f"{key}: {mine[key]}, not {old[key]}" for key in mine if mine[key] != old[key]]
    require(
        not other,
        f"the run in '{folder}' was begun with another budget or method ({'; '.join(other[:3])}): what is spent "
        "cannot be moved to a new one, so resume it as it was begun, or give another folder.",
    )
    done = folder / "summary.json"
    return json.loads(done.read_bytes()) if done.is_file() else None
