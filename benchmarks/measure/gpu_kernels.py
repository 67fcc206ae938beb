"""Time products with sparse matrices on a GPU against cuBLAS, cuSPARSE and 2:4, with cold and with warm caches.

    python benchmarks/measure/gpu_kernels.py [--json FILE] [--shapes 8192x8192] [--sparsities 0.5 0.9] [--batches 1 8]

All sides keep the same number of weights, but 2:4, which keeps half of them. The rows of unstructured matrices keep
unequal counts, as those that DPF leaves. Every output is compared with float64 in the same run, all sides take turns,
and times are medians of the device alone: captured graphs between two events. *cold* is after the L2 cache was emptied,
*warm* each side right after itself.

Targets on an H200 (float16, 8192², batch 1, cold, over cuBLAS): unstructured ≥ 1.5 / 2.2 / 4.5× at 50 / 70 / 90 %.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from record_file import write_record
from torch import Tensor

from pomona.lab.kernels.implementations import (
    DENSE,
    UNSTRUCTURED,
    Implementation,
    first_line,
    is_rounding,
    make_implementations,
)
from pomona.sparse.timing import make_cache_flusher, median_seconds

BLOCK = 32  # columns of a balanced block
STATES = ("cold", "warm")
TARGETS = {0.5: 1.5, 0.7: 2.2, 0.9: 4.5}  # by sparsity, at 8192² and batch 1
SKIPPED = ("block-sparse",)  # sides of `pomona bench` that are not timed here


@dataclass(frozen=True)
class Timing:
    """The time of one side for one matrix and batch size; without seconds where it failed."""

    rows: int
    columns: int
    sparsity: float
    batch: int
    state: str
    side: str
    seconds: float | None
    speedup: float | None  # over the dense product
    nbytes: int | None  # of the weight
    error: float | None  # the largest difference from float64, relative to the largest value
    note: str = ""


def make_sides(weight: Tensor, sparsity: float) -> tuple[list[Implementation], dict[str, str]]:
    """Return every side for one matrix, and name → reason of those that are not available."""
    sides, missing = make_implementations(weight, BLOCK, sparsity)
    sides = [side for side in sides if not side.name.startswith(SKIPPED)]
    return sides, {name: why for name, why in missing.items() if name not in SKIPPED}


def find_error(side: Implementation, x: Tensor) -> float:
    """Return the largest error of an output compared with float64, relative to the largest value."""
    exact = x.double() @ side.weight.double().T
    return float((side.run(side.arrange(x)).double() - exact).abs().max() / exact.abs().max())


def time_matrix(
    weight: Tensor, sparsity: float, batches: Sequence[int], states: Sequence[str], patience: float
) -> Iterator[Timing]:
    """Yield the timings of one matrix."""
    sides, missing = make_sides(weight, sparsity)
    flush = make_cache_flusher(weight.device)
    for batch in batches:
        x = torch.randn(batch, weight.shape[1], device=weight.device).to(weight.dtype)
        working, failed = [], dict(missing)
        for side in sides:
            try:
                working.append((side, find_error(side, x)))
            except (RuntimeError, NotImplementedError, ValueError) as error:
                failed[side.name] = first_line(error)
        calls = [partial(side.run, side.arrange(x)) for side, _ in working]
        for state in states:
            place = (*weight.shape, sparsity, batch, state)
            before = flush if state == "cold" else None
            times = median_seconds(calls, weight.device, before=before, patience=patience)
            dense = times[[side.name for side, _ in working].index(DENSE)]
            best: dict[str, Timing] = {}
            for (side, error), seconds in zip(working, times, strict=True):
                note = "" if is_rounding(error, x.dtype) else "inaccurate"
                one = Timing(*place, side.name, seconds, dense / seconds, side.nbytes, error, note)
                found = best.get(side.name)
                if found is None or (one.note, seconds) < (found.note, found.seconds):
                    best[side.name] = one
            yield from best.values()
            yield from (Timing(*place, name, None, None, None, None, why) for name, why in failed.items())


def print_table(timings: Sequence[Timing]) -> None:
    """Print the microseconds of every side and how many times faster than dense it is, a line for each case."""
    names = list(dict.fromkeys(t.side for t in timings))
    print("matrix       zeros batch caches " + "".join(f"{name[:18]:>20}" for name in names))
    lines: dict[tuple[Any, ...], dict[str, Timing]] = {}
    for t in timings:
        lines.setdefault((t.rows, t.columns, t.sparsity, t.batch, t.state), {})[t.side] = t
    for (rows, columns, sparsity, batch, state), found in lines.items():
        cells = [describe_cell(found.get(name)) for name in names]
        print(f"{f'{rows}x{columns}':12} {sparsity:5.0%} {batch:5} {state:6} " + "".join(f"{c:>20}" for c in cells))


def describe_cell(timing: Timing | None) -> str:
    """Return the microseconds and the speed-up of a timing, marked where the output is inaccurate."""
    if timing is None or timing.seconds is None:
        return "-"
    return f"{1e6 * timing.seconds:.1f} ({timing.speedup:.2f}x){'!' * bool(timing.note)}"


def compare_with_targets(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """Return the targets that this run can answer, and what was reached."""
    chosen = [
        t for t in timings if (t.rows, t.columns, t.batch, t.state, t.side) == (8192, 8192, 1, "cold", UNSTRUCTURED)
    ]
    return [
        {"sparsity": t.sparsity, "target": TARGETS[t.sparsity], "reached": t.speedup}
        for t in chosen
        if t.sparsity in TARGETS and t.speedup is not None
    ]


@torch.inference_mode()
def measure_all(
    shapes: Sequence[tuple[int, int]],
    sparsities: Sequence[float],
    batches: Sequence[int],
    states: Sequence[str],
    patience: float,
    device: str,
) -> dict[str, Any]:
    """Measure all matrices, print the results and return them."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    timings: list[Timing] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's on sparse tensors
        for (rows, columns), sparsity in product(shapes, sparsities):
            weight = (torch.randn(rows, columns, device=device) / columns**0.5).to(dtype)
            timings += time_matrix(weight, sparsity, batches, states, patience)
    for failed in {(t.side, t.note) for t in timings if t.note}:
        print(*failed, sep=": ")
    print_table(timings)
    for answer in (answers := compare_with_targets(timings)):
        met = "met" if answer["reached"] >= answer["target"] else "MISSED"
        print(f"{answer['sparsity']:.0%}: {answer['reached']:.2f}x, target {answer['target']}x: {met}")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "timings": [asdict(timing) for timing in timings], "targets": answers}


def parse_shape(text: str) -> tuple[int, int]:
    """Return the rows and columns of a text such as "4096x1024"."""
    rows, columns = map(int, text.split("x"))
    return rows, columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=[(8192, 8192)], help="such as 4096x4096")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.7, 0.9, 0.95], help="shares of zeros")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16], help="numbers of vectors")
    parser.add_argument("--states", nargs="+", default=STATES, choices=STATES, help="of the caches")
    parser.add_argument("--patience", type=float, default=0.5, help="seconds for each matrix, batch and state")
    parser.add_argument("--device", default="cuda", help="cpu is for trying the script out")
    options = parser.parse_args()
    results = measure_all(
        options.shapes, options.sparsities, options.batches, options.states, options.patience, options.device
    )
    write_record(options.json, **results)


if __name__ == "__main__":
    main()
