"""Time products with balanced matrices of few bits on a GPU against cuBLAS and dense matrices of few bits.

    python benchmarks/measure/quantized_gpu_kernels.py [--json FILE] [--shapes 16384x16384] [--batches 1 8 16]

The balanced matrices keep 3 of 32 weights, and all have the same mask; the dense ones keep every weight. Every output
is compared in the same run with float64 and the weight that the codes stand for. All sides take turns, and times are
medians of the device alone: captured graphs between two events. *cold* is after the L2 cache was emptied, *warm* each
side right after itself. torch's kernels for dense int4 and int8 take bfloat16 inputs, the other sides float16.

Target on an H200 (16384², batch 1, cold, over cuBLAS in float16): balanced int4 ≥ 8×.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dense_quantized import DenseCodes, torch_int4, torch_int8, triton_int8
from gpu_kernels import STATES, Timing, find_error, parse_shape, print_table
from record_file import write_record
from torch import Tensor
from torch.nn.functional import linear

from pomona.lab.kernels.implementations import DENSE, Implementation, first_line, is_rounding
from pomona.patterns.balanced import select_per_block
from pomona.sparse import BalancedTensor, QuantizedBalancedTensor
from pomona.sparse.timing import make_cache_flusher, median_seconds

BLOCK, KEPT = 32, 3
SHAPES = [(16384, 16384), (8192, 8192), (5120, 13824), (13824, 5120), (4096, 4096)]
INT4, TARGET_CASE, TARGET = "balanced int4", (16384, 16384, 1, "cold"), 8.0
TRITON_SIZES = [(4, 1024, 4), (8, 512, 4), (16, 256, 4), (32, 128, 4)]  # rows, columns and warps of a program
FAILURES = (RuntimeError, NotImplementedError, ValueError, ImportError, AttributeError)


def make_sides(weight: Tensor) -> tuple[list[Implementation], dict[str, str]]:
    """Return every side for one matrix of float32, and name → reason of those that are not available."""
    pruned = torch.where(select_per_block(weight.abs(), BLOCK, KEPT), weight, 0)
    half = BalancedTensor.from_dense(pruned.half(), BLOCK)
    dense = weight.half()
    sides = [Implementation(DENSE, lambda x: linear(x, dense), dense, dense.nbytes)]
    missing: dict[str, str] = {}
    peers: list[tuple[str, Callable[[], DenseCodes], torch.dtype]] = [
        ("dense int4", partial(torch_int4, weight), torch.bfloat16),
        ("dense int8", partial(torch_int8, weight), torch.bfloat16),
        *(("dense int8", partial(triton_int8, weight, *size), torch.float16) for size in TRITON_SIZES),
    ]
    for name, make, dtype in peers:
        try:
            codes = make()
            sides.append(Implementation(name, codes.run, codes.weight, codes.nbytes, partial(Tensor.to, dtype=dtype)))
        except FAILURES as error:
            missing[name] = first_line(error)
    sides.append(Implementation("balanced float16", half.linear, half.dense(), half.nbytes))
    for values in ("int8", "int4"):
        packed = QuantizedBalancedTensor.from_dense(pruned, BLOCK, values)
        sides.append(Implementation(f"balanced {values}", packed.linear, packed.dense(), packed.nbytes))
    return sides, missing


def time_matrix(weight: Tensor, batches: Sequence[int], states: Sequence[str], patience: float) -> Iterator[Timing]:
    """Yield the timings of one matrix; of several sides with one name, the fastest."""
    sides, missing = make_sides(weight)
    flush = make_cache_flusher(weight.device)
    for batch in batches:
        x = torch.randn(batch, weight.shape[1], device=weight.device).half()
        working, failed = [], dict(missing)
        for side in sides:
            try:
                working.append((side, find_error(side, x)))
            except FAILURES as error:
                failed[side.name] = first_line(error)
        calls = [partial(side.run, side.arrange(x)) for side, _ in working]
        for state in states:
            place = (*weight.shape, 1 - KEPT / BLOCK, batch, state)
            times = median_seconds(calls, weight.device, before=flush if state == "cold" else None, patience=patience)
            dense = times[0]
            best: dict[str, Timing] = {}
            for (side, error), seconds in zip(working, times, strict=True):
                note = "" if is_rounding(error, side.arrange(x).dtype) else "inaccurate"
                one = Timing(*place, side.name, None, seconds, dense / seconds, side.nbytes, error, note)
                found = best.get(side.name)
                if found is None or (one.note, seconds) < (found.note, found.seconds):
                    best[side.name] = one
            yield from best.values()
            for name, why in failed.items():
                if name not in best:
                    yield Timing(*place, name, None, None, None, None, None, why)


def compare_with_target(timings: Sequence[Timing]) -> dict[str, Any] | None:
    """Return the target and what was reached, where this run can answer it."""
    for t in timings:
        if (t.rows, t.columns, t.batch, t.state) == TARGET_CASE and t.side == INT4 and t.speedup is not None:
            return {"case": TARGET_CASE, "target": TARGET, "reached": t.speedup}
    return None


@torch.no_grad()  # not inference_mode, in which nothing that the kernels arrange is kept
def measure_all(
    shapes: Sequence[tuple[int, int]], batches: Sequence[int], states: Sequence[str], patience: float, device: str
) -> dict[str, Any]:
    """Measure all matrices, print the results and return them."""
    timings: list[Timing] = []
    for rows, columns in shapes:
        weight = torch.randn(rows, columns, device=device) / columns**0.5
        timings += time_matrix(weight, batches, states, patience)
    for failed in {(t.side, t.note) for t in timings if t.note}:
        print(*failed, sep=": ")
    print_table(timings)
    answer = compare_with_target(timings)
    if answer:
        met = "met" if answer["reached"] >= TARGET else "MISSED"
        print(f"{INT4}: {answer['reached']:.2f}x, target {TARGET}x: {met}")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "timings": [asdict(timing) for timing in timings], "target": answer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=SHAPES, help="such as 4096x4096")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16], help="numbers of vectors")
    parser.add_argument("--states", nargs="+", default=STATES, choices=STATES, help="of the caches")
    parser.add_argument("--patience", type=float, default=0.5, help="seconds for each matrix, batch and state")
    parser.add_argument("--device", default="cuda", help="cpu is for trying the script out")
    options = parser.parse_args()
    results = measure_all(options.shapes, options.batches, options.states, options.patience, options.device)
    write_record(options.json, **results)


if __name__ == "__main__":
    main()
