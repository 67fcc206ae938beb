"""Runs for tests of the report: folders with a recipe, metrics and a summary, written without training."""

from __future__ import annotations

import json
import math
from pathlib import Path

from pomona.lab import Recipe

LAYERS = {"first.weight": 100, "second.weight": 300}
STEPS = 10  # steps of an epoch


def write_run(
    folder: Path,
    method: str = "dpf",
    sparsity: float = 0.9,
    seed: int = 0,
    epochs: int = 3,
    accuracy: float = 90.0,
    name: str | None = None,
    complete: bool = True,
    layers: dict[str, int] = LAYERS,
    updates: int | None = None,
    **summary,
) -> Path:
    """Write a run with an accuracy that rises to the given one, and so many mask updates (one an epoch)."""
    pruned = method != "dense"
    options = {"name": method, "sparsity": sparsity} if pruned else {"name": method}
    given = {"name": name or f"{method}-{100 * sparsity:g}-seed{seed}", "seed": seed, "method": options}
    training = {"epochs": epochs, "eval_every": 1}
    recipe = Recipe.load({**given, "data": "digits", "model": "digits_cnn", "train": training})
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(recipe.to_toml())
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in metrics(
                epochs, accuracy, sparsity if pruned else 0.0, layers if pruned else {}, updates or epochs
            )
        )
    )
    if complete:
        (folder / "summary.json").write_text(json.dumps(finished(recipe, epochs, accuracy, layers, sparsity, summary)))
    return folder


def metrics(epochs: int, accuracy: float, sparsity: float, layers: dict[str, int], updates: int) -> list[dict]:
    """Return the lines of a run's metrics, in the order of their steps."""
    rows = [
        {
            "kind": "epoch",
            "stage": "train",
            "epoch": k,
            "step": STEPS * k,
            "loss": 1 / k,
            "lr": 0.1,
            "sparsity": sparsity * k / epochs,
            "accuracy": accuracy * math.sqrt(k / epochs),
            "test_loss": 2 / k,
            "seconds": float(k),
            "images_per_second": 100.0,
        }
        for k in range(1, epochs + 1)
    ]
    changes = [
        {
            "kind": "update",
            "stage": "train",
            "step": STEPS * epochs * k // updates,
            "sparsity": sparsity,
            "delta": 0.1,
            "flips": 40 if k < 3 else 0,
            "iou": 0.9,
            "layers": [sparsity * (k + 1) / updates] * len(layers),
        }
        for k in range(updates if layers else 0)
    ]
    targets = [{"kind": "targets", "stage": "train", "sizes": layers}] * bool(layers)
    return targets + sorted(changes + rows, key=lambda row: row["step"])


def finished(recipe: Recipe, epochs: int, accuracy: float, layers: dict[str, int], sparsity: float, more: dict) -> dict:
    """Return the summary of a finished run; its network has 1,000 parameters and 10,000 MACs."""
    pruned = sparsity if recipe.method["name"] != "dense" else 0.0
    last = {"epoch": epochs, "accuracy": accuracy, "sparsity": pruned, "seconds": 2.0}
    by_layer = dict.fromkeys(layers, pruned) if pruned else {}
    return {
        "name": recipe.name, "fingerprint": recipe.fingerprint(), "seed": recipe.seed, "data": recipe.data.name,
        "model": recipe.model["name"], "method": recipe.method["name"], **last, "params": 1000,
        "nonzeros": round(1000 * (1 - pruned)), "macs": 10_000, "macs_left": round(10_000 * (1 - pruned)),
        "stages": [{"stage": "train", **last, "layers": by_layer}], **more,
    }  # fmt: skip


def write_grid(folder: Path, seeds: int = 2, **options) -> Path:
    """Write a dense network and two methods at two sparsities, each with so many seeds."""
    for seed in range(seeds):
        write_run(folder / f"dense-{seed}", "dense", seed=seed, accuracy=95 + seed, **options)
        for method, lead in (("dpf", 0), ("rigl", -3)):
            for sparsity in (0.8, 0.9):
                place = folder / f"{method}-{sparsity}-{seed}"
                write_run(place, method, sparsity, seed, accuracy=100 * sparsity + seed + lead, **options)
    return folder
