"""Time products with sparse matrices on a GPU against cuBLAS, cuSPARSE and 2:4, with cold and with warm caches.

    python benchmarks/measure/gpu_kernels.py [--json FILE] [--shapes 8192x8192] [--sparsities 0.5 0.9] [--batches 1 8]

All sides keep the same number of weights, but 2:4, which keeps half of them. The rows of unstructured matrices keep
unequal counts, as those that DPF leaves. Every output is compared with float64 in the same run, all sides take turns,
and times are medians of the device alone: captured graphs between two events. *cold* is after the L2 cache was emptied,
*warm* each side right after itself. Of several kernels with one name the fastest counts.

The sides that begin with "compress" are what `pm.compress` chooses for the balanced and for the unstructured matrix by
timings of its own, before these: the time is that of the kernel it chose, or of the dense product. With cold caches it
times layers of a model that does not fit the L2 cache, with warm ones those of a model that does.

The targets on an H200 (float16, cold, over cuBLAS) are TARGETS, and that nothing compress chose is slower than dense.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from record_file import write_record
from torch import Tensor, nn

from pomona.lab.kernels.implementations import (
    BALANCED,
    DENSE,
    UNSTRUCTURED,
    Implementation,
    first_line,
    is_rounding,
    make_implementations,
)
from pomona.models.example_inputs import ModelInputs
from pomona.sparse.compress import time_layer
from pomona.sparse.layers import build_packed_layer
from pomona.sparse.timing import make_cache_flusher, median_seconds

BLOCK = 32  # columns of a balanced block
STATES = ("cold", "warm")
SHAPES = ((3000, 1536), (777, 4032), (5120, 13_824), (13_824, 5120), (8192, 8192), (16_384, 16_384))
# Speed-ups over the dense product with cold caches, by side, rows, columns, sparsity and batch.
TARGETS = {
    (UNSTRUCTURED, 8192, 8192, 0.5, 1): 1.5,
    (UNSTRUCTURED, 8192, 8192, 0.7, 1): 2.2,
    (UNSTRUCTURED, 8192, 8192, 0.9, 1): 4.5,
    (BALANCED, 5120, 13_824, 0.9, 1): 4.5,
    (BALANCED, 16_384, 16_384, 0.9, 1): 6.0,
    (BALANCED, 16_384, 16_384, 0.9, 16): 3.0,
}
CHOICE_PATIENCE = 0.02  # seconds for which compress times a layer
THREADS = 12  # that compile kernels
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
    kind: str | None  # the packed format
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


@torch.inference_mode()
def try_side(side: Implementation, x: Tensor) -> float | str:
    """Return the error of a side's output, or why there is none."""
    try:
        return find_error(side, x)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return first_line(error)


