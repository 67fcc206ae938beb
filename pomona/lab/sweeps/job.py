"""A job: one run to train or to resume, independent of the process or thread that executes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError

from ..recipes.recipe import Recipe
from ..runs.folder import FolderInUse, FolderNotEmpty, is_in_use
from ..runs.interruption import Interrupted
from ..runs.recorder import NoteCallback, ProgressListener
from ..runs.train import is_begun, train

POLL_SECONDS = 0.5  # how often a job looks whether another process has ended its run


@dataclass(frozen=True)
class Job:
    """A recipe to train in a folder, or to resume where the folder holds a run that was begun."""

    recipe: Recipe
    folder: Path
    data_dir: Path | str | None = None
    trackers: tuple[str, ...] = ()

    def run(
        self,
        stop: Callable[[], bool] | None = None,
        note: NoteCallback | None = None,
        progress: ProgressListener | None = None,
    ) -> dict[str, Any]:
        """Train and return the summary, or `{"error": reason}` where the run fails; Interrupted is passed on.

        A run that another process trains, such as a second sweep, is waited for.
        """
        options: dict[str, Any] = {"stop": stop, "progress": progress, "note": note or (lambda text: None)}
        options |= {"data_dir": self.data_dir, "trackers": self.trackers}
        try:
            while True:
                try:
                    return train(self.recipe, self.folder, resume=is_begun(self.folder), **options)
                except FolderInUse:
                    self.wait_for_folder(stop or (lambda: False))
                except FolderNotEmpty:
                    if not is_begun(self.folder):  # else another process has begun it just now
                        raise
        except Interrupted:
            raise
        except Exception as error:  # ends this run only, not the sweep
            text = " ".join(str(error).split())
            return {"error": text if isinstance(error, PomonaError) else f"{type(error).__name__}: {text}"}

    def wait_for_folder(self, stop: Callable[[], bool]) -> None:
        """Wait until no other process trains in the folder; raise Interrupted if `stop()` becomes true before."""
        while is_in_use(self.folder):
            if stop():
                raise Interrupted(self.folder, 0, 0)
            time.sleep(POLL_SECONDS)
