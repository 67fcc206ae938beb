"""The demo: one small network, dense and then pruned by every method, each with the same training.

It is made of ordinary runs, one folder each, so what it does is in their `recipe.toml`.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from pomona.errors import require

from .recipes.options import DENSE
from .recipes.recipe import Recipe
from .runs import durable_files
from .runs import environment as env
from .runs.progress import SeriesProgress
from .runs.train import train
from .tables import line_chart as plot

# Weight decay and clipping are what a network this small needs to keep DPF steady at 98 %: where a whole
# filter is pruned, batch norm magnifies the gradient of its dense weights.
SETTINGS: dict[str, Any] = {
    "data": "digits",
    "model": "digits_cnn",
    "optimizer": {"lr": 0.2, "weight_decay": 5e-3},
    "rate": "cosine",
    "train": {"batch_size": 64, "clip": 1.0, "device": "cpu", "checkpoint_every": 0},
}
METHODS: dict[str, dict[str, Any]] = {
    "oneshot": {"at": 0.5},
    "incremental": {"every": 4},
    "random": {},
    "dpf": {"every": 4},
}


@dataclass(frozen=True)
class Plan:
    """What is trained, and for how long."""

    sparsities: tuple[float, ...] = (0.8, 0.9, 0.95, 0.98)
    epochs: int = 16
    seeds: int = 2

    def recipes(self, seed: int = 0) -> list[Recipe]:
        """Every run: dense first, then sparsity by sparsity."""
        dense: dict[str, Any] = {"name": DENSE}
        methods = [
            {"name": name, "sparsity": s, **options} for s in self.sparsities for name, options in METHODS.items()
        ]
        return [self.recipe(method, k) for method in (dense, *methods) for k in range(seed, seed + self.seeds)]

    def recipe(self, method: Mapping[str, Any], seed: int) -> Recipe:
        share = f"-{100 * method['sparsity']:g}" if "sparsity" in method else ""
        name = f"{method['name']}{share}-seed{seed}"
        training = {**SETTINGS["train"], "epochs": self.epochs, "eval_every": self.epochs}
        return Recipe.load({**SETTINGS, "name": name, "seed": seed, "method": method, "train": training})


FULL = Plan()
QUICK = Plan(sparsities=(0.8, 0.95), epochs=4, seeds=1)


def run(out: Path | str, plan: Plan = FULL, *, seed: int = 0, progress: SeriesProgress | None = None) -> dict[str, Any]:
    """Train the plan into folders below `out`; the cells, also in `demo.json`, and the picture `demo.svg`.

    Runs of an earlier demo there are replaced; anything else is left alone.
    """
    out, started = Path(out), time.perf_counter()
    recipes = plan.recipes(seed)
    clear(out, [recipe.name for recipe in recipes])
    with one_thread():
        summaries = []
        for recipe in recipes:
            summary = train(recipe, out / recipe.name, progress=progress)
            if progress is not None:
                progress.done(summary)
            summaries.append(summary)
    result = {
        "cells": cells(recipes, summaries),
        "seconds": time.perf_counter() - started,
        **env.describe_environment(),
    }
    durable_files.replace_file(out / "demo.svg", picture(result["cells"]).encode())
    durable_files.replace_file(out / "demo.json", (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode())
    return result


def clear(out: Path, names: Sequence[str]) -> None:
    """Remove the runs of an earlier demo, once it is certain that they are runs."""
    require(out.is_dir() or not out.exists(), f"'{out}' is a file: give a folder for the demo with --out.")
    folders = [out / name for name in names if (out / name).exists()]
    for folder in folders:
        ours = (folder / "recipe.toml").is_file() and Recipe.load(folder / "recipe.toml").name == folder.name
        require(ours, f"'{folder}' is in the way and is no run of a demo: move it, or give another folder with --out.")
    for folder in folders:
        shutil.rmtree(folder)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread: the network is too small to gain from more, and a busy machine would lose by it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cells(recipes: Sequence[Recipe], summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One cell for each method and sparsity, with the mean over its seeds; the best of each sparsity is marked."""
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for recipe, summary in zip(recipes, summaries, strict=True):
        key = recipe.method["name"], recipe.method.get("sparsity", 0.0)
        groups.setdefault(key, []).append(summary)
    found = [cell(method, sparsity, runs) for (method, sparsity), runs in groups.items()]
    for one in found:
        rivals = [c["mean"] for c in found if c["sparsity"] == one["sparsity"]]
        one["best"] = one["mean"] > max(rivals) - 0.005  # equal in print
    return found


def cell(method: str, sparsity: float, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    accuracies = [run["accuracy"] for run in runs]
    first = runs[0]
    return {
        "model": first["model"],
        "method": method,
        "sparsity": sparsity,
        "setting": {"data": first["data"], "epochs": first["epoch"], "seeds": [run["seed"] for run in runs]},
        "mean": statistics.mean(accuracies),
        "std": statistics.stdev(accuracies) if len(runs) > 1 else None,
        "runs": len(runs),
        "paper": None,
        "params": first["params"],
        "params_left": round(statistics.mean(run["nonzeros"] for run in runs)),
        "macs": first["macs"],
        "macs_left": round(statistics.mean(run["macs_left"] for run in runs)),
        "seconds": statistics.mean(run["seconds"] for run in runs),
    }


def table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Rows are sparsities, columns methods; the best of each row is marked."""
    dense, *rest = cells
    methods = list(dict.fromkeys(c["method"] for c in rest))
    grid = Table(title=heading(dense), title_justify="left", caption_justify="left", show_lines=True)
    grid.caption = "★ the best of its row; params and MACs are what is left of them"
    for column in ("sparsity", *methods):
        grid.add_column(column, justify="right", no_wrap=True)
    for sparsity in dict.fromkeys(c["sparsity"] for c in rest):
        row = {c["method"]: c for c in rest if c["sparsity"] == sparsity}
        grid.add_row(f"{100 * sparsity:g}%", *(show(row[method]) for method in methods))
    return grid


def heading(dense: Mapping[str, Any]) -> str:
    """What was trained, and what it is without pruning."""
    setting = dense["setting"]
    cost = f"{dense['params']:,} parameters · {dense['macs']:,} MACs · {dense['seconds']:.1f} s"
    return (
        f"[bold]{dense['model']} on {setting['data']}[/], accuracy in % after {setting['epochs']} epochs\n"
        f"dense: [bold]{accuracy(dense)}[/] · {cost}"
    )


def show(one: Mapping[str, Any]) -> str:
    """A cell of the table."""
    quality = f"[bold green]★ {accuracy(one)}[/]" if one["best"] else accuracy(one)
    params, macs = one["params_left"] / one["params"], one["macs_left"] / one["macs"]
    return f"{quality}\n[dim]{params:.1%} params\n{macs:.1%} MACs\n{one['seconds']:.1f} s[/]"


def accuracy(one: Mapping[str, Any]) -> str:
    return f"{one['mean']:.2f}" + (f" ± {one['std']:.2f}" if one["std"] is not None else "")


def picture(cells: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy over sparsity, one line a method."""
    dense, *rest = cells
    curves: dict[str, list[plot.Point]] = {}
    for one in rest:
        curves.setdefault(one["method"], []).append((one["sparsity"], one["mean"]))
    runs = f"mean of {dense['runs']} seeds" if dense["runs"] > 1 else "one seed"
    training = f"{dense['setting']['epochs']} epochs each, {runs}"
    return plot.chart(
        curves,
        title="Accuracy of a network as its weights are pruned",
        subtitle=f"A small convolutional network on scikit-learn's digits; {training}",
        level=("dense", dense["mean"]),
    )
