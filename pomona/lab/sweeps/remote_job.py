"""A job on another machine, which shares a file system with this one."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pomona.errors import require

from ..recipes.plugins import load_plugins
from ..recipes.recipe import Recipe
from ..runs.interruption import Interrupted
from .job import Job


@dataclass(frozen=True)
class RemoteResult:
    """What a job on another machine has brought: its summary or `error`, or None if it was stopped, and its notes."""

    result: dict[str, Any] | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RemoteJob:
    """A job with what it needs of the process that sends it: the working folder and Pomona's environment variables."""

    job: Job
    working_folder: Path
    environment: Mapping[str, str]

    def run(self, stop: Callable[[], bool] | None = None) -> RemoteResult:
        """Train with one CPU thread, like a process of the pool.

        SIGINT, SIGTERM and `stop()` end the run with a checkpoint.
        """
        missing = [place for place in (self.working_folder, self.shared_folder) if not place.is_dir()]
        if missing:
            reason = f"'{missing[0]}' is not on {platform.node()}: sweep in a folder that all machines share."
            return RemoteResult({"error": reason})
        os.chdir(self.working_folder)
        os.environ.update(self.environment)
        torch.set_num_threads(1)
        notes: list[str] = []
        try:
            load_plugins()
            return RemoteResult(self.job.run(stop, notes.append), tuple(notes))
        except Interrupted:
            return RemoteResult(None, tuple(notes))

    @property
    def shared_folder(self) -> Path:
        """The folder of the sweep, which must be the same one on all machines."""
        return self.working_folder / self.job.folder.parent


def make_remote(job: Job) -> RemoteJob:
    """Return a job as another machine may run it, and create the folder of the sweep."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("POMONA_")}
    remote = RemoteJob(job, Path.cwd(), variables)
    remote.shared_folder.mkdir(parents=True, exist_ok=True)
    return remote


def needs_gpu(recipe: Recipe, has_gpus: bool) -> bool:
    """Return whether a run takes a GPU on another machine; a run for "auto" takes one if there are any."""
    device = torch.device("cuda" if recipe.train.device == "auto" else recipe.train.device)
    require(
        device.index is None,
        f"'{recipe.name}' is for '{device}', and an engine chooses the GPU itself: set train.device = \"cuda\".",
    )
    return device.type != "cpu" and (has_gpus or recipe.train.device != "auto")
