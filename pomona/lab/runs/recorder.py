"""The recorder of a run: the only way from a run to its folder, to its trackers and to its progress listener.

A recorder has a list of allowed outputs, or None if everything may be recorded. A run that must hide something (see
`private`) gives the list. An output that is added to runs later is then left out until it is added to the list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pomona.integrations.trackers import Tracking

from ..recipes.stored_text import is_whole, mark_end
from . import checkpoint
from .durable_files import replace_file
from .folder import (
    ENVIRONMENT_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    SUMMARY_FILE,
    TRACKING_FOLDER,
    MetricsWriter,
    encode_json,
    locked_folder,
)

NoteCallback = Callable[[str], None]


class ProgressListener(Protocol):
    """The receiver of a run's progress. A resumed run first reports the steps that it has already taken."""

    def start(self, total_epochs: int, steps_per_epoch: int, title: str) -> None:
        """Start a run of so many epochs."""

    def step(self, loss: float | None = None) -> None:
        """Report one step, with its loss where it was read from the device."""

    def epoch(self, row: dict[str, Any]) -> None:
        """Report the end of an epoch, with its line of the metrics, and where one is due a `note` about them."""

    def close(self) -> None:
        """End the run, whether it is complete or not."""


@dataclass(frozen=True)
class AllowedOutputs:
    """The names of everything that a run may record. What is not named is neither written nor shown."""

    files: frozenset[str]  # names of files and folders in the run's folder
    metrics: frozenset[str]  # keys of a line in metrics.jsonl, and of what trackers receive
    progress: frozenset[str]  # keys of an epoch shown to the progress listener; "loss" also shows that of a step
    stage: frozenset[str]  # keys of the result of a stage, in the checkpoint and under `stages` in the summary
    summary: frozenset[str]  # keys of summary.json
    checkpoint: frozenset[str]  # keys of a checkpoint's state, besides those of the training strategy
    environment: frozenset[str]  # keys of env.json


class Recorder:
    """Writes the files of a run and reports its progress, both within the allowed outputs.

    With `enabled=False`, for all but the first of several processes, nothing is written or reported.
    """

    def __init__(
        self,
        folder: Path,
        allowed: AllowedOutputs | None = None,
        progress: ProgressListener | None = None,
        enabled: bool = True,
        tracking: Tracking | None = None,
    ) -> None:
        self.folder, self.allowed, self.enabled = folder, allowed, enabled
        self.progress = progress if enabled else None
        self.tracking = tracking if enabled and self._allows("files", TRACKING_FOLDER) else None
        self.complete = False  # whether the summary is written
        self.metrics: MetricsWriter | None = None
        self.resources = ExitStack()
        if self.progress is not None:
            self.resources.callback(self.progress.close)

    def close(self) -> None:
        """Close the metrics file and the progress listener."""
        self.resources.close()

    # ---- the folder

    def write_file(self, name: str, data: bytes) -> None:
        """Write a file of the run's folder, if it is allowed."""
        if self.enabled and self._allows("files", name):
            replace_file(self.folder / name, data)

    def lock_folder(self) -> None:
        """Lock the folder for this process until the recorder is closed; raise PomonaError if another one has it."""
        if self.enabled:
            self.resources.enter_context(locked_folder(self.folder))

    def write_recipe(self, text: str, replace: bool = True) -> None:
        """Write recipe.toml; with `replace=False` only where it is missing or has lost its end."""
        if replace or not is_whole(self.folder / RECIPE_FILE):
            self.write_file(RECIPE_FILE, mark_end(text))

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Write the allowed facts about the environment to env.json."""
        self.write_file(ENVIRONMENT_FILE, encode_json(self._select("environment", facts)))

    def open_metrics(self, size: int) -> int:
        """Open metrics.jsonl for appending after `size` bytes; return how many of them are lost.

        What a killed process wrote behind them is dropped.
        """
        if not (self.enabled and self._allows("files", METRICS_FILE)):
            return 0
        self.metrics = MetricsWriter(self.folder, size)
        self.resources.callback(self.metrics.close)
        return self.metrics.lost

    def start_tracking(self, name: str, config: Mapping[str, Any], step: int) -> None:
        """Start the trackers of a run, or continue them after `step`; they end when the recorder is closed."""
        if self.tracking is not None:
            tracking = self.tracking
            tracking.start(name, config, step)
            self.resources.callback(lambda: tracking.finish(self.complete))

    def sync_metrics(self) -> int:
        """Flush the metrics to the disk and return their size in bytes."""
        return self.metrics.sync() if self.metrics is not None else 0

    def write_metrics(self, row: Mapping[str, Any]) -> None:
        """Append the allowed keys of a row to metrics.jsonl, and pass the values of a step on to the trackers."""
        selected = self._select("metrics", row)
        if self.metrics is not None:
            self.metrics.write(selected)
        if self.tracking is not None and "step" in row:  # a line without one holds no figures of training
            self.tracking.log(row["step"], tracked_values(selected))

    def read_epochs(self, stage: str, count: int) -> list[dict[str, Any]]:
        """Return the lines of a stage's epochs in metrics.jsonl.

        There are none where this process writes no metrics, and where some of the `count` lines are lost.
        """
        if self.metrics is None:
            return []
        rows = [row for row in self.metrics.read_rows() if row.get("kind") == "epoch" and row.get("stage") == stage]
        return rows if len(rows) == count else []

    def write_checkpoint(
        self, state: Mapping[str, Any], strategy_state: Mapping[str, Any], secret: bool = False
    ) -> None:
        """Write a checkpoint with the allowed keys of a run's state and with the state of its strategy."""
        if self.enabled and self._allows("files", checkpoint.CURRENT_FOLDER):
            checkpoint.save(self.folder, {**self._select("checkpoint", state), **strategy_state}, secret=secret)

    def select_stage_result(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return the allowed keys of a stage's result, which checkpoints and the summary contain."""
        return self._select("stage", result)

    def write_summary(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Write the allowed keys of the summary to summary.json, and return them."""
        selected = self._select("summary", summary)
        self.write_file(SUMMARY_FILE, encode_json(selected))
        self.complete = True
        return selected

    # ---- progress

    def report_start(self, epochs: int, steps_per_epoch: int, title: str, steps_taken: int) -> None:
        """Report the start of a run, and the steps that it took before it was resumed."""
        if self.progress is not None:
            self.progress.start(epochs, steps_per_epoch, title)
            for _ in range(steps_taken):
                self.progress.step()

    def report_steps(self, count: int, loss: float | None) -> None:
        """Report steps, with the loss of the last if it was read and may be shown."""
        if self.progress is not None:
            for _ in range(count - 1):
                self.progress.step()
            self.progress.step(loss if self._allows("progress", "loss") else None)

    def report_epoch(self, row: Mapping[str, Any]) -> None:
        """Report the allowed keys of an epoch's row."""
        if self.progress is not None:
            self.progress.epoch(self._select("progress", row))

    # ---- what is allowed

    def _allows(self, place: str, name: str) -> bool:
        """Return whether an output may be recorded in a place, a field of `AllowedOutputs`."""
        return self.allowed is None or name in getattr(self.allowed, place)

    def _select(self, place: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that may be recorded in a place, in their order."""
        return {key: value for key, value in values.items() if self._allows(place, key)}


def tracked_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what trackers show of a line of the metrics; figures of a mask update have the prefix "update/"."""
    prefix = "update/" if row.get("kind") == "update" else ""
    return {f"{prefix}{key}": value for key, value in row.items() if key not in ("kind", "stage", "step")}
