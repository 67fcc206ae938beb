"""What an epoch of CIFAR-10 costs: ResNet-20 at batch 128, bf16, on one GPU.

    python benchmarks/lab.py [--json FILE] [--epochs 10] [--packed 8] [--quick]

A plain eager PyTorch loop on one fixed batch (no data loading at all), against whole runs of the lab with data and
augmentation: one run captured in a CUDA graph, one compiled too, and several packed on one GPU, for each of which
the share of the time is given. Seconds are those in which epochs pass while all runs are at work; starting,
compiling and the last evaluation are left out and told apart. Target: packed, a tenth of the eager loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import record
import torch
from torch import nn

import pomona as pm
from pomona.lab.recipes.bundled import find_recipe
from pomona.lab.recipes.recipe import Recipe
from pomona.lab.sweeps.concurrent_runs import train_concurrently
from pomona.lab.sweeps.job import Job

BATCH, STEPS = 128, 391


def eager(steps: int) -> float:
    """Seconds an epoch of the loop that anyone would write, with nothing pruned and no data loaded."""
    model = pm.models.build("resnet20", num_classes=10, shortcut="B").cuda().to(memory_format=torch.channels_last)
    x = torch.randn(BATCH, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (BATCH,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            with torch.autocast("cuda", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / steps * STEPS)
    return statistics.median(times[1:])


class Clock:
    """Notes when the epochs of a run end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def start(self, total_epochs: int, steps_per_epoch: int, title: str) -> None: ...

    def step(self, loss: float | None = None) -> None: ...

    def epoch(self, row: dict[str, Any]) -> None:
        self.ends.append(time.perf_counter())

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Timed(Job):
    clock: Clock = dataclasses.field(default_factory=Clock)

    def run(self, stop: Any = None, note: Any = None, progress: Any = None) -> dict[str, Any]:
        return super().run(stop, note, self.clock)


def lab(method: str, loop: str, count: int, epochs: int) -> dict[str, Any]:
    """Seconds an epoch and run while all runs are at work, and until two epochs of each were over."""
    settings = [f"train.epochs={epochs}", f"train.loop={loop}", "train.eval_every=1000", "train.checkpoint_every=0"]
    recipe = Recipe.load(find_recipe("dpf-resnet20" if method == "dpf" else "dense-resnet20"), settings)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Timed(dataclasses.replace(recipe, seed=k), Path(folder, str(k))) for k in range(count)]
        start = time.perf_counter()
        for _, outcome in train_concurrently(jobs, count, print):
            if "error" in outcome:
                raise RuntimeError(outcome["error"])
    # DPF prunes nothing in its first epoch, so kernels are still being made in the second.
    begin, end = max(job.clock.ends[1] for job in jobs), min(job.clock.ends[-2] for job in jobs)
    passed = sum(progress(job.clock.ends, end) - progress(job.clock.ends, begin) for job in jobs)
    return {
        "loop": loop,
        "method": method,
        "runs": count,
        "seconds_per_epoch": (end - begin) / passed,
        "seconds_to_start": begin - start,
        "epochs": epochs,
    }


def progress(ends: list[float], now: float) -> float:
    """Epochs that were over at a time, with the share of the one under way."""
    done = sum(end <= now for end in ends)
    return done + (now - ends[done - 1]) / (ends[done] - ends[done - 1]) if 0 < done < len(ends) else done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--epochs", type=int, default=10, help="of each run")
    parser.add_argument("--packed", type=int, default=8, help="runs at once")
    parser.add_argument("--quick", action="store_true", help="few epochs, to see that it works")
    options = parser.parse_args()
    epochs = 4 if options.quick else options.epochs
    plain = eager(50 if options.quick else 300)
    print(f"{'loop':10} {'method':7} {'runs':>5} {'s / epoch and run':>18} {'× eager':>8} {'s to start':>11}")
    print(f"{'eager':10} {'dense':7} {1:5d} {plain:18.3f} {1:8.1f}")
    rows: list[dict[str, Any]] = [{"loop": "eager", "method": "dense", "runs": 1, "seconds_per_epoch": plain}]
    for method, loop, count in (
        ("dense", "captured", 1),
        ("dense", "compiled", 1),
        ("dpf", "compiled", 1),
        ("dense", "compiled", options.packed),
        ("dpf", "compiled", options.packed),
    ):
        row = lab(method, loop, count, epochs)
        rows.append(row | {"faster": plain / row["seconds_per_epoch"]})
        print(
            f"{loop:10} {method:7} {count:5d} {row['seconds_per_epoch']:18.3f} {plain / row['seconds_per_epoch']:8.1f} "
            f"{row['seconds_to_start']:11.1f}",
            flush=True,
        )
    record.write(options.json, batch=BATCH, model="resnet20", rows=rows)


if __name__ == "__main__":
    main()
