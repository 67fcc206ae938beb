"""Training a recipe in a folder, and describing a run without training it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError, require

from ..recipes.recipe import Recipe
from ..recipes.stored_text import is_whole
from . import checkpoint
from .concurrency import SHARED_STATE_LOCK, isolated_random_state
from .distributed import joined_processes
from .folder import RECIPE_FILE, refuse_used_folder
from .interruption import catch_stop_signals
from .recorder import NoteCallback, ProgressListener
from .run import Run, prepared_run
from .strategy import TrainingStrategy, as_strategy


def train(
    recipe: Recipe | TrainingStrategy,
    folder: Path | str,
    *,
    resume: bool = False,
    data_dir: Path | str | None = None,
    progress: ProgressListener | None = None,
    stop: Callable[[], bool] | None = None,
    note: NoteCallback = warnings.warn,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Train a recipe in a folder and return its summary, which is also in `summary.json`.

    A private recipe is trained by its strategy: `train(PrivateStrategy(recipe), folder)`.

    Nothing is written before the whole recipe is known to work. Ctrl-C, SIGTERM or `stop()`, which is called after
    every step, end the run with `Interrupted` once a checkpoint is written. With `resume` the run continues from its
    last checkpoint; a complete run returns its summary. `note` is called with a sentence that a person should know,
    such as that a checkpoint is damaged. `trackers` names those of `pomona.integrations.trackers` that also receive the
    metrics.
    """
    folder, strategy = Path(folder), as_strategy(recipe)
    with joined_processes(strategy.recipe.train.device) as (processes, device), isolated_random_state(device):
        processes.require_same_recipe(strategy.recipe.to_dict())
        complete = validate_folder(strategy, folder, resume)
        processes.wait()  # all processes have looked before the first begins to write
        if complete is not None:
            return complete
        with SHARED_STATE_LOCK:
            run = Run(strategy, folder, processes, device, data_dir, progress, note, trackers)
        try:
            with SHARED_STATE_LOCK:
                run.open(resume)
            with catch_stop_signals() as signalled:
                run.train(lambda: signalled() or (stop is not None and stop()))
            with SHARED_STATE_LOCK:
                summary = run.finish()
            processes.wait()  # until the first process has written everything
            return summary
        finally:
            run.close()


def describe_run(recipe: Recipe | TrainingStrategy, *, data_dir: Path | str | None = None) -> dict[str, Any]:
    """Return what `train` would do, after all its checks; nothing is trained or written."""
    strategy = as_strategy(recipe)
    with prepared_run(strategy, data_dir) as run:
        return strategy.describe(run)


def validate_folder(recipe: Recipe | TrainingStrategy, folder: Path, resume: bool) -> dict[str, Any] | None:
    """Raise PomonaError unless the recipe can be trained in a folder; return the summary if its run is complete."""
    if folder.exists() and not folder.is_dir():
        raise PomonaError(f"'{folder}' is a file: give a folder for the run.")
    if not resume:
        refuse_used_folder(folder)
        return None
    require(is_begun(folder), f"there is no run to resume in '{folder}': start it without --resume.")
    strategy = as_strategy(recipe)
    if not is_whole(folder / RECIPE_FILE):  # its checkpoint has the settings too, and the run writes the file again
        return None
    strategy.require_same_recipe(folder)
    return strategy.read_finished_run(folder)


def is_begun(folder: Path) -> bool:
    """Return whether a run was begun in a folder, so that it can be resumed."""
    return (folder / RECIPE_FILE).is_file() or checkpoint.exists(folder)
