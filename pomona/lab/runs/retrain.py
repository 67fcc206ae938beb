"""Is the mask that a run found a lottery ticket? Train it from scratch, and compare (Figures 5, 8 and 13 of DPF).

The mask is fixed throughout. The weights begin as in the run that found it (`init`), drawn anew (`random`), or as
that run left them (`final`), and the learning rate begins anew. The retraining takes as many epochs as the run, or
as many as cost the same.

What a training costs: the multiply-accumulates of its forward passes, counting weights on the mask only, as the mask
was at each step; a backward pass costs in proportion. The paper says no more than "same total flops". That DPF also
takes gradients off its mask is not counted, nor is what the choice of masks takes. A method whose weights grow freely
between its cuts (SFP) costs what a dense one does, and a lottery ticket the sum of its rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from pomona import models
from pomona.errors import require, unknown_name_error
from pomona.methods import METHODS
from pomona.registry import spec_to_dict

from ..recipes.optimizers import Rate, Step
from ..recipes.recipe import DENSE, Recipe
from . import masks
from .folder import METRICS
from .run import Note, Progress, train

FROM = ("init", "random", "final")
BUDGETS = ("epochs", "flops")


def retrain(
    run: str | Path,
    start: str = "init",
    budget: str = "epochs",
    *,
    out: str | Path | None = None,
    seed: int | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    note: Note = warnings.warn,
) -> dict[str, Any]:
    """Train the mask that a finished run found, in a folder of its own; both runs side by side under `runs`.

    The folder is `RUN-retrain-START`, with `-flops` behind it for that budget, unless `out` is given. `seed` is
    that of a `random` start.
    """
    recipe, folder = plan(run, start, budget, out=out, seed=seed)
    summary = train(recipe, folder, resume=resume, data_dir=data_dir, progress=progress, stop=stop, note=note)
    before = record(Path(run), "as trained")
    after = record(folder, f"retrained from {start}")
    return {"from": start, "budget": budget, "runs": [before, after], "summary": summary}


def plan(
    run: str | Path,
    start: str = "init",
    budget: str = "epochs",
    *,
    out: str | Path | None = None,
    seed: int | None = None,
) -> tuple[Recipe, Path]:
    """The recipe of a retraining, and its folder. Nothing is written."""
    run = Path(run)
    if start not in FROM:
        raise unknown_name_error("start of a retraining", start, FROM)
    if budget not in BUDGETS:
        raise unknown_name_error("budget", budget, BUDGETS)
    require(seed is None or start == "random", f"a seed is for a random start, and this one is from {start}.")
    source, summary = finished(run)
    found = masks.load(run)
    require(
        start != "init" or source.origin.run is None or source.origin.weights == "new",
        f"'{run}' itself began with the weights of '{source.origin.run}': retrain it from random or final.",
    )
    name = f"{run.resolve().name}-retrain-{start}{'-flops' if budget == 'flops' else ''}"
    once = source.train.epochs + source.finetune.epochs
    epochs = once if budget == "epochs" else max(1, round(cost(run) / per_epoch(summary)))
    settings = source.to_dict() | {
        "name": name,
        "seed": source.seed if start != "random" else source.seed + 1_000_003 if seed is None else seed,
        "origin": {
            "run": str(run.resolve()),
            "weights": "final" if start == "final" else "new",
            "fingerprint": summary["fingerprint"],
        },
        "method": {"name": "finetune", "include": list(found), "pattern": source.method["pattern"]},
        "rate": spec_to_dict(stretched(source.rate, source.train.epochs)),
        "train": dataclasses.asdict(source.train) | {"epochs": epochs, "track": False},
        "finetune": {"epochs": 0},
    }
    return Recipe.load(settings), Path(out) if out is not None else run.resolve().with_name(name)


def finished(run: Path) -> tuple[Recipe, dict[str, Any]]:
    """Recipe and summary of a run that is complete and has pruned something."""
    require((run / "recipe.toml").is_file(), f"'{run}' is no run: it has no recipe.toml.")
    done = run / "summary.json"
    require(done.is_file(), f"the run in '{run}' is not complete: go on with pomona train --resume {run}.")
    recipe = Recipe.load(run / "recipe.toml")
    require(recipe.method["name"] != DENSE, f"the run in '{run}' is dense: there is no mask to retrain.")
    return recipe, json.loads(done.read_bytes())


def stretched(rate: Rate, epochs: int) -> Rate:
    """The same rate with its milestones as shares of training, so that another length keeps their places."""
    if not isinstance(rate, Step):
        return rate
    shares = tuple(min(1.0, m / epochs) if isinstance(m, int) else m for m in rate.milestones)
    return dataclasses.replace(rate, milestones=shares)


def record(run: Path, how: str) -> dict[str, Any]:
    """A run in a few numbers; its cost is in epochs of dense training."""
    summary = json.loads((run / "summary.json").read_bytes())
    measure = "accuracy" if "accuracy" in summary else "perplexity"
    return {
        "run": str(run),
        "how": how,
        measure: summary[measure],
        "sparsity": summary["sparsity"],
        "epochs": summary["epoch"],
        "cost": cost(run),
        "seed": summary["seed"],
    }


# ---- what a training costs


def per_epoch(summary: Mapping[str, Any]) -> float:
    """The cost of an epoch with the final mask, where a dense one costs 1."""
    return summary["macs_left"] / summary["macs"]


def cost(run: Path) -> float:
    """What a finished run took to train, in epochs of dense training."""
    recipe, summary = finished(run)
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    weights = macs(run)
    free = METHODS[recipe.method["name"]].weights == "free"
    steps = summary["step"] / summary["epoch"]
    spent, first = 0.0, 0
    for stage in summary["stages"]:
        updates = [line for line in lines if line["kind"] == "update" and line["stage"] == stage["stage"]]
        if free and stage["stage"] != "finetune":
            spent += stage["step"] - first
        elif not updates:  # the masks were held
            spent += (stage["step"] - first) * density(weights, list(stage["layers"].values()))
        else:
            times = [first, *(line["step"] for line in updates), stage["step"]]
            shares = [1.0, *(density(weights, line["layers"]) for line in updates)]
            spent += sum((b - a) * share for (a, b), share in zip(itertools.pairwise(times), shares, strict=True))
        first = stage["step"]
    return spent / steps


def density(weights: Mapping[str, float], sparsities: Sequence[float]) -> float:
    """The share of all MACs that is left where the pruned tensors have these sparsities."""
    *pruned, rest = weights.values()
    return rest + sum(share * (1 - sparsity) for share, sparsity in zip(pruned, sparsities, strict=True))


def macs(run: Path) -> dict[str, float]:
    """The share that each pruned tensor has of the model's MACs, and at the end that of all others."""
    with safe_open(run / "model.safetensors", "pt") as file:
        model = models.build(**json.loads(file.metadata()["pomona"]))
    shape = json.loads((run / "env.json").read_bytes())["data"]["input_shape"]
    cost = models.summary(model, shape)
    layers = {layer.name: layer.macs for layer in cost.layers}
    shares: dict[str, float] = {}
    for name in masks.load(run):
        module, _, leaf = name.rpartition(".")
        sizes = {
            n: p.numel() for n, p in model.get_submodule(module)._parameters.items() if p is not None and p.ndim > 1
        }
        shares[name] = layers.get(module, 0) / cost.macs * sizes.get(leaf, 0) / max(1, sum(sizes.values()))
    return {**shares, "": 1 - sum(shares.values())}
