"""How a run goes, for a person: a live bar on a terminal, one line an epoch elsewhere."""

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

DRAW_INTERVAL = 0.1  # seconds between two drawings of the bar
SPEED_SAMPLES = 300  # drawings over which the speed is taken: half a minute


class TwoLineProgress(Progress):
    """A progress bar with its text beneath, so that both have room."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            yield self.make_tasks_table([task])
            yield Text(task.fields["text"], style="dim", no_wrap=True, overflow="ellipsis")


class ProgressBar:
    """A live bar: epoch, loss, accuracy, sparsity, steps a second and time left."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description}", markup=False), BarColumn(None), TextColumn("{task.fields[left]}")
        self.bar = TwoLineProgress(*columns, console=console, expand=True, transient=True)
        self.row: dict[str, Any] = {}  # the latest measurements
        self.steps = self.epochs = self.per_epoch = 0
        self.samples: deque[tuple[float, int]] = deque(maxlen=SPEED_SAMPLES)
        self.drawn = 0.0

    def start(self, total_epochs: int, steps_per_epoch: int, title: str) -> None:
        """Show the bar for a run of so many epochs."""
        self.epochs, self.per_epoch = total_epochs, steps_per_epoch
        self.task = self.bar.add_task(title, total=total_epochs * steps_per_epoch, text="", left="")
        self.drawn = time.perf_counter()
        self.bar.start()

    def title(self, title: str) -> None:
        """Another title for the same bar."""
        self.bar.update(self.task, description=title)

    def step(self, loss: float | None = None) -> None:
        """One step was taken; its loss where it is known."""
        self.steps += 1
        if loss is not None:
            self.row["loss"] = loss
        now = time.perf_counter()
        if now - self.drawn >= DRAW_INTERVAL:  # the first sample comes after those steps that a resumed run skips
            self.drawn = now
            self.samples.append((now, self.steps))
            self.bar.update(self.task, completed=self.steps, text=self.text(), left=self.left())

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch ended, with these measurements."""
        self.row |= row

    def pace(self) -> float | None:
        """Steps a second, once there are two samples."""
        (start, first), (end, last) = self.samples[0], self.samples[-1]
        return (last - first) / (end - start) if last > first else None

    def left(self) -> str:
        """The time left, at this pace."""
        pace = self.pace()
        return f"{format_duration((self.epochs * self.per_epoch - self.steps) / pace)} left" if pace else ""

    def text(self) -> str:
        """What stands beneath the bar."""
        epoch, pace = min(self.steps // self.per_epoch + 1, self.epochs), self.pace()
        speed = [f"{pace:.{0 if pace >= 10 else 1}f} steps/s"] if pace else []
        return " · ".join([f"epoch {epoch}/{self.epochs}", *format_measurements(self.row), *speed])

    def close(self) -> None:
        """Take the bar away."""
        self.bar.stop()


class ProgressLines:
    """One plain line an epoch, for a log file."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def start(self, total_epochs: int, steps_per_epoch: int, title: str) -> None:
        self.epochs, self.name = total_epochs, title

    def step(self, loss: float | None = None) -> None: ...

    def epoch(self, row: Mapping[str, Any]) -> None:
        epoch, seconds = row["epoch"], row["seconds"]
        parts = [f"{self.name}: epoch {epoch}/{self.epochs}", *format_measurements(row)]
        parts += [
            f"{row['images_per_second']:.0f} images/s",
            f"{format_duration(seconds / epoch * (self.epochs - epoch))} left",
        ]
        self.say(" · ".join(parts))

    def close(self) -> None: ...

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)


class SeriesProgress:
    """Several runs of the same length as one: one bar over all of them, or one line a run."""

    def __init__(self, console: Console, runs: int) -> None:
        self.console, self.runs, self.begun = console, runs, 0
        self.bar = ProgressBar(console) if console.is_terminal else None

    def start(self, total_epochs: int, steps_per_epoch: int, title: str) -> None:
        self.begun += 1
        self.name = f"{title} ({self.begun} of {self.runs})"
        if self.bar is not None and self.begun == 1:
            self.bar.start(self.runs * total_epochs, steps_per_epoch, self.name)
        elif self.bar is not None:
            self.bar.title(self.name)

    def step(self, loss: float | None = None) -> None:
        if self.bar is not None:
            self.bar.step(loss)

    def epoch(self, row: Mapping[str, Any]) -> None:
        if self.bar is not None:
            self.bar.epoch(row)

    def close(self) -> None:
        """The end of one run, which is not the end of the bar."""

    def done(self, summary: Mapping[str, Any]) -> None:
        """One run is complete."""
        if self.bar is None:
            line = " · ".join([self.name, *format_measurements(summary), f"{summary['seconds']:.1f} s"])
            ProgressLines(self.console).say(line)

    def end(self) -> None:
        """The series is over, complete or not."""
        if self.bar is not None:
            self.bar.close()


def make_reporter(console: Console) -> ProgressBar | ProgressLines:
    """The bar where the console is a terminal, else the lines."""
    return ProgressBar(console) if console.is_terminal else ProgressLines(console)


@contextmanager
def download_progress(console: Console) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """Who is told how a download goes (file, bytes so far, bytes in all): a bar on a terminal, nobody elsewhere."""
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

        def tell(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done)

        yield tell


def format_measurements(row: Mapping[str, Any]) -> list[str]:
    """The measurements that are there, in words."""
    texts = {
        "loss": "loss {:.3f}",
        "accuracy": "accuracy {:.2f} %",
        "perplexity": "perplexity {:.1f}",
        "epsilon": "ε {:.3f}",
    }
    found = [text.format(row[key]) for key, text in texts.items() if key in row]
    return [*found, f"sparsity {100 * row['sparsity']:.1f} %"] if row.get("sparsity") else found


def format_duration(seconds: float) -> str:
    """Seconds as 0:07, 12:30 or 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
