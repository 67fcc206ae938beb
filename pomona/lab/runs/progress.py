"""The progress of a run for a person: a live bar on a terminal, one line for each epoch elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

DRAW_INTERVAL = 0.1  # seconds between two updates of the bar
SPEED_SAMPLES = 300  # updates over which the speed is averaged: half a minute


class TwoLineProgress(Progress):
    """A progress bar with its text on a second line, so that both have room."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            yield self.make_tasks_table([task])
            yield Text(task.fields["text"], style="dim", no_wrap=True, overflow="ellipsis")


class ProgressBar:
    """A live bar with epoch, loss, accuracy, sparsity, steps per second and time left."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description}", markup=False), BarColumn(None), TextColumn("{task.fields[left]}")
        self.bar = TwoLineProgress(*columns, console=console, expand=True, transient=True)
        self.row: dict[str, Any] = {}  # the latest measurements
        self.steps = self.epochs = self.steps_per_epoch = 0
        self.samples: deque[tuple[float, int]] = deque(maxlen=SPEED_SAMPLES)
        self.drawn = 0.0

    def start(self, total_epochs: int, steps_per_epoch: int, title: str) -> None:
        """Show the bar for a run of so many epochs."""
        self.epochs, self.steps_per_epoch = total_epochs, steps_per_epoch
        self.task = self.bar.add_task(title, total=total_epochs * steps_per_epoch, text="", left="")
        self.drawn = time.perf_counter()
        self.bar.start()

    def set_title(self, title: str) -> None:
        """Change the title of the bar."""
        self.bar.update(self.task, description=title)

    def step(self, loss: float | None = None) -> None:
        """Count one step, with its loss where it was read."""
        self.steps += 1
        if loss is not None:
            self.row["loss"] = loss
        now = time.perf_counter()
        if now - self.drawn >= DRAW_INTERVAL:  # the first sample comes after the steps that a resumed run skips
            self.drawn = now
            self.samples.append((now, self.steps))
            self.bar.update(self.task, completed=self.steps, text=self.format_text(), left=self.format_time_left())

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Show the measurements of an epoch; a note about them stays above the bar."""
        self.row |= row
        if note := self.row.pop("note", None):
            self.bar.console.print(f"epoch {row['epoch']}: {note}", markup=False, highlight=False)

    def steps_per_second(self) -> float | None:
        """Return the steps per second, or None before there are two samples."""
        (start, first), (end, last) = self.samples[0], self.samples[-1]
        return (last - first) / (end - start) if last > first else None

    def format_time_left(self) -> str:
        """Return the time left at the present speed."""
        speed = self.steps_per_second()
        return f"{format_duration((self.epochs * self.steps_per_epoch - self.steps) / speed)} left" if speed else ""

    def format_text(self) -> str:
        """Return the line of text below the bar."""
        epoch, speed = min(self.steps // self.steps_per_epoch + 1, self.epochs), self.steps_per_second()
        speed_text = [f"{speed:.{0 if speed >= 10 else 1}f} steps/s"] if speed else []
        return " · ".join([f"epoch {epoch}/{self.epochs}", *format_measurements(self.row), *speed_text])

    def close(self) -> None:
        """Remove the bar."""
        self.bar.stop()


class ProgressLines:
    """One plain line for each epoch, for a log file."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def start(self, total_epochs: int, steps_per_epoch: int, title: str) -> None:
        """Remember the length and the name of the run."""
        self.epochs, self.name = total_epochs, title

    def step(self, loss: float | None = None) -> None:
        """Do nothing: only epochs have a line."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Print the line of an epoch."""
        epoch, seconds = row["epoch"], row["seconds"]
        parts = [f"{self.name}: epoch {epoch}/{self.epochs}", *format_measurements(row)]
        parts += [
            f"{row['images_per_second']:.0f} images/s",
            f"{format_duration(seconds / epoch * (self.epochs - epoch))} left",
        ]
        self.print_line(" · ".join(parts))
        if "note" in row:
            self.print_line(f"note: {row['note']}")

    def close(self) -> None:
        """Do nothing: a line has no end."""

    def print_line(self, line: str) -> None:
        """Print a line without markup or wrapping."""
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)


class SeriesProgress:
    """The progress of several runs of the same length: one bar for all of them, or one line for each run."""

    def __init__(self, console: Console, runs: int) -> None:
        self.console, self.runs, self.started = console, runs, 0
        self.bar = ProgressBar(console) if console.is_terminal else None

    def start(self, total_epochs: int, steps_per_epoch: int, title: str) -> None:
        """Start the next run of the series."""
        self.started += 1
        self.name = f"{title} ({self.started} of {self.runs})"
        if self.bar is not None and self.started == 1:
            self.bar.start(self.runs * total_epochs, steps_per_epoch, self.name)
        elif self.bar is not None:
            self.bar.set_title(self.name)

    def step(self, loss: float | None = None) -> None:
        """Count one step."""
        if self.bar is not None:
            self.bar.step(loss)

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Show the measurements of an epoch, without a note: a series is about the results of its runs."""
        if self.bar is not None:
            self.bar.epoch({key: value for key, value in row.items() if key != "note"})

    def close(self) -> None:
        """Do nothing: the end of one run is not the end of the bar."""

    def done(self, summary: Mapping[str, Any]) -> None:
        """Report that one run is complete."""
        if self.bar is None:
            line = " · ".join([self.name, *format_measurements(summary), f"{summary['seconds']:.1f} s"])
            ProgressLines(self.console).print_line(line)

    def end(self) -> None:
        """End the series, whether it is complete or not."""
        if self.bar is not None:
            self.bar.close()


def make_reporter(console: Console) -> ProgressBar | ProgressLines:
    """Return a live bar if the console is a terminal, else plain lines."""
    return ProgressBar(console) if console.is_terminal else ProgressLines(console)


@contextmanager
def download_progress(console: Console) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """Yield a function that shows the progress of a download on a terminal, or None elsewhere.

    It is called with the file, the bytes so far and the bytes in total.
    """
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def report(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done)

        yield report


def format_measurements(row: Mapping[str, Any]) -> list[str]:
    """Return the measurements in a row as short texts; those that are missing are left out."""
    formats = {
        "loss": "loss {:.3f}",
        "accuracy": "accuracy {:.2f} %",
        "perplexity": "perplexity {:.1f}",
        "epsilon": "ε {:.3f}",
    }
    found = [text.format(row[key]) for key, text in formats.items() if key in row]
    return [*found, f"sparsity {100 * row['sparsity']:.1f} %"] if row.get("sparsity") else found


def format_duration(seconds: float) -> str:
    """Return seconds as 0:07, 12:30 or 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
