"""Helpers for tests of runs: small recipes, reading metrics, stopping or killing a run, training in two processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from pomona.lab import Recipe

DPF = "dpf(sparsity=0.9, every=4, schedule='cubic(until=0.5)')"


def digits_recipe(method=DPF, epochs=3, model="digits_cnn(rho=0.5)", **train) -> Recipe:
    """Return a recipe of a run on the digits that takes six steps for each epoch."""
    options = {"epochs": epochs, "batch_size": 256, "device": "cpu", **train}
    return Recipe.load({"name": "test", "data": "digits", "model": model, "method": method, "train": options})


def read_metrics(folder: Path, kind: str | None = None) -> list[dict]:
    """Return the lines of a run's metrics, or those of one kind."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def without_timings(row: dict) -> dict:
    """Return a row without what depends on the clock."""
    return {k: v for k, v in row.items() if k not in ("seconds", "images_per_second")}


def untimed_metrics(folder: Path) -> list[dict]:
    """Return the lines of a run's metrics without what depends on the clock."""
    return [without_timings(row) for row in read_metrics(folder)]


def have_same_weights(a: Path, b: Path) -> bool:
    """Return whether two finished runs have the same model file, byte for byte."""
    return (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


class StopAfter:
    """A `stop` function that returns True after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


class RecordingListener:
    """A progress listener that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def start(self, total_epochs, steps_per_epoch, title):
        self.calls.append(("start", total_epochs, steps_per_epoch, title))

    def step(self, loss=None):
        self.calls.append(("step", loss))

    def epoch(self, row):
        self.calls.append(("epoch", row))

    def close(self):
        self.calls.append(("close",))


class InterruptAtStep:
    """A progress listener that sends Ctrl-C to this process at a step."""

    def __init__(self, at: int) -> None:
        self.left = at

    def start(self, *arguments): ...
    def epoch(self, row): ...
    def close(self): ...
    def step(self, loss=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


KILLED_SCRIPT = """
import os, signal, sys, torch
from pomona.lab import Recipe, train

torch.set_num_threads(1)

class Killer:
    left = int(sys.argv[2])
    def start(self, *told): pass
    def epoch(self, row): pass
    def close(self): pass
    def step(self, loss=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

train(Recipe.load(sys.argv[3]), sys.argv[1], progress=Killer())
"""


def train_until_killed(recipe: Recipe, folder: Path, step: int) -> None:
    """Train a recipe in a process that kills itself at a step."""
    file = folder.with_name(f"{folder.name}.toml")
    file.write_text(recipe.to_toml())
    command = [sys.executable, "-c", KILLED_SCRIPT, str(folder), str(step), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


TWO_PROCESS_SCRIPT = """
import os, sys, torch

torch.set_num_threads(1)
from pomona.lab import Recipe, train
from pomona.lab.sweeps.sweep import sweep

other = os.fork()  # one import serves both
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if other else "1"
{statement}
if other:
    sys.exit(os.waitpid(other, 0)[1] != 0)
"""


def run_in_two_processes(statement: str, timeout: float = 240) -> None:
    """Run a statement in two processes with the environment of torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", TWO_PROCESS_SCRIPT.format(statement=statement)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
