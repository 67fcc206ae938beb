"""Measure what pruning costs a large model on a CPU: attaching, a step, a mask update, and the memory.

    python benchmarks/measure/large_model.py --weights 500e6 --methods plain,dpf --json results/large-training.json

Each figure comes from a process of its own, and plain training is measured in the same way.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record_file import write_record
from torch import nn

import pomona as pm

WIDTH = 2048
CLOCK = time.process_time if "--cpu-time" in sys.argv else time.perf_counter
METHODS: dict[str, Callable[[], pm.Pruner | None]] = {
    "plain": lambda: None,
    "dpf": lambda: pm.DPF(0.9, every=4),
    "incremental": lambda: pm.Incremental(0.9, every=4),
    "rigl": lambda: pm.RigL(0.9, every=4),
    "set": lambda: pm.SET(0.9, every=4),
}


def measure(name: str, weights: int, steps: int) -> dict[str, float]:
    """Train a stack of linear layers of so many weights; return seconds and gigabytes."""
    torch.manual_seed(0)
    layers = max(2, round(weights / WIDTH**2))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(4, WIDTH)
    figures = {"weights": float(sum(p.numel() for p in model.parameters())), "built_gb": peak_memory()}
    pruner = METHODS[name]()
    if pruner is not None:
        figures["attach_s"] = timed(lambda: pruner.attach(model, optimizer, total_steps=10 * steps))
        figures["attached_gb"] = peak_memory()

    def take_step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    durations, updates = [], []
    for _ in range(steps):
        before = len(pruner.history) if pruner else 0
        duration = timed(take_step)
        (updates if pruner and len(pruner.history) > before else durations).append(duration)
    figures["step_s"] = min(durations)
    if updates:
        figures["update_s"] = min(updates) - figures["step_s"]
    figures["peak_gb"] = peak_memory()
    return figures


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    start = CLOCK()
    action()
    return CLOCK() - start


def peak_memory() -> float:
    """Return the largest memory that this process has held, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    """Measure the methods that are named, each in its own process, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=float, default=50e6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--cpu-time", action="store_true", help="on a busy machine, with OMP_NUM_THREADS=1")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.methods.split(",")
    if options.in_process:
        print(json.dumps(measure(names[0], int(options.weights), options.steps)))
        return
    found: dict[str, dict[str, float]] = {}
    for name in names:
        command = [sys.executable, __file__, "--weights", str(options.weights), "--steps", str(options.steps)]
        command += ["--cpu-time"] if options.cpu_time else []
        output = subprocess.run([*command, "--methods", name, "--in-process"], capture_output=True, text=True)
        if output.returncode:
            sys.exit(output.stderr)
        found[name] = json.loads(output.stdout)
        print(f"{name:12}", "  ".join(f"{key} {value:.4g}" for key, value in found[name].items()), flush=True)
    write_record(options.json, steps=options.steps, processor_time=options.cpu_time, methods=found)


if __name__ == "__main__":
    main()
