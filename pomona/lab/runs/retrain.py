"""Retraining the mask of a finished run: is it a lottery ticket (Lin et al., 2020, Figures 5, 8 and 13)?

The mask is fixed throughout. The weights start as in the run that found it (`init`), from another seed (`random`), or
as that run left them (`final`), and the learning-rate schedule starts from its beginning. The retraining takes as many
epochs as the run, or as many as cost the same.

The cost of a training is the multiply-accumulates of its forward passes, counting only weights on the mask, with the
mask of each step; a backward pass costs in proportion. The paper says no more than "same total flops". Two costs are
left out: the gradients that DPF takes off its mask, and the selection of masks. A method whose weights grow freely
between its cuts (SFP) costs as much as a dense training, and a lottery ticket costs the sum of its rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pomona import models
from pomona.errors import require, unknown_name_error
from pomona.methods import METHODS
from pomona.registry import spec_to_dict
from pomona.untrusted import parse_json, read_bytes, read_object, reading

from ..recipes.learning_rates import LearningRate, StepDecay
from ..recipes.options import DENSE
from ..recipes.recipe import Recipe
from . import masks
from .folder import ENVIRONMENT_FILE, METRICS_FILE, MODEL_FILE, RECIPE_FILE, SUMMARY_FILE
from .model_file import read_input_shape, read_model_options
from .recorder import NoteCallback, ProgressListener
from .train import train

STARTS = ("init", "random", "final")
BUDGETS = ("epochs", "flops")
RANDOM_START_SEED = 1_000_003  # added to the run's seed for other initial weights; larger than any seed of a sweep


def retrain(
    run: str | Path,
    start: str = "init",
    budget: str = "epochs",
    *,
    out: str | Path | None = None,
    seed: int | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    progress: ProgressListener | None = None,
    stop: Callable[[], bool] | None = None,
    note: NoteCallback = warnings.warn,
) -> dict[str, Any]:
    """Train the mask of a finished run in another folder, and return both runs side by side under `runs`.

    The folder is `RUN-retrain-START`, with the suffix `-flops` for that budget, unless `out` is given. `seed` is for a
    `random` start.
    """
    recipe, folder = prepare_retraining(run, start, budget, out=out, seed=seed)
    summary = train(recipe, folder, resume=resume, data_dir=data_dir, progress=progress, stop=stop, note=note)
    before = summarize_run(Path(run), "as trained")
    after = summarize_run(folder, f"retrained from {start}")
    return {"from": start, "budget": budget, "runs": [before, after], "summary": summary}


def prepare_retraining(
    run: str | Path,
    start: str = "init",
    budget: str = "epochs",
    *,
    out: str | Path | None = None,
    seed: int | None = None,
) -> tuple[Recipe, Path]:
    """Return the recipe of a retraining and its folder; nothing is written."""
    run = Path(run)
    if start not in STARTS:
        raise unknown_name_error("start of a retraining", start, STARTS)
    if budget not in BUDGETS:
        raise unknown_name_error("budget", budget, BUDGETS)
    require(seed is None or start == "random", f"a seed is for a random start, and this one is from {start}.")
    source, summary = load_finished_run(run)
    found = masks.load(run)
    require(
        start != "init" or source.origin.run is None or source.origin.weights == "new",
        f"'{run}' itself started from the weights of '{source.origin.run}': retrain it from random or final.",
    )
    name = f"{run.resolve().name}-retrain-{start}{'-flops' if budget == 'flops' else ''}"
    run_epochs = source.train.epochs + source.finetune.epochs
    epochs = run_epochs if budget == "epochs" else max(1, round(training_cost(run) / final_epoch_cost(summary)))
    settings = source.to_dict() | {
        "name": name,
        "seed": source.seed if start != "random" else source.seed + RANDOM_START_SEED if seed is None else seed,
        "origin": {
            "run": str(run.resolve()),
            "weights": "final" if start == "final" else "new",
            "fingerprint": summary["fingerprint"],
        },
        "method": {"name": "finetune", "include": list(found), "pattern": source.method["pattern"]},
        "rate": spec_to_dict(milestones_as_shares(source.rate, source.train.epochs)),
        "train": dataclasses.asdict(source.train) | {"epochs": epochs, "track": False},
        "finetune": {"epochs": 0},
    }
    return Recipe.load(settings), Path(out) if out is not None else run.resolve().with_name(name)


def load_finished_run(run: Path) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe and the summary of a run; raise PomonaError unless it is complete and pruned something."""
    require((run / RECIPE_FILE).is_file(), f"'{run}' is not a run: it has no recipe.toml.")
    summary = run / SUMMARY_FILE
    require(summary.is_file(), f"the run in '{run}' is not complete: go on with pomona train --resume {run}.")
    recipe = Recipe.load_stored(run / RECIPE_FILE)
    require(recipe.method["name"] != DENSE, f"the run in '{run}' is dense: there is no mask to retrain.")
    return recipe, read_object(summary)


