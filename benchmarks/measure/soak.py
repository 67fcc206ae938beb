"""Train a tiny model for a million steps, and attach and finish a thousand pruners; print the memory on the way.

    python benchmarks/measure/soak.py --steps 1e6 --cycles 1000 --json results/soak.json

Exit with 1 where the memory at the end is more than a few megabytes above that after a tenth of the way.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from record_file import write_record
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


def soak_steps(steps: int) -> dict[str, Any]:
    """Return the memory after each tenth of a training with a mask update every fourth step."""
    began = time.perf_counter()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    pruner = pm.DPF(0.5, every=4).attach(model, optimizer, total_steps=steps)
    found = []
    for _ in range(10):
        train(model, optimizer, steps // 10)
        found.append(resident_mb())
        print(f"step {pruner.step:,}: {found[-1]:.1f} MB, {len(pruner.history):,} entries in the history", flush=True)
    updates = {"updates": pruner.update_count, "history_entries": len(pruner.history)}
    return {"count": pruner.step, **updates, "mb": found, "seconds": time.perf_counter() - began}


def soak_cycles(cycles: int) -> dict[str, Any]:
    """Return the memory after each tenth of many pruners, one after another."""
    began = time.perf_counter()
    model, found = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for part in range(10):
        for _ in range(cycles // 10):
            pruner = pm.DPF(0.5, every=1).attach(model, optimizer, total_steps=2, resume=False)
            train(model, optimizer, 2)
            pruner.finish()
        found.append(resident_mb())
        print(f"cycle {(part + 1) * (cycles // 10):,}: {found[-1]:.1f} MB", flush=True)
    return {"count": 10 * (cycles // 10), "mb": found, "seconds": time.perf_counter() - began}


def main() -> None:
    """Run both and report whether the memory stayed flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=float, default=1e6)
    parser.add_argument("--cycles", type=float, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"cycles": soak_cycles(int(options.cycles)), "steps": soak_steps(int(options.steps))}
    grown = {name: soak["mb"][-1] - soak["mb"][0] for name, soak in found.items()}
    print(f"grown by {grown['cycles']:.1f} MB over the cycles and {grown['steps']:.1f} MB over the steps")
    write_record(options.json, **found, grown_mb=grown)
    sys.exit(max(grown.values()) > ALLOWED_MB)


if __name__ == "__main__":
    main()
