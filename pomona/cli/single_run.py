"""What `train`, `private` and `retrain` share: finding the recipe, the preview of a run, and its interruption."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pomona.errors import require

from .output import facts_table, print_json, print_status, print_table

if TYPE_CHECKING:
    from pomona.lab.recipes.recipe import Recipe


def find_recipe(given: str, out: Path | None, resume: bool) -> tuple[Path, Path | None]:
    """Return the recipe's file and the run's folder, as far as it is known; `given` is a recipe or a run to resume."""
    from pomona.lab.recipes import bundled

    folder = Path(given)
    if not folder.is_dir():
        return bundled.find_recipe(given), out
    require(resume, f"'{given}' is a folder: give a recipe, or resume the run in this folder with --resume.")
    require((folder / "recipe.toml").is_file(), f"there is no run to resume in '{given}': it has no recipe.toml.")
    return folder / "recipe.toml", out or folder


def continues_run(folder: Path, resume: bool, auto_resume: bool) -> bool:
    """Return whether a command continues the run in a folder, by its options --resume and --auto-resume."""
    from pomona.lab.runs.train import is_begun

    return resume or (auto_resume and is_begun(folder))


def recipe_overrides(settings: Sequence[str] | None, name: str | None) -> list[str]:
    """Return the values of --set, and the value of --name in the same form."""
    return [*(settings or []), *([f"name={json.dumps(name)}"] if name else [])]


def print_preview(recipe: Recipe, folder: Path, resume: bool, data_dir: Path | None, as_json: bool) -> None:
    """Print what --dry-run shows: the recipe with all defaults, then what the command would do."""
    if not as_json:
        print(recipe.to_toml())
    preview = preview_run(recipe, folder, resume, data_dir)
    if as_json:
        print_json({"recipe": recipe.to_dict(), **preview})
    else:
        print_table(facts_table(preview_facts(preview)))


def preview_run(recipe: Recipe, folder: Path, resume: bool, data_dir: Path | None) -> dict[str, Any]:
    """Return what a run would do, after all its validations."""
    from pomona.lab import describe_run
    from pomona.lab.runs.train import validate_folder

    done = validate_folder(recipe, folder, resume)
    would = "nothing: the run is complete" if done else "go on" if resume else "train"
    return {"would": would, "folder": str(folder), **describe_run(recipe, data_dir=data_dir)}


def preview_facts(preview: Mapping[str, Any]) -> dict[str, str]:
    """Return the preview of a run as names and texts for a person."""
    pruned = preview["pruned"]
    return {
        "would": preview["would"],
        "folder": preview["folder"],
        "device": preview["device"],
        "data": f"{preview['data']['train']:,} training samples, {preview['data']['test']:,} test samples",
        "steps": f"{preview['steps']:,}, {preview['steps_per_epoch']:,} per epoch",
        "parameters": f"{preview['params']:,}, with {preview['macs']:,} MACs",
        "to prune": f"{sum(pruned.values()):,} of them, in {len(pruned)} tensors" if pruned else "nothing",
    }


@contextlib.contextmanager
def resume_hint(command: str, folder: Path, data_dir: Path | None, trackers: Sequence[str] = ()) -> Iterator[None]:
    """Exit with code 130 where the enclosed run is interrupted, and print the command that resumes it."""
    from pomona.lab import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stopped:
        print_status(stop_message(stopped, command, folder, data_dir, trackers))
        raise typer.Exit(130) from stopped


def stop_message(
    stopped: BaseException, command: str, folder: Path, data_dir: Path | None, trackers: Sequence[str] = ()
) -> str:
    """Return the sentence about an interrupted run, with the command that resumes it."""
    from pomona.lab import Interrupted
    from pomona.lab.runs import checkpoint

    place = ["--data-dir", str(data_dir)] if data_dir else []
    track = ["--track", ",".join(trackers)] if trackers else []
    again = shlex.join(["pomona", command, "--resume", str(folder), *place, *track])
    if isinstance(stopped, Interrupted):
        return f"stopped after step {stopped.step} of {stopped.total}; to continue: {again}"
    if checkpoint.exists(folder):  # a second Ctrl-C, or one outside the training loop
        return f"stopped immediately; to continue from the last checkpoint: {again}"
    return "stopped before the first checkpoint: there is nothing to resume."
