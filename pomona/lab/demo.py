"""The demo: train one small network dense and pruned by several methods, each for the same number of epochs.

The demo consists of ordinary runs, one folder each, so that every setting is in their `recipe.toml`.
"""

from __future__ import annotations

import json
import shutil
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
from .runs import durable_files, environment
from .runs.progress import SeriesProgress
from .runs.train import train
from .sweeps.result_table import TIE, costs, format_mean, mean_and_deviation
from .tables.chart import Point, sparsity_chart

# All methods have the same optimizer, learning rate and number of steps.
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
    "dpf": {},
}


@dataclass(frozen=True)
class DemoGrid:
    """The grid of runs of a demo: sparsities and seeds, and the length of each training."""

    sparsities: tuple[float, ...] = (0.8, 0.9, 0.95, 0.98)
    epochs: int = 16
    seeds: int = 2

    def recipes(self, seed: int = 0) -> list[Recipe]:
        """Return the recipes of all runs: dense first, then sparsity by sparsity."""
        dense: dict[str, Any] = {"name": DENSE}
        methods = [
            {"name": name, "sparsity": s, **options} for s in self.sparsities for name, options in METHODS.items()
        ]
        return [self.make_recipe(method, k) for method in (dense, *methods) for k in range(seed, seed + self.seeds)]

    def make_recipe(self, method: Mapping[str, Any], seed: int) -> Recipe:
        """Return the recipe of one method and seed."""
        sparsity = f"-{100 * method['sparsity']:g}" if "sparsity" in method else ""
        name = f"{method['name']}{sparsity}-seed{seed}"
        curves = {"eval_every": max(1, self.epochs // 8), "track": True}  # what the report draws
        training = {**SETTINGS["train"], "epochs": self.epochs, **curves}
        return Recipe.load({**SETTINGS, "name": name, "seed": seed, "method": method, "train": training})


FULL = DemoGrid()
QUICK = DemoGrid(sparsities=(0.8, 0.95), epochs=4, seeds=1)


def run_demo(
    out: Path | str, grid: DemoGrid = FULL, *, seed: int = 0, progress: SeriesProgress | None = None
) -> dict[str, Any]:
    """Train all runs of a grid in folders below `out`, and write the cells to `demo.json` and a chart to `demo.svg`.

    Runs of an earlier demo in `out` are replaced; other files there are not touched. Returns the content of
    `demo.json`.
    """
    out, started = Path(out), time.perf_counter()
    recipes = grid.recipes(seed)
    remove_earlier_runs(out, [recipe.name for recipe in recipes])
    with single_cpu_thread():
        summaries = []
        for recipe in recipes:
            summary = train(recipe, out / recipe.name, progress=progress)
            if progress is not None:
                progress.done(summary)
            summaries.append(summary)
    result = {
        "cells": make_cells(recipes, summaries),
        "seconds": time.perf_counter() - started,
        **environment.describe_environment(),
    }
    durable_files.replace_file(out / "demo.svg", draw_chart(result["cells"]).encode())
    durable_files.replace_file(out / "demo.json", (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode())
    return result


def remove_earlier_runs(out: Path, names: Sequence[str]) -> None:
    """Remove the runs of an earlier demo; raise PomonaError where a folder with one of the names is something else."""
    require(out.is_dir() or not out.exists(), f"'{out}' is a file: give a folder for the demo with --out.")
    folders = [out / name for name in names if (out / name).exists()]
    for folder in folders:
        is_demo = (folder / "recipe.toml").is_file() and Recipe.load(folder / "recipe.toml").name == folder.name
        require(is_demo, f"'{folder}' exists and is no run of a demo: move it, or give another folder with --out.")
    for folder in folders:
        shutil.rmtree(folder)


@contextmanager
def single_cpu_thread() -> Iterator[None]:
    """Use one CPU thread: the network is too small to gain from more, and on a busy machine it would lose."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_cells(recipes: Sequence[Recipe], summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one cell for each method and sparsity, with the mean over seeds; the best of each sparsity is marked."""
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for recipe, summary in zip(recipes, summaries, strict=True):
        key = recipe.method["name"], recipe.method.get("sparsity", 0.0)
        groups.setdefault(key, []).append(summary)
    cells = [make_cell(method, sparsity, runs) for (method, sparsity), runs in groups.items()]
    for cell in cells:
        rivals = [c["mean"] for c in cells if c["sparsity"] == cell["sparsity"]]
        cell["best"] = cell["mean"] > max(rivals) - TIE
    return cells


def make_cell(method: str, sparsity: float, summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cell of a method and a sparsity from the summaries of its runs."""
    first = summaries[0]
    return {
        "model": first["model"],
        "method": method,
        "sparsity": sparsity,
        "setting": {"data": first["data"], "epochs": first["epoch"], "seeds": [run["seed"] for run in summaries]},
        **mean_and_deviation([run["accuracy"] for run in summaries]),
        **costs(summaries),
    }


def render_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of sparsities by methods, with the best of each row marked; the dense network is the title."""
    dense, *rest = cells
    methods = list(dict.fromkeys(c["method"] for c in rest))
    grid = Table(title=dense_heading(dense), title_justify="left", caption_justify="left", show_lines=True)
    grid.caption = "★ the best of its row; params and MACs are the remaining shares"
    for column in ("sparsity", *methods):
        grid.add_column(column, justify="right", no_wrap=True)
    for sparsity in dict.fromkeys(c["sparsity"] for c in rest):
        row = {c["method"]: c for c in rest if c["sparsity"] == sparsity}
        grid.add_row(f"{100 * sparsity:g}%", *(format_cell(row[method]) for method in methods))
    return grid


def dense_heading(dense: Mapping[str, Any]) -> str:
    """Return a heading with the model, the data, and the accuracy and cost of the dense network."""
    setting = dense["setting"]
    cost = f"{dense['params']:,} parameters · {dense['macs']:,} MACs · {dense['seconds']:.1f} s"
    return (
        f"[bold]{dense['model']} on {setting['data']}[/], accuracy in % after {setting['epochs']} epochs\n"
        f"dense: [bold]{format_mean(dense)}[/] · {cost}"
    )


def format_cell(cell: Mapping[str, Any]) -> str:
    """Return the text of a cell: accuracy, remaining parameters and MACs, and seconds."""
    quality = f"[bold green]★ {format_mean(cell)}[/]" if cell["best"] else format_mean(cell)
    params, macs = cell["params_left"] / cell["params"], cell["macs_left"] / cell["macs"]
    return f"{quality}\n[dim]{params:.1%} params\n{macs:.1%} MACs\n{cell['seconds']:.1f} s[/]"


def draw_chart(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG chart of accuracy over sparsity, one curve per method."""
    dense, *rest = cells
    series: dict[str, list[Point]] = {}
    for cell in rest:
        series.setdefault(cell["method"], []).append((cell["sparsity"], cell["mean"]))
    runs = f"mean of {dense['runs']} seeds" if dense["runs"] > 1 else "one seed"
    training = f"{dense['setting']['epochs']} epochs each, {runs}"
    return sparsity_chart(
        series,
        title="Accuracy of a network as its weights are pruned",
        subtitle=f"A small convolutional network on scikit-learn's digits; {training}",
        reference=("dense", dense["mean"]),
    )
