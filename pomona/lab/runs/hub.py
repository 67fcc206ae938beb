"""The folder of a finished run for the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pomona.integrations.hub import CardFacts, save_pretrained
from pomona.sparse import load
from pomona.untrusted import MAX_TOML_BYTES, parse_toml, read_bytes, read_object, reading

from . import masks
from .folder import ENVIRONMENT_FILE, MASKS_FILE, MODEL_FILE, RECIPE_FILE, read_summary
from .model_file import read_model_options
from .public_origin import format_origin
from .shrink import load_finished_model

HUB_FOLDER = "hub"  # in the run's folder, where no other is given
TASKS = {"image": "image-classification", "text": "text-generation"}  # the Hub's names, by the kind of the data
METRICS = ("accuracy", "perplexity")


def save_run(run: Path, out: Path | None = None, *, model_file: Path | None = None, license: str = "") -> Path:
    """Write the network of a finished run with its masks and its model card to a folder, and return the folder.

    `model_file` is a file that `pm.save` wrote, with packed weights of the same run, in place of model.safetensors.
    """
    model, _ = load_finished_model(run)
    if model_file is not None:
        model = load(model_file)
    summary = read_summary(run) or {}
    with reading(f"the run in '{run}'"):
        recipe = read_bytes(run / RECIPE_FILE, MAX_TOML_BYTES).decode()
        method = describe_method(parse_toml(recipe), summary)
        data = read_object(run / ENVIRONMENT_FILE)["data"]
        task, data_name = TASKS.get(data["kind"], ""), str(data["name"])
    card = CardFacts(
        title=f"{summary.get('name', run.name)} ({summary.get('model', type(model).__name__)})",
        license=license,
        task=task,
        data=data_name,
        metrics={key: summary[key] for key in METRICS if key in summary},
        method=method,
        recipe=recipe,
        notes=describe_privacy(summary),
    )
    found = masks.load(run) if (run / MASKS_FILE).is_file() else None
    architecture = read_model_options(run / MODEL_FILE)
    return save_pretrained(model, out or run / HUB_FOLDER, architecture=architecture, masks=found, card=card)


def describe_method(recipe: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the method of a recipe, or of a private run its method and budget."""
    private = summary.get("private")
    return {"name": private["method"]} if private else dict(recipe["method"])


def describe_privacy(summary: Mapping[str, Any]) -> list[str]:
    """Return sentences on the guarantee of a private run and on the public weights it started from, or none."""
    private = summary.get("private")
    if not private:
        return []
    seeded = (
        "" if private["secure"] else " Its randomness was seeded, for experiments only: the seed reveals the noise."
    )
    notes = [f"Trained with differential privacy: ε = {private['target']:.4g} at δ = {private['delta']:g}.{seeded}"]
    if "origin" in private:
        notes.append(
            f"The guarantee is for '{summary['data']}'. Training began with {format_origin(private['origin'])}."
        )
    if "not_covered" in private:
        notes.append(f"The guarantee leaves out {private['not_covered']}, taken from the training rows without noise.")
    return notes
