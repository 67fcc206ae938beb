"""Measure a private step of WRN-16-4 on a GPU: ways to compute per-example gradients, and Opacus.

    python benchmarks/measure/private_step_gpu.py [--json PATH] [--opacus FOLDER] [--profile PATH] [--quick]

All take the same private step (per-example gradients, clipping to norm 1, noise, SGD) on the same model and batch, in
turns. Opacus (1.6) is imported from a folder, and takes its steps with each of its kinds of clipping, with TF32 and in
bfloat16 by autocast. Its gradients are clipped and added in floating point. The memory is the peak that a step
allocates, with the model.

`independent` is the outcome of the test that the gradients of a row depend neither on its place nor on other rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from interleaved_timing import PRIVATE_WARM_UP, time_in_turns
from opacus_peer import CLIPPING, make_opacus_step
from record_file import write_record
from torch import Tensor, nn
from torch.nn import functional as F

from pomona import models
from pomona.privacy import Budget, PrivateStep
from pomona.privacy.fixed_shapes import repeatable_kernels
from pomona.privacy.per_example_gradients import compute_per_example_gradients
from pomona.privacy.recorded_gradients import compute_recorded_gradients
from pomona.privacy.row_independence import find_dependent_parameter

Step = Callable[[], None]
MODEL, OPTIONS = "wrn16_4", {"norm": "group"}
ROWS, MICRO, VMAP_MICRO, VIEWS = 512, 512, 128, 4
TURNS = 3
KINDS = {"vmap float32": "float32", "recorded float32": "float32", "recorded bfloat16": "bfloat16"}


class UncheckedBudget(Budget):
    """A budget that is not verified: steps are timed here, and nothing is promised."""

    def verify(self) -> None:
        """Do nothing."""


def build_model(device: str, **options: Any) -> nn.Module:
    """Return the network, the same each time."""
    torch.manual_seed(0)
    return models.build(MODEL, **OPTIONS, **options).to(device)


def make_batch(rows: int, views: int, device: str) -> tuple[Tensor, Tensor]:
    """Return random images and labels."""
    shape = (rows, views, 3, 32, 32) if views > 1 else (rows, 3, 32, 32)
    return torch.randn(shape, device=device), torch.randint(10, (rows,), device=device)


def make_pomona_step(kind: str, rows: int, views: int, device: str, **options: Any) -> Step:
    """Return a function that takes one private step with Pomona, in one of `KINDS`."""
    model, (x, y) = build_model(device, **options), make_batch(rows, views, device)
    budget = UncheckedBudget(8.0, 1e-5, rows, rows, 10**6, 0.0, 1.0, 0.0, ((10**6, 8.0),))
    micro = min(VMAP_MICRO // views if kind.startswith("vmap") else MICRO, rows)
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        budget,
        method="dpsgd",
        micro=micro,
        views=views,
        precision=KINDS[kind],
    )
    if kind.startswith("vmap"):
        step.gradients.compute = compute_per_example_gradients

    def work() -> None:
        drawn = step.draw()
        step(x[drawn], y[drawn])

    return work


def make_opacus_step_with_tf32(clipping: str, dtype: torch.dtype, rows: int, device: str) -> Step:
    """Return a function that takes one private step with Opacus and TF32."""
    step = make_opacus_step(build_model(device), *make_batch(rows, 1, device), clipping, dtype)

    def work() -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        step()
        torch.backends.cuda.matmul.allow_tf32 = False

    return work


def measure_steps(steps: dict[str, Callable[[], Step]], rows: int, views: int, device: str) -> list[dict[str, Any]]:
    """Return the time and the memory of each step; a step that fails has the reason instead."""
    ready: dict[str, Step] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, make in steps.items():
        found[name] = {"step": name, "rows": rows, "views": views}
        try:
            ready[name] = make()
            ready[name]()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                ready[name]()
                found[name]["gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
                torch.cuda.empty_cache()
        except Exception as error:
            ready.pop(name, None)
            found[name]["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        print(found[name], flush=True)
    for name, times in time_in_turns(ready, TURNS, 1, device, PRIVATE_WARM_UP).items():
        seconds = statistics.median(times)
        found[name] |= {"milliseconds": 1000 * seconds, "views_per_second": rows * views / seconds}
        print(f"{name:28} {1000 * seconds:9.1f} ms  {rows * views / seconds:10,.0f} views/s", flush=True)
    return list(found.values())


def measure_independence(rows: int, views: int, device: str) -> list[dict[str, Any]]:
    """Return for each arithmetic the first parameter whose gradients depend on the place or the other rows, or None."""
    model = build_model(device, weight_standardization=True)
    parameters, batch = dict(model.named_parameters()), make_batch(rows, views, device)
    results = []
    for name, dtype, tf32 in (("bfloat16", torch.bfloat16, False), ("float32", None, False), ("TF32", None, True)):

        def compute(inputs: Tensor, targets: Tensor, dtype: torch.dtype | None = dtype, tf32: bool = tf32) -> Any:
            with repeatable_kernels():
                torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
                return compute_recorded_gradients(
                    model, F.cross_entropy, parameters, inputs, targets, views, dtype=dtype
                )[0]

        results.append({"arithmetic": name, "rows": rows, "dependent": find_dependent_parameter(compute, *batch)})
        print(results[-1], flush=True)
    return results


def measure_errors(device: str) -> float:
    """Return the largest relative error of a per-example gradient in bfloat16, as the norm of a difference."""
    model = build_model(device, weight_standardization=True)
    parameters, (x, y) = dict(model.named_parameters()), make_batch(8, 2, device)
    found, expected = (
        compute_recorded_gradients(model, F.cross_entropy, parameters, x, y, 2, dtype=dtype)[0]
        for dtype in (torch.bfloat16, None)
    )
    ours, theirs = (torch.cat([part.float().flatten(1) for part in each.values()], 1) for each in (found, expected))
    for name, part in found.items():
        error = float((part.float() - expected[name]).norm() / expected[name].norm())
        if error > 0.05:
            print(f"{name}: relative error {error:.3f}")
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


def profile_step(step: Step, path: Path) -> None:
    """Write the time of the kernels of a step to a file, and print the first."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table)
    print("\n".join(line[:92] + line[-90:] for line in table.splitlines()[:40]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--opacus", type=Path, help="a folder with Opacus and opt_einsum")
    parser.add_argument("--profile", type=Path, help="write a profile of the fastest step here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=ROWS)
    options = parser.parse_args()
    rows, device = options.rows, options.device
    steps: dict[str, Callable[[], Step]] = {
        kind: partial(make_pomona_step, kind, rows, VIEWS, device, weight_standardization=True) for kind in KINDS
    }
    print(f"relative error of gradients in bfloat16: {measure_errors(device):.4f}", flush=True)
    results: dict[str, Any] = {
        "independent": measure_independence(rows, VIEWS, device),
        "views": measure_steps(steps, rows, VIEWS, device),
    }
    if options.profile:
        profile_step(
            make_pomona_step("recorded bfloat16", rows, VIEWS, device, weight_standardization=True), options.profile
        )
    if options.opacus:
        sys.path.insert(0, str(options.opacus))
        steps = {f"Pomona, {kind}": partial(make_pomona_step, kind, rows, 1, device) for kind in list(KINDS)[1:]}
        for clipping in CLIPPING:
            for name, dtype in (("TF32", torch.float32), ("bfloat16", torch.bfloat16)):
                step = partial(make_opacus_step_with_tf32, clipping, dtype, rows, device)
                steps[f"Opacus, {clipping}, {name}"] = step
        results["opacus"] = measure_steps(steps, rows, 1, device)
    write_record(options.json, **results)


if __name__ == "__main__":
    main()
