"""Private runs: training within a privacy budget that is solved before the run.

A private run is a run (see `run`) with three differences. A batch is a Poisson sample, and an epoch has as many of them
as contain all rows on average. The steps are those of `pomona.privacy`, with a noise multiplier σ and a cost of an
index draw that the accountant solves; both are in the folder's recipe.toml under `budget`. And the folder contains
nothing computed from the training data except what was made private: `ALLOWED_OUTPUTS` names everything that is
recorded. The key of the noise is in the checkpoints of a run that is not complete, and nowhere else; only their owner
can read them. Every step is journalled in the ledger of the data set before anything of it is written.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pomona.data import Dataset, ImageStream
from pomona.data import load as load_dataset
from pomona.errors import PomonaError, require
from pomona.privacy import Ledger, PrivateStep, Source, digest_rows, problems, solve_steps
from pomona.privacy import splits as predict_splits
from pomona.privacy.budget_split import SHARES
from pomona.privacy.ledger import ledger_folder

from ..recipes.private_recipe import PrivateRecipe
from . import checkpoint
from .evaluate import cross_entropy
from .folder import (
    ENVIRONMENT_FILE,
    METRICS_FILE,
    MODEL_FILE,
    RECIPE_FILE,
    SUMMARY_FILE,
    TRACKING_FOLDER,
    require_same_recipe,
)
from .loops import EagerLoop
from .public_origin import describe_origin
from .recorder import AllowedOutputs
from .run import Run, prepared_run
from .strategy import TrainingStrategy

AVERAGE_WARMUP_STEPS = 10  # the moving average of the weights covers about as many steps as were taken, over these

# Scores on the test and validation parts, which are not the private training data.
SCORE_KEYS = frozenset({"test_loss", "accuracy", "valid_loss", "valid_accuracy"})
EPOCH_KEYS = (
    frozenset({"stage", "epoch", "step", "sparsity", "seconds", "images_per_second", "epsilon", "kept"}) | SCORE_KEYS
)
ENVIRONMENT_KEYS = frozenset({"versions", "machine", "commit", "command"})

# Everything that a private run records. The training loss is not private: it is shown to the person who trains, but
# it is in no file.
ALLOWED_OUTPUTS = AllowedOutputs(
    files=frozenset({RECIPE_FILE, ENVIRONMENT_FILE, METRICS_FILE, MODEL_FILE, SUMMARY_FILE, checkpoint.CURRENT_FOLDER})
    | {TRACKING_FOLDER},
    metrics=EPOCH_KEYS | {"kind", "lr"},
    progress=EPOCH_KEYS | {"kind", "lr", "loss"},
    stage=EPOCH_KEYS | {"kind", "lr", "layers", "method", "fingerprint", "private"},
    summary=(EPOCH_KEYS - {"stage"})
    | {"name", "fingerprint", "seed", "data", "model", "method", "private", "stages", "device", "world"}
    | {"model_sparsity", "params", "nonzeros", "macs", "macs_left"}
    | ENVIRONMENT_KEYS,
    checkpoint=frozenset({"recipe", "stage", "results", "rewind", "step", "updates", "seconds", "metrics", "model"})
    | {"optimizer", "mean", "random", "random_cuda"},
    environment=ENVIRONMENT_KEYS | {"data"},
)


class PrivateStrategy(TrainingStrategy):
    """How a private run is trained: with private steps on Poisson samples, and only the allowed outputs recorded."""

    allowed_outputs = ALLOWED_OUTPUTS
    has_secret_checkpoints = True

    def __init__(self, recipe: PrivateRecipe, ledger: Path | None = None) -> None:
        super().__init__(recipe.recipe)
        self.private_recipe = recipe  # with its budget solved once the run is validated
        self.ledger_folder = ledger or ledger_folder()
        if not recipe.names_seed:
            allowed = self.allowed_outputs
            self.allowed_outputs = dataclasses.replace(allowed, summary=allowed.summary - {"seed"})

    # ---- before training

    def fingerprint(self) -> str:
        return self.private_recipe.fingerprint()

    def recipe_toml(self) -> str:
        return self.private_recipe.to_toml()

    def require_same_recipe(self, folder: Path) -> None:
        started = PrivateRecipe.load(folder / RECIPE_FILE)
        require_same_recipe(self.recipe, started.recipe, folder)
        self.require_same_options(started.private.settings())

    def require_same_options(self, before: Mapping[str, Any]) -> None:
        """Raise PomonaError unless the private options of this run are those that it was started with."""
        own = self.private_recipe.private.settings()
        keys = [key for key in {**own, **before} if own.get(key) != before.get(key)]
        other = [f"{key}: {own.get(key)}, not {before.get(key)}" for key in keys]
        require(
            not other,
            f"the run was started with another budget or method ({'; '.join(other[:3])}): what is spent "
            "cannot be moved to a new one, so resume it as it was started, or give another folder.",
        )

    def validate_run(self, run: Run) -> None:
        self.origin, self.not_covered = describe_origin(self.recipe), run.data.fitted
        world_size = run.processes.world_size
        require(world_size == 1, f"private training is for one process, got {world_size}: leave torchrun out.")
        require(
            run.data.kind != "text",
            f"'{run.data.name}' is one long text, in which no row belongs to one person.",
        )
        require(
            not isinstance(run.data.train, ImageStream),
            f"'{run.data.name}' leaves its images on the disk, and private training draws rows at random: "
            "set data.stream = false.",
        )
        remedy = "choose a model without it, such as private_cnn"
        if "norm" in run.model_options:
            remedy = 'set model.norm = "group"'
        for problem in problems(run.model):
            raise PomonaError(f"'{problem.name}' is a {problem.layer}, which {problem.reason}: {remedy}.")
        private = self.private_recipe.private.with_budget(len(run.data.train), run.options.batch_size, run.total_steps)
        self.private_recipe = dataclasses.replace(self.private_recipe, private=private)
        self.averaged_model: nn.Module = copy.deepcopy(run.model) if private.average else run.model

    def describe(self, run: Run) -> dict[str, Any]:
        return {
            "recipe": self.private_recipe.to_dict(),
            "fingerprint": self.fingerprint(),
            "device": str(run.device),
            "data": run.data.describe(),
            "params": self.step.size,
            "steps": run.total_steps,
            "private": self.facts(),
        }

    # ---- during training

    def make_loop(self, run: Run, kind: str) -> PoissonLoop:
        options = self.private_recipe.private
        assert options.budget is not None
        self.step = PrivateStep(
            run.model,
            run.optimizer,
            options.budget,
            method=options.method,
            keep=options.keep,
            schedule=options.schedule,
            group=options.group or None,
            grouping=options.grouping,
            clip=options.clip,
            clipping=options.clipping,
            loss=cross_entropy,
            micro=options.micro,
            views=options.views,
            precision=options.precision,
            ghost=options.ghost,
            public=public_batch(run) if options.method == "public" else None,
            source=Source(run.device, seed=None if options.secure else run.recipe.seed),
            ledger=Ledger(self.ledger_folder, digest_data(run.data), name=run.data.name, run_name=run.recipe.name),
        )
        return PoissonLoop(run, self)

    @torch.no_grad()
    def update_average(self, run: Run) -> None:
        """Move the averaged weights towards the trained ones, with a smaller decay in the first steps."""
        steps = self.step.steps_taken
        decay = min(self.private_recipe.private.average, steps / (steps + AVERAGE_WARMUP_STEPS))
        if decay:
            for average, weight in zip(self.averaged_model.parameters(), run.model.parameters(), strict=True):
                average.lerp_(weight, 1 - decay)

    def evaluated_model(self, model: nn.Module) -> nn.Module:
        return self.averaged_model

    def end_stage(self, run: Run) -> None:
        if self.private_recipe.private.average:
            run.model.load_state_dict(self.averaged_model.state_dict())

    # ---- results

    def epoch_fields(self) -> dict[str, Any]:
        step = self.step  # a resumed run replays its lines, so they have the ε up to their epoch
        return {"epsilon": step.budget.spent(step.drawn), "kept": step.kept_share(step.steps_taken - 1)}

    def facts(self) -> dict[str, Any]:
        """Return what may be published about the private steps, about public weights, and what is not covered."""
        others = {"origin": self.origin, "not_covered": self.not_covered}
        return self.step.facts() | {key: value for key, value in others.items() if value}

    def stage_fields(self) -> dict[str, Any]:
        facts = self.facts()
        return {"method": facts["method"], "fingerprint": self.fingerprint(), "private": facts}

    def finish(self, run: Run) -> None:
        checkpoint.remove_previous(run.folder)  # it holds the key, which no step needs any more

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        averaged = self.averaged_model.state_dict() if self.private_recipe.private.average else {}
        # The loss of the epoch so far is not private: a resumed run starts again at 0.
        options = self.private_recipe.private.settings()
        return {"loss": 0.0, "private": self.step.state_dict(), "averaged": averaged, "options": options}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require("private" in state, "the checkpoint is of a run without privacy: resume it with `pomona train`.")
        self.require_same_options(state.get("options", self.private_recipe.private.settings()))
        self.step.load_state_dict(state["private"])
        if state["averaged"]:
            self.averaged_model.load_state_dict(state["averaged"])


class PoissonLoop(EagerLoop):
    """Private steps on Poisson samples of the training rows."""

    def __init__(self, run: Run, strategy: PrivateStrategy) -> None:
        super().__init__(run)
        self.strategy = strategy

    def run_epoch(self, epoch: int, start: int) -> Iterator[int]:
        run, private_step = self.run, self.strategy.step
        for step in range(epoch * run.steps_per_epoch + start, (epoch + 1) * run.steps_per_epoch):
            for group in run.optimizer.param_groups:
                group["lr"] = run.rate(step)
            rows = private_step.draw()
            inputs, targets = self.gather(rows)
            # A run that stopped at a loss that is not finite would tell that an example with such a loss is there.
            self.losses.append(torch.nan_to_num(private_step(inputs, targets, rows), posinf=0.0, neginf=0.0))
            self.strategy.update_average(run)
            yield 1

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of rows, with as many augmented views of each as the recipe asks for."""
        batches, views = self.run.batches, self.strategy.private_recipe.private.views
        repeated, augmentation = rows.repeat_interleave(views) if views > 1 else rows, None
        if batches.augment is not None:
            # Of the secret source: were they known, the views of all other rows would tell whether a row is there.
            uniform = self.strategy.step.source.uniform(len(repeated), batches.augment.uniforms_per_image)
            params = batches.augment.draw_params(uniform.cpu().numpy(), *batches.split.x.shape[2:])
            augmentation = torch.from_numpy(params).to(rows.device)
        inputs, targets = batches.gather_batch(repeated, augmentation)
        return (inputs, targets) if views == 1 else (inputs.unflatten(0, (-1, views)), targets[::views])


