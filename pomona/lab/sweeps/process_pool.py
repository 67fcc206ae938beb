"""Runs in several processes at once, one thread each.

A process that is killed takes nothing with it: its run is taken up again by another, once.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from pathlib import Path
from typing import Any

import torch

from pomona.errors import PomonaError

from ..recipes.recipe import Recipe
from ..runs.interruption import Interrupted, catch_stop_signals
from ..runs.recorder import NoteCallback, ProgressListener
from ..runs.train import train

# A fork of this process would inherit threads and CUDA; one of a process that has only imported does not.
MAKE: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
MAKE.set_forkserver_preload([__name__, "torch._dynamo", "sklearn.datasets"])  # what every run imports late


@dataclass(frozen=True)
class Job:
    """A run to be made, or taken up where it was left."""

    recipe: Recipe
    folder: Path
    data_dir: Path | str | None = None

    def run(
        self,
        stop: Callable[[], bool] | None = None,
        note: NoteCallback | None = None,
        progress: ProgressListener | None = None,
    ) -> dict[str, Any]:
        """Its summary, or under `error` why there is none."""
        begun = (self.folder / "recipe.toml").is_file()
        options: dict[str, Any] = {"stop": stop, "progress": progress, "note": note or (lambda text: None)}
        try:
            return train(self.recipe, self.folder, resume=begun, data_dir=self.data_dir, **options)
        except Interrupted:
            raise
        except Exception as error:  # one cell's, not the sweep's
            text = " ".join(str(error).split())
            return {"error": text if isinstance(error, PomonaError) else f"{type(error).__name__}: {text}"}


class Worker:
    """A process that runs one job after another."""

    def __init__(self, stop: Any) -> None:
        self.line, other = MAKE.Pipe()
        self.process = MAKE.Process(target=serve, args=(other, stop), daemon=True)
        self.process.start()
        other.close()  # so that the line ends with the process
        self.index: int | None = None

    def give(self, index: int, job: Job) -> None:
        self.index = index
        self.line.send(job)

    def end(self) -> None:
        self.line.close()
        self.process.terminate()
        self.process.join(5)
        self.process.kill()


def serve(line: connection.Connection, stop: Any) -> None:
    """The life of a worker: Ctrl-C is the parent's business, and nothing outlives the parent for long."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    alone = threading.Event()

    def watch() -> None:
        parent: Any = parent_process()
        parent.join()
        alone.set()

    def tell(kind: str, value: Any = None) -> None:
        with suppress(OSError):  # nobody listens any more
            line.send((kind, value))

    threading.Thread(target=watch, daemon=True).start()
    while True:
        try:
            job = line.recv()
            tell("done", job.run(lambda: stop.is_set() or alone.is_set(), lambda text: tell("note", text)))
        except Interrupted:
            tell("stopped")
        except (EOFError, OSError, KeyboardInterrupt):
            return


def run(jobs: Sequence[Job], count: int, note: NoteCallback) -> Iterator[tuple[int, dict[str, Any]]]:
    """Index and summary (or `error`) of each job, as they come, from `count` processes.

    Ctrl-C and SIGTERM raise KeyboardInterrupt once the runs under way have written a checkpoint; a second one does
    not wait. To close this iterator before its end does the same, and raises nothing.
    """
    stop = MAKE.Event()
    waiting, tries = deque(range(len(jobs))), [0] * len(jobs)
    workers: list[Worker] = []
    with catch_stop_signals() as asked:
        try:
            while waiting or busy(workers):
                if asked():
                    raise KeyboardInterrupt
                while waiting and len(workers) < count:
                    workers.append(Worker(stop))
                for worker in workers:
                    if worker.index is None and waiting:
                        worker.give(waiting[0], jobs[waiting[0]])
                        waiting.popleft()
                yield from answers(workers, waiting, tries, note)
        finally:
            stop.set()
            try:
                while busy(workers):
                    list(answers(workers, waiting, tries, note))
            finally:
                for worker in workers:
                    worker.end()


def busy(workers: Sequence[Worker]) -> bool:
    return any(worker.index is not None for worker in workers)


def answers(
    workers: list[Worker], waiting: deque[int], tries: list[int], note: NoteCallback
) -> Iterator[tuple[int, dict[str, Any]]]:
    """What workers have to tell now; the dead ones leave the list, and what they were at waits again, once."""
    lines = {worker.line: worker for worker in workers if worker.index is not None}
    for line in connection.wait(list(lines), timeout=0.2):
        worker = lines[line]
        try:
            kind, value = worker.line.recv()
        except (EOFError, OSError):
            worker.process.join()
            workers.remove(worker)
            kind, value = "killed", worker.process.exitcode
        if kind == "note":
            note(value)
            continue
        index, worker.index = worker.index, None
        assert index is not None
        tries[index] += 1
        if kind == "done":
            yield index, value
        elif tries[index] == 1:
            waiting.appendleft(index)
        else:
            yield index, {"error": f"its process ended twice ({kind}, {value}): is there memory for so many jobs?"}
