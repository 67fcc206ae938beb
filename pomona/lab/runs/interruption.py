"""Stopping a run: the signals that ask for it, and the exception that ends it after a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Interrupted(Exception):
    """The end of a run that was asked to stop, raised after a checkpoint was written."""

    def __init__(self, folder: Path, step: int, total: int) -> None:
        super().__init__(
            f"stopped after step {step} of {total}, with a checkpoint in '{folder}': "
            "the same command with --resume continues from there."
        )
        self.folder, self.step, self.total = folder, step, total


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM arrived; a second one raises KeyboardInterrupt at once.

    Python allows signal handlers in the main thread only. In any other thread the function always returns False.
    """
    caught: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
