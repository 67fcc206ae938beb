"""What the tests of runs share."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def read_metrics(folder: Path, kind: str | None = None) -> list[dict]:
    """The rows of a run's metrics, or those of one kind."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def without_timings(row: dict) -> dict:
    """What of a row does not depend on the clock."""
    return {k: v for k, v in row.items() if k not in ("seconds", "images_per_second")}


def untimed_metrics(folder: Path) -> list[dict]:
    """Return the lines of a run's metrics without what depends on the clock."""
    return [without_timings(row) for row in read_metrics(folder)]


class StopAfter:
    """A `stop` that says yes once that many steps were taken."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


class InterruptAtStep:
    """Progress that presses Ctrl-C at a step."""

    def __init__(self, at: int) -> None:
        self.left = at

    def start(self, *told): ...
    def epoch(self, row): ...
    def close(self): ...
    def step(self, loss=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


TWO_PROCESS_SCRIPT = """
import os, sys, torch

torch.set_num_threads(1)
from pomona.lab import Recipe, train
from pomona.lab.sweeps.sweep import sweep

other = os.fork()  # one import serves both
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if other else "1"
{what}
if other:
    sys.exit(os.waitpid(other, 0)[1] != 0)
"""


def run_in_two_processes(what: str) -> None:
    """Have two processes do the same, as under torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    team = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", TWO_PROCESS_SCRIPT.format(what=what)]
    done = subprocess.run(command, env={**os.environ, **team}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