def milestones_as_shares(rate: LearningRate, epochs: int) -> LearningRate:
    """Return a learning rate with its milestones as shares of training, so that they fit any number of epochs."""
    if not isinstance(rate, StepDecay):
        return rate
    shares = tuple(min(1.0, m / epochs) if isinstance(m, int) else m for m in rate.milestones)
    return dataclasses.replace(rate, milestones=shares)


def summarize_run(run: Path, how: str) -> dict[str, Any]:
    """Return the main numbers of a run; its cost is in epochs of dense training."""
    summary = read_object(run / SUMMARY_FILE)
    measure = "accuracy" if "accuracy" in summary else "perplexity"
    return {
        "run": str(run),
        "how": how,
        measure: summary[measure],
        "sparsity": summary["sparsity"],
        "epochs": summary["epoch"],
        "cost": training_cost(run),
        "seed": summary["seed"],
    }


# ---- the cost of a training


def final_epoch_cost(summary: Mapping[str, Any]) -> float:
    """Return the cost of an epoch with the final mask, in epochs of dense training."""
    return summary["macs_left"] / summary["macs"]


def training_cost(run: Path) -> float:
    """Return the cost of a finished run in epochs of dense training; raise PomonaError for damaged files."""
    with reading(f"the run in '{run}'"):
        return _training_cost(run)


def _training_cost(run: Path) -> float:
    recipe, summary = load_finished_run(run)
    lines = [parse_json(line) for line in read_bytes(run / METRICS_FILE).splitlines()]
    weights = mac_shares(run)
    free = METHODS[recipe.method["name"]].weights == "free"
    steps = summary["step"] / summary["epoch"]
    spent, first = 0.0, 0
    for stage in summary["stages"]:
        updates = [line for line in lines if line["kind"] == "update" and line["stage"] == stage["stage"]]
        if free and stage["stage"] != "finetune":
            spent += stage["step"] - first
        elif not updates:  # the masks were fixed
            spent += (stage["step"] - first) * remaining_macs(weights, list(stage["layers"].values()))
        else:
            times = [first, *(line["step"] for line in updates), stage["step"]]
            shares = [1.0, *(remaining_macs(weights, line["layers"]) for line in updates)]
            spent += sum((b - a) * share for (a, b), share in zip(itertools.pairwise(times), shares, strict=True))
        first = stage["step"]
    return spent / steps


def remaining_macs(weights: Mapping[str, float], sparsities: Sequence[float]) -> float:
    """Return the share of all MACs that remains when the pruned tensors have these sparsities."""
    *pruned, rest = weights.values()
    return rest + sum(share * (1 - sparsity) for share, sparsity in zip(pruned, sparsities, strict=True))


def mac_shares(run: Path) -> dict[str, float]:
    """Return the share of each pruned tensor in the model's MACs and, under the last key, that of all others."""
    model = models.build(**read_model_options(run / MODEL_FILE))
    shape = read_input_shape(run / ENVIRONMENT_FILE)
    cost = models.summary(model, shape)
    layers = {layer.name: layer.macs - layer.activation_macs for layer in cost.layers}
    shares: dict[str, float] = {}
    for name in masks.load(run):
        module, _, leaf = name.rpartition(".")
        sizes = {
            n: p.numel() for n, p in model.get_submodule(module)._parameters.items() if p is not None and p.ndim > 1
        }
        shares[name] = layers.get(module, 0) / cost.macs * sizes.get(leaf, 0) / max(1, sum(sizes.values()))
    return {**shares, "": 1 - sum(shares.values())}
