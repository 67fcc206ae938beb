"""Time an epoch of CIFAR-10: ResNet-20 at batch 128, bf16, on one GPU.

    python benchmarks/measure/cifar_epoch.py [--json FILE] [--epochs 10] [--concurrent 8] [--quick]

A plain eager PyTorch loop on one fixed batch (without data loading) is compared with complete runs of the laboratory,
with data and augmentation: one run captured in a CUDA graph, one that is also compiled, and several concurrent runs on
one GPU. For concurrent runs the time is divided by their number. Seconds count only while all runs are training. The
start, the compilation and the last evaluation are left out; the time to start is reported separately. Target: with
concurrent runs, a tenth of the eager loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record_file import write_record
from torch import nn

import pomona as pm
from pomona.lab.recipes.bundled import find_recipe
from pomona.lab.recipes.recipe import Recipe
from pomona.lab.sweeps.concurrent_runs import train_concurrently
from pomona.lab.sweeps.job import Job

BATCH, STEPS_PER_EPOCH = 128, 391


def time_eager_epoch(steps: int) -> float:
    """Return the seconds of an epoch of a plain PyTorch loop, without pruning and without data loading."""
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
        times.append((time.perf_counter() - start) / steps * STEPS_PER_EPOCH)
    return statistics.median(times[1:])


class EpochClock:
    """A progress display that stores the times at which the epochs of a run end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def start(self, total_epochs: int, steps_per_epoch: int, title: str) -> None: ...

    def step(self, loss: float | None = None) -> None: ...

    def epoch(self, row: dict[str, Any]) -> None:
        self.ends.append(time.perf_counter())

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class TimedJob(Job):
    """A job whose progress display is an EpochClock."""

    clock: EpochClock = dataclasses.field(default_factory=EpochClock)

    def run(self, stop: Any = None, note: Any = None, progress: Any = None) -> dict[str, Any]:
        return super().run(stop, note, self.clock)


def time_lab_epoch(method: str, loop: str, count: int, epochs: int) -> dict[str, Any]:
    """Return the seconds per epoch and run while `count` runs train, and the seconds until each had two epochs."""
    settings = [f"train.epochs={epochs}", f"train.loop={loop}", "train.eval_every=1000", "train.checkpoint_every=0"]
    recipe = Recipe.load(find_recipe("dpf-resnet20" if method == "dpf" else "dense-resnet20"), settings)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [TimedJob(dataclasses.replace(recipe, seed=k), Path(folder, str(k))) for k in range(count)]
        start = time.perf_counter()
        for _, outcome in train_concurrently(jobs, count, print):
            if "error" in outcome:
                raise RuntimeError(outcome["error"])
    # DPF prunes nothing in its first epoch, so its kernels are compiled in the second.
    begin, end = max(job.clock.ends[1] for job in jobs), min(job.clock.ends[-2] for job in jobs)
    passed = sum(count_epochs(job.clock.ends, end) - count_epochs(job.clock.ends, begin) for job in jobs)
    return {
        "loop": loop,
        "method": method,
        "runs": count,
        "seconds_per_epoch": (end - begin) / passed,
        "seconds_to_start": begin - start,
        "epochs": epochs,
    }


def count_epochs(ends: list[float], now: float) -> float:
    """Return the number of epochs that had ended at time `now`, plus the finished share of the current epoch."""
    done = sum(end <= now for end in ends)
    return done + (now - ends[done - 1]) / (ends[done] - ends[done - 1]) if 0 < done < len(ends) else done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of each run")
    parser.add_argument("--concurrent", "--packed", type=int, default=8, help="runs at once on the GPU")
    parser.add_argument("--quick", action="store_true", help="few epochs, to see that the script runs")
    options = parser.parse_args()
    epochs = 4 if options.quick else options.epochs
    eager = time_eager_epoch(50 if options.quick else 300)
    print(f"{'loop':10} {'method':7} {'runs':>5} {'s / epoch and run':>18} {'× eager':>8} {'s to start':>11}")
    print(f"{'eager':10} {'dense':7} {1:5d} {eager:18.3f} {1:8.1f}")
    rows: list[dict[str, Any]] = [{"loop": "eager", "method": "dense", "runs": 1, "seconds_per_epoch": eager}]
    for method, loop, count in (
        ("dense", "captured", 1),
        ("dense", "compiled", 1),
        ("dpf", "compiled", 1),
        ("dense", "compiled", options.concurrent),
        ("dpf", "compiled", options.concurrent),
    ):
        row = time_lab_epoch(method, loop, count, epochs)
        rows.append(row | {"faster": eager / row["seconds_per_epoch"]})
        print(
            f"{loop:10} {method:7} {count:5d} {row['seconds_per_epoch']:18.3f} {eager / row['seconds_per_epoch']:8.1f} "
            f"{row['seconds_to_start']:11.1f}",
            flush=True,
        )
    write_record(options.json, batch=BATCH, model="resnet20", rows=rows)


if __name__ == "__main__":
    main()
