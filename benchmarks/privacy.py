"""Private training: the index sampler, a step against Opacus, and the audit, from one run.

The sampler draws the index set of ten million coordinates, top-k included. Both libraries take the same private
step (gradients of examples, clipping, noise, SGD) on the same model and batch, in turns; memory is what a process
of its own needs for two steps beyond what it had before them.

    python benchmarks/privacy.py [--json PATH] [--device cuda] [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
from torch import nn
from torch.nn import functional as F

from pomona import models
from pomona.privacy import Budget, IndexMechanism, PrivateStep, Source, audit
from pomona.privacy.per_example_gradients import compute_per_example_gradients

SIZE, KEPT = 10_000_000, 1_000_000
CASES = (("private_cnn", {}, 256), ("wrn16_4", {"norm": "group"}, 16), ("mlp", {"in_features": 3072}, 128))
MICRO = {"private_cnn": 32, "wrn16_4": 4, "mlp": 32}
REPEATS = 7


def seconds(work: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


# ---- the sampler


def sampler(device: str, size: int, repeats: int) -> list[dict[str, Any]]:
    gradient, source = torch.randn(size, device=device), Source(device)
    results = []
    for case, mechanism in {
        "whole vector": IndexMechanism(size // 10, theta=1.0),
        "groups of 256": IndexMechanism(0.1, theta=1.0, group=256),
    }.items():
        mechanism.sample(gradient, source)  # compiles, and fills caches
        times = [seconds(lambda m=mechanism: m.sample(gradient, source), device) for _ in range(repeats)]
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


def setting(
    name: str, options: dict[str, Any], batch: int, device: str
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = models.build(name, **options).to(device)
    return model, torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)


def ours(name: str, options: dict[str, Any], batch: int, device: str, method: str = "dpsgd") -> Callable[[], None]:
    model, x, y = setting(name, options, batch, device)
    share = 0.01 if method == "gip" else 0.0
    budget = Budget(8.0, 1e-5, batch, batch, 10**6, share, 1.0, share, ((10**6, 8.0),))
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), 0.1), budget, method=method, micro=MICRO[name])

    def work() -> None:
        rows = step.draw()
        step(x[rows], y[rows])

    return work


def opacus(name: str, options: dict[str, Any], batch: int, device: str) -> Callable[[], None]:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model, x, y = setting(name, options, batch, device)
    wrapped = GradSampleModule(model, loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=batch
    )

    def work() -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    return work


METHODS: dict[str, Callable[..., Callable[[], None]]] = {"pomona": ours, "opacus": opacus}


def peak(method: str, case: tuple[str, dict[str, Any], int], threads: int, line: Any) -> None:
    """Megabytes that two steps need, in a process of their own."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    work = METHODS[method](*case, "cpu")
    before = resident("VmRSS")
    for _ in range(2):
        work()
    line.send(resident("VmHWM") - before)


def resident(key: str) -> float:
    """Megabytes of this process, now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) / 1024


def memory(method: str, case: tuple[str, dict[str, Any], int]) -> float:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=peak, args=(method, case, torch.get_num_threads(), theirs))
    process.start()
    found = mine.recv()
    process.join()
    return float(found)


def difference(case: tuple[str, dict[str, Any], int]) -> float:
    """The largest difference between the gradients of examples, over the largest gradient."""
    from opacus import GradSampleModule

    model, x, y = setting(*case, "cpu")
    found, _ = compute_per_example_gradients(model, F.cross_entropy, dict(model.named_parameters()), x, y)
    F.cross_entropy(GradSampleModule(model, loss_reduction="sum")(x), y, reduction="sum").backward()
    theirs = {name: parameter.grad_sample for name, parameter in model.named_parameters()}
    largest = max(float(value.abs().max()) for value in theirs.values())
    return max(float((found[name] - theirs[name]).abs().max()) for name in theirs) / largest


def steps(repeats: int, cases: tuple[Any, ...]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        works = {method: make(*case, "cpu") for method, make in METHODS.items()}
        works["pomona gip"] = ours(*case, "cpu", "gip")
        times: dict[str, list[float]] = {method: [] for method in works}
        for turn in range(repeats + 1):
            for method, work in works.items():
                taken = seconds(work, "cpu")
                if turn:  # the first warms up
                    times[method].append(taken)
        results.append(
            {
                "model": case[0],
                "batch": case[2],
                "micro": MICRO[case[0]],
                "milliseconds": {method: 1000 * statistics.median(taken) for method, taken in times.items()},
                "megabytes": {method: memory(method, case) for method in METHODS},
                "difference": difference(case),
            }
        )
    return results


# ---- the audit


def audits() -> list[dict[str, Any]]:
    results = []
    for method, share, options in (
        ("dpsgd", 0.0, {}),
        ("gip", 0.5, {"keep": 0.5, "schedule": "constant", "group": None}),
    ):
        for rate in (1.0, 0.5):
            count, size = (2, 1024) if rate == 1.0 else (4, 512)
            budget = Budget.solve(epsilon=8, delta=1e-6, rows=1024, batch_size=size, steps=count, share=share)
            found = audit(budget, method=method, **options)
            results.append({"method": method, "rate": rate, "steps": count, "epsilon": 8.0, "audited": found})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="smaller sizes, to see that it runs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    size, repeats = (SIZE // 100, 2) if options.quick else (SIZE, REPEATS)
    results: dict[str, Any] = {"sampler": sampler(options.device, size, repeats)}
    for row in results["sampler"]:
        print(f"{row['case']:14} of {row['size']:,} on {row['device']}: {row['milliseconds']:.1f} ms")
    if options.device == "cpu":
        results["steps"] = steps(repeats, CASES[2:] if options.quick else CASES)
        for row in results["steps"]:
            times = ", ".join(f"{name} {value:.0f} ms" for name, value in row["milliseconds"].items())
            sizes = ", ".join(f"{name} {value:.0f} MB" for name, value in row["megabytes"].items())
            print(
                f"{row['model']:12} batch {row['batch']}: {times}; {sizes}; gradients differ by {row['difference']:.1e}"
            )
        results["audit"] = audits()
        for row in results["audit"]:
            print(f"audit of {row['method']} at q = {row['rate']}: ε ≥ {row['audited']:.2f}, promised {row['epsilon']}")
    record.write(options.json, **results)


if __name__ == "__main__":
    main()
