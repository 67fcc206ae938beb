"""Measure private training: the index sampler, and a step against Opacus.

    python benchmarks/measure/private_step.py [--json PATH] [--device cuda] [--quick]

The sampler draws the index set of ten million coordinates, including the top-k. Pomona and Opacus, with each of its
kinds of clipping, take the same private step (per-example gradients, clipping, noise, SGD) on the same model and batch,
in turns. Memory is the peak of two steps in a separate process, minus what the process used before them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from interleaved_timing import PRIVATE_WARM_UP, time_call, time_in_turns
from opacus_peer import CLIPPING, make_opacus_step
from record_file import write_record
from torch import nn
from torch.nn import functional as F

from pomona import models
from pomona.privacy import Budget, IndexMechanism, PrivateStep, Source
from pomona.privacy.per_example_gradients import compute_per_example_gradients

SIZE = 10_000_000
CASES = (("private_cnn", {}, 256), ("wrn16_4", {"norm": "group"}, 16), ("mlp", {"in_features": 3072}, 128))
MICRO_BATCHES = {"private_cnn": 32, "wrn16_4": 4, "mlp": 32}
REPEATS = 7


# ---- the index sampler


def measure_sampler(device: str, size: int, repeats: int) -> list[dict[str, Any]]:
    """Time an index draw over the whole vector and in groups."""
    gradient, source = torch.randn(size, device=device), Source(device)
    results = []
    for case, mechanism in {
        "whole vector": IndexMechanism(size // 10, theta=1.0),
        "groups of 256": IndexMechanism(0.1, theta=1.0, group=256),
    }.items():
        mechanism.sample(gradient, source)  # compiles the kernels and fills the caches
        times = [time_call(lambda m=mechanism: m.sample(gradient, source), device) for _ in range(repeats)]
        results.append(
            {
                "device": device,
                "case": case,
                "size": size,
                "kept": int(mechanism.sample(gradient, source).sum()),
                "milliseconds": 1000 * statistics.median(times),
                "threads": torch.get_num_threads(),
            }
        )
    return results


# ---- a step


class UncheckedBudget(Budget):
    """A budget that is not verified: steps are timed here, and nothing is promised."""

    def verify(self) -> None:
        """Do nothing."""


def build_model_and_batch(
    name: str, options: dict[str, Any], batch: int, device: str
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model of `pomona.models` and a random batch for it."""
    torch.manual_seed(0)
    model = models.build(name, **options).to(device)
    return model, torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)


def make_pomona_step(
    name: str, options: dict[str, Any], batch: int, device: str, method: str = "dpsgd"
) -> Callable[[], None]:
    """Return a function that takes one private step with Pomona."""
    model, x, y = build_model_and_batch(name, options, batch, device)
    share = 0.01 if method == "gip" else 0.0
    budget = UncheckedBudget(8.0, 1e-5, batch, batch, 10**6, share, 1.0, share, ((10**6, 8.0),))
    step = PrivateStep(
        model, torch.optim.SGD(model.parameters(), 0.1), budget, method=method, micro=MICRO_BATCHES[name]
    )

    def work() -> None:
        rows = step.draw()
        step(x[rows], y[rows])

    return work


def make_peer_step(name: str, options: dict[str, Any], batch: int, device: str, clipping: str) -> Callable[[], None]:
    """Return a function that takes one private step with Opacus."""
    return make_opacus_step(*build_model_and_batch(name, options, batch, device), clipping)


STEPS: dict[str, Callable[..., Callable[[], None]]] = {
    "pomona": make_pomona_step,
    "pomona gip": partial(make_pomona_step, method="gip"),
    **{f"opacus {clipping}": partial(make_peer_step, clipping=clipping) for clipping in CLIPPING},
}


def send_peak_memory(kind: str, case: tuple[str, dict[str, Any], int], threads: int, connection: Any) -> None:
    """Send the megabytes that two steps need. This runs in a separate process."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    step = STEPS[kind](*case, "cpu")
    before = read_memory("VmRSS")
    for _ in range(2):
        step()
    connection.send(read_memory("VmHWM") - before)


def read_memory(key: str) -> float:
    """Return the megabytes of this process: now (VmRSS) or the peak so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) / 1024


def measure_memory(kind: str, case: tuple[str, dict[str, Any], int]) -> float:
    """Return the megabytes that two steps of a kind need."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=send_peak_memory, args=(kind, case, torch.get_num_threads(), sender))
    process.start()
    found = receiver.recv()
    process.join()
    return float(found)


def compare_gradients(case: tuple[str, dict[str, Any], int]) -> float:
    """Return the largest difference between the per-example gradients, relative to the largest gradient."""
    from opacus import GradSampleModule

    model, x, y = build_model_and_batch(*case, "cpu")
    found, _ = compute_per_example_gradients(model, F.cross_entropy, dict(model.named_parameters()), x, y)
    F.cross_entropy(GradSampleModule(model, loss_reduction="sum")(x), y, reduction="sum").backward()
    theirs = {name: parameter.grad_sample for name, parameter in model.named_parameters()}
    largest = max(float(value.abs().max()) for value in theirs.values())
    return max(float((found[name] - theirs[name]).abs().max()) for name in theirs) / largest


def measure_steps(repeats: int, cases: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return the time and memory of a step of each kind, and how far the gradients of the libraries differ."""
    results = []
    for case in cases:
        steps = {kind: make(*case, "cpu") for kind, make in STEPS.items()}
        times = time_in_turns(steps, repeats, 1, "cpu", PRIVATE_WARM_UP)
        results.append(
            {
                "model": case[0],
                "batch": case[2],
                "micro": MICRO_BATCHES[case[0]],
                "milliseconds": {name: 1000 * statistics.median(taken) for name, taken in times.items()},
                "megabytes": {kind: measure_memory(kind, case) for kind in STEPS},
                "difference": compare_gradients(case),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="smaller sizes, to see that the script runs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    size, repeats = (SIZE // 100, 2) if options.quick else (SIZE, REPEATS)
    results: dict[str, Any] = {"sampler": measure_sampler(options.device, size, repeats)}
    for row in results["sampler"]:
        print(f"{row['case']:14} of {row['size']:,} on {row['device']}: {row['milliseconds']:.1f} ms")
    if options.device == "cpu":
        results["steps"] = measure_steps(repeats, CASES[2:] if options.quick else CASES)
        for row in results["steps"]:
            times = ", ".join(f"{name} {value:.0f} ms" for name, value in row["milliseconds"].items())
            sizes = ", ".join(f"{name} {value:.0f} MB" for name, value in row["megabytes"].items())
            print(
                f"{row['model']:12} batch {row['batch']}: {times}; {sizes}; gradients differ by {row['difference']:.1e}"
            )
    write_record(options.json, **results)


if __name__ == "__main__":
    main()
