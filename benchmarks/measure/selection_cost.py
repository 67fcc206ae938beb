"""Measure what the selection over ranks costs in the training of a ResNet-50, with a mask update every 16 steps.

    python benchmarks/measure/selection_cost.py --json results/selection-cost.json          # on a GPU
    python benchmarks/measure/selection_cost.py --batch 2 --size 32 --steps 32 --turns 1    # on a CPU

The model is sharded by FSDP2 in a group of one process, so that masks are selected by counts that ranks would add. The
time of a step with a mask update, less the median of the 15 steps before it, is the cost of the update, of which the
median is given as a share of one step and of the 16 steps between two updates. The host waits for the device after each
step. The methods and plain training take turns, with fresh models.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record_file import write_record
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from pomona import models
from pomona.methods import make_pruner

EVERY = 16
METHODS = {
    "default": f"dpf(sparsity=0.9, every={EVERY})",
    "as printed": f"dpf(sparsity=0.9, every={EVERY}, printed=True)",
    "one threshold, no floor": f"dpf(sparsity=0.9, every={EVERY}, printed=True, allocation='global(floor=0)')",
}


def make_model(device: torch.device) -> nn.Module:
    """Return a ResNet-50 that is sharded over the processes of the group, block by block."""
    torch.manual_seed(0)
    model = models.build("resnet50").to(device)  # FSDP2 takes contiguous weights only
    for block in [m for m in model.modules() if "Block" in type(m).__name__ or "Bottleneck" in type(m).__name__]:
        fully_shard(block)
    return fully_shard(model)


def time_steps(options: argparse.Namespace, device: torch.device, method: str | None, steps: int) -> list[float]:
    """Train some steps on one batch, pruned by a method where one is given; return the seconds of each."""
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if method is not None:
        make_pruner(method).attach(model, optimizer, total_steps=10 * options.steps)
    x = torch.randn(options.batch, 3, options.size, options.size, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(1000, (options.batch,), device=device)
    seconds = []
    for _ in range(steps):
        synchronize(device)
        began = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the times of steps and the cost of an update, for each method."""
    plain: list[float] = []
    pruned: dict[str, list[float]] = {name: [] for name in METHODS}
    costs: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(options.turns):
        plain += time_steps(options, device, None, EVERY)[EVERY // 2 :]
        for name, method in METHODS.items():
            gc.collect()
            seconds = time_steps(options, device, method, options.steps)
            for end in range(2 * EVERY, options.steps + 1, EVERY):  # the first update compiles kernels
                *before, last = seconds[end - EVERY : end]
                pruned[name] += before
                costs[name].append(last - statistics.median(before))
    step = statistics.median(plain)
    print(f"plain: a step of {1e3 * step:.1f} ms", flush=True)
    methods = {}
    for name, method in METHODS.items():
        cost = statistics.median(costs[name])
        methods[name] = {
            "method": method,
            "pruned_step_seconds": statistics.median(pruned[name]),
            "updates": costs[name],
            "update_seconds": cost,
            "share_of_one_step": cost / step,
            "share_of_the_steps_between_updates": cost / (EVERY * step),
        }
        print(
            f"{name}: a step of {1e3 * statistics.median(pruned[name]):.1f} ms, an update {1e3 * cost:+.1f} ms "
            f"({1e3 * min(costs[name]):.1f} to {1e3 * max(costs[name]):.1f}), {cost / step:.1%} of a step, "
            f"{cost / (EVERY * step):.2%} of {EVERY}",
            flush=True,
        )
    return {"plain_step_seconds": step, "plain_steps": plain, "methods": methods}


def main() -> None:
    """Measure, print the figures and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        figures = measure(options, device)
        distributed.destroy_process_group()
    settings = {"batch": options.batch, "size": options.size, "steps": options.steps, "turns": options.turns}
    write_record(options.json, every=EVERY, **settings, **figures)


if __name__ == "__main__":
    main()
