"""Train a tiny model for a million steps, and attach and finish a thousand pruners; print the memory on the way.

    python benchmarks/measure/soak.py --steps 1e6 --cycles 1000

Exit with 1 where the memory at the end is more than a few megabytes above that after a tenth of the way.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import pomona as pm

ALLOWED_MB = 8.0  # what an allocator may hold more at the end than after a tenth


def resident_mb() -> float:
    """Return the memory that this process holds, in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def make_model() -> nn.Sequential:
    """Return a tiny network."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Take steps on one batch."""
    inputs = torch.ones(4, 8)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def soak_steps(steps: int) -> list[float]:
    """Return the memory after each tenth of a training with a mask update every fourth step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    pruner = pm.DPF(0.5, every=4).attach(model, optimizer, total_steps=steps)
    found = []
    for _ in range(10):
        train(model, optimizer, steps // 10)
        found.append(resident_mb())
        print(f"step {pruner.step:,}: {found[-1]:.1f} MB, {len(pruner.history):,} entries in the history", flush=True)
    return found


def soak_cycles(cycles: int) -> list[float]:
    """Return the memory after each tenth of many pruners, one after another."""
    model, found = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for part in range(10):
        for _ in range(cycles // 10):
            pruner = pm.DPF(0.5, every=1).attach(model, optimizer, total_steps=2, resume=False)
            train(model, optimizer, 2)
            pruner.finish()
        found.append(resident_mb())
        print(f"cycle {(part + 1) * (cycles // 10):,}: {found[-1]:.1f} MB", flush=True)
    return found


def main() -> None:
    """Run both and report whether the memory stayed flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=float, default=1e6)
    parser.add_argument("--cycles", type=float, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    soaks: list[tuple[Callable[[int], list[float]], float]] = [
        (soak_cycles, options.cycles),
        (soak_steps, options.steps),
    ]
    grown = [(found := soak(int(count)))[-1] - found[0] for soak, count in soaks]
    print(f"grown by {grown[0]:.1f} MB over the cycles and {grown[1]:.1f} MB over the steps")
    sys.exit(max(grown) > ALLOWED_MB)


if __name__ == "__main__":
    main()