def try_all(
    sides: Sequence[Implementation], inputs: Sequence[Tensor]
) -> list[tuple[list[tuple[Implementation, float]], dict[str, str]]]:
    """Return for each input the sides that work with their errors, and name → reason of the others.

    Threads call them at the same time, because the first call of a kernel compiles it.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        results = [pool.map(partial(try_side, x=x), sides) for x in inputs]
        tried = [list(zip(sides, result, strict=True)) for result in results]
    return [
        (
            [(side, error) for side, error in one if isinstance(error, float)],
            {side.name: error for side, error in one if isinstance(error, str)},
        )
        for one in tried
    ]


def choose_side(name: str, sides: Sequence[Implementation], x: Tensor, flush: Callable[[], None] | None) -> int:
    """Return the number of the side that `compress` chooses among those with this name and the dense product."""
    numbers = [number for number, side in enumerate(sides) if side.name == name]
    weight = sides[numbers[0]].weight
    dense = nn.Linear(*weight.T.shape, bias=False, device="meta")
    dense.weight = nn.Parameter(weight, requires_grad=False)
    layers = {str(number): build_packed_layer(dense, {"weight": sides[number].packed}) for number in numbers}
    times = time_layer(dense, layers, None, weight, ModelInputs((x,), {}), flush, CHOICE_PATIENCE)
    best = min(times, key=times.__getitem__)
    return int(best) if best in layers else [side.name for side in sides].index(DENSE)


def time_matrix(
    weight: Tensor, sparsity: float, batches: Sequence[int], states: Sequence[str], patience: float
) -> Iterator[Timing]:
    """Yield the timings of one matrix."""
    sides, missing = make_sides(weight, sparsity)
    flush = make_cache_flusher(weight.device)
    inputs = [torch.randn(batch, weight.shape[1], device=weight.device).to(weight.dtype) for batch in batches]
    for x, (working, failed) in zip(inputs, try_all(sides, inputs), strict=True):
        usable = [side for side, _ in working]
        calls = [partial(side.run, side.arrange(x)) for side in usable]
        for state in states:
            place = (*weight.shape, sparsity, len(x), state)
            before = flush if state == "cold" else None
            choices = {f"compress, {name}": choose_side(name, usable, x, before) for name in (BALANCED, UNSTRUCTURED)}
            times = median_seconds(calls, weight.device, before=before, patience=patience)
            yield from describe_sides(place, working, times, choices, x.dtype)
            yield from (
                Timing(*place, name, None, None, None, None, None, why) for name, why in (missing | failed).items()
            )


def describe_sides(
    place: tuple[int, int, float, int, str],
    working: Sequence[tuple[Implementation, float]],
    times: Sequence[float],
    choices: Mapping[str, int],
    dtype: torch.dtype,
) -> Iterator[Timing]:
    """Yield the timings of the sides, the fastest one of each name, and of those that compress chose."""
    dense = times[[side.name for side, _ in working].index(DENSE)]
    timings = []
    for (side, error), seconds in zip(working, times, strict=True):
        note = "" if is_rounding(error, dtype) else "inaccurate"
        kind = side.packed.format_name if side.packed is not None else None
        timings.append(Timing(*place, side.name, kind, seconds, dense / seconds, side.nbytes, error, note))
    for name in dict.fromkeys(t.side for t in timings):
        yield min((t for t in timings if t.side == name), key=lambda t: (t.note, t.seconds))
    yield from (replace(timings[number], side=name) for name, number in choices.items())


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
    reached = {
        (t.side, t.rows, t.columns, t.sparsity, t.batch): t.speedup
        for t in timings
        if t.state == "cold" and t.speedup is not None
    }
    answers = [
        {"target": f"{side} {rows}×{columns}, {sparsity:.0%} zeros, batch {batch}", "asked": asked, "reached": found}
        for (side, rows, columns, sparsity, batch), asked in TARGETS.items()
        if (found := reached.get((side, rows, columns, sparsity, batch))) is not None
    ]
    chosen = [found for (side, *_), found in reached.items() if side.startswith("compress")]
    return [*answers, {"target": "the slowest that compress chose", "asked": 1.0, "reached": min(chosen)}]


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
        met = "met" if answer["reached"] >= answer["asked"] else "MISSED"
        print(f"{answer['target']}: {answer['reached']:.2f}x, asked {answer['asked']}x: {met}")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "timings": [asdict(timing) for timing in timings], "targets": answers}


def parse_shape(text: str) -> tuple[int, int]:
    """Return the rows and columns of a text such as "4096x1024"."""
    rows, columns = map(int, text.split("x"))
    return rows, columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=SHAPES, help="such as 4096x4096")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.7, 0.9, 0.95], help="shares of zeros")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 64], help="numbers of vectors")
    parser.add_argument("--states", nargs="+", default=STATES, choices=STATES, help="of the caches")
    parser.add_argument("--patience", type=float, default=0.1, help="seconds for each matrix, batch and state")
    parser.add_argument("--device", default="cuda", help="cpu is for trying the script out")
    options = parser.parse_args()
    results = measure_all(
        options.shapes, options.sparsities, options.batches, options.states, options.patience, options.device
    )
    write_record(options.json, **results)


if __name__ == "__main__":
    main()