def digest_data(data: Dataset) -> str:
    """Return the digest of the training data, with the held-out rows, so that it does not depend on their choice."""
    splits = [data.train] if data.valid is None else [data.train, data.valid]
    return digest_rows([torch.cat([split.x for split in splits]), torch.cat([split.y for split in splits])])


def open_ledger(dataset: str, data_dir: Path | str | None = None) -> Ledger:
    """Return the ledger of a data set that is loaded by its name, in the folder of all ledgers."""
    data = load_dataset(dataset, root=data_dir)
    return Ledger(ledger_folder(), digest_data(data), name=data.name)


def public_batch(run: Run) -> tuple[Tensor, Tensor]:
    """Return the validation rows, which method `public` takes as public data."""
    require(
        run.data.valid is not None,
        "method 'public' takes the held-out rows as public data: set data.validation to their count.",
    )
    return next(run.data.batches(len(run.data.part("valid")), part="valid").evaluate())


def count_steps(recipe: PrivateRecipe, sigma: float, *, data_dir: Path | str | None = None) -> dict[str, Any]:
    """Return how many steps, and epochs, noise of a σ allows within the budget of a recipe; see `solve_steps`."""
    strategy = PrivateStrategy(recipe)
    with prepared_run(strategy, data_dir) as run:
        per_epoch = run.steps_per_epoch
    target = {key: getattr(strategy.step.budget, key) for key in ("epsilon", "delta", "rows", "batch_size")}
    steps = solve_steps(**target, sigma=sigma)
    return {"sigma": sigma, "steps": steps, "epochs": steps // per_epoch, "steps_per_epoch": per_epoch}


def compare_budget_shares(recipe: PrivateRecipe, *, data_dir: Path | str | None = None) -> list[dict[str, Any]]:
    """Return the predicted error of the last step for other shares of ε spent on the indices of gip.

    The shares are those of `privacy.splits` and that of the recipe, in ascending order.
    """
    require(recipe.private.method == "gip", f"only gip splits its budget, and this is '{recipe.private.method}'.")
    strategy = PrivateStrategy(recipe)
    with prepared_run(strategy, data_dir):
        pass
    step, budget = strategy.step, strategy.step.budget
    sizes, kept = step.mechanism(budget.steps - 1).groups(step.size)
    asked = {key: getattr(budget, key) for key in ("epsilon", "delta", "rows", "batch_size", "steps")}
    found = predict_splits(sizes, kept, clip=step.clip, shares=(*SHARES, budget.share), **asked)
    return [dataclasses.asdict(split) | {"error": split.error} for split in sorted(found, key=lambda one: one.share)]
