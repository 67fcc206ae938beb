"""Time variants of the kernel for matrices packed with gaps on a GPU, from which its defaults were chosen.

    python benchmarks/measure/gap_variants.py [--json FILE] [--shape 8192x8192] [--batches 1 8]

A variant is the number of chunks of a part, of warps of a thread block, of thread blocks on a multiprocessor, and of
parts that a warp loads ahead. All
variants of a matrix take turns, with emptied caches, together with the dense product; every output is compared with
float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record_file import write_record
from torch import Tensor
from torch.nn.functional import linear

from pomona.lab.kernels.implementations import is_rounding, prune_unequal_rows
from pomona.sparse import gaps
from pomona.sparse.cuda import gap_gather
from pomona.sparse.cuda.gap_gather import GapConfig
from pomona.sparse.timing import make_cache_flusher, median_seconds


class Variant(NamedTuple):
    """One division of the work."""

    part_chunks: int
    warps: int
    min_blocks: int
    prefetched_parts: int


# By vectors of a launch.
VARIANTS = {
    1: [
        Variant(*one)
        for one in (
            (2, 16, 2, 1),
            (1, 16, 2, 2),
            (1, 16, 2, 1),
            (2, 16, 1, 2),
            (2, 12, 2, 2),
            (1, 8, 4, 3),
            (1, 20, 1, 4),
        )
    ],
    8: [Variant(*one) for one in ((2, 16, 1, 1), (1, 16, 1, 2), (2, 12, 1, 2))],
}


@dataclass(frozen=True)
class Timing:
    """The time of one variant for one matrix."""

    sparsity: float
    batch: int
    variant: Variant | None  # None for the dense product
    bits: int | None
    nbytes: int
    seconds: float
    error: float


def make_call(packed: gaps.GapTensor, x: Tensor, variant: Variant) -> tuple[Any, Tensor] | None:
    """Return a call of the kernel in one variant and its output; None where it cannot be compiled or launched."""
    rows, columns = packed.matrix
    y = x.new_full((len(x), rows), torch.nan)
    vectors = min(len(x), gap_gather.MAX_LAUNCH_VECTORS)
    config = GapConfig(vectors, variant.warps, variant.min_blocks, variant.prefetched_parts)
    gap_gather.choose_config = lambda *_: config  # type: ignore[assignment]
    gap_gather.PART_CHUNKS = variant.part_chunks  # type: ignore[misc]
    gap_gather.prepare_launch.cache_clear()
    prepared = gap_gather.prepare_launch(x.dtype, len(x), columns, len(packed.values), packed.gap_bits, x.get_device())
    if prepared is None:
        return None
    _, blocks, kernel = prepared
    exchange = torch.empty(2 * blocks * 2 * gaps.LANES * vectors, device=x.device)
    arrivals = torch.zeros(2 * blocks, device=x.device, dtype=torch.int32)
    sizes = rows, columns, len(packed.lanes), *divmod(len(packed.values), blocks)

    def call() -> None:
        for first in range(0, len(x), vectors):
            some, their_y = x[first : first + vectors], y[first : first + vectors]
            tensors = (*packed.parts, some, None, their_y, exchange, arrivals)
            kernel((blocks, 1, 1), tensors, (*sizes, len(some), x.stride(0), 1, rows, 0, 0))

    return call, y


def time_variants(weight: Tensor, sparsity: float, batch: int, patience: float) -> Iterator[Timing]:
    """Yield the timings of all variants for one matrix and batch size, the dense product first."""
    pruned = prune_unequal_rows(weight, sparsity)
    x = torch.randn(batch, weight.shape[1], device=weight.device).to(weight.dtype)
    exact = x.double() @ pruned.double().T
    found: list[tuple[Variant | None, int | None, int, float]] = [(None, None, weight.nbytes, 0.0)]
    calls = [partial(linear, x, pruned)]
    packed_by_chunks: dict[int, gaps.GapTensor] = {}
    for variant in VARIANTS[min(batch, gap_gather.MAX_LAUNCH_VECTORS)]:
        gaps.PART_CHUNKS = variant.part_chunks  # type: ignore[misc]
        if variant.part_chunks not in packed_by_chunks:
            packed_by_chunks[variant.part_chunks] = gaps.GapTensor.from_dense(pruned)
        packed = packed_by_chunks[variant.part_chunks]
        made = make_call(packed, x, variant)
        if made is None:
            print(f"{variant} cannot be used for {sparsity:.0%} and batch {batch}")
            continue
        call, y = made
        try:
            call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{variant} fails for {sparsity:.0%} and batch {batch}: {error}")
            continue
        error_size = float((y.double() - exact).abs().max() / exact.abs().max())
        found.append((variant, packed.gap_bits, packed.nbytes, error_size))
        calls.append(call)
    times = median_seconds(calls, weight.device, before=make_cache_flusher(weight.device), patience=patience)
    for (variant, bits, nbytes, error_size), seconds in zip(found, times, strict=True):
        yield Timing(sparsity, batch, variant, bits, nbytes, seconds, error_size)


def print_table(timings: Sequence[Timing], dtype: torch.dtype) -> None:
    """Print the microseconds of each variant, a line for each, and how many times faster than dense it is."""
    cases = list(dict.fromkeys((t.sparsity, t.batch) for t in timings))
    dense = {(t.sparsity, t.batch): t.seconds for t in timings if t.variant is None}
    print("part warps blocks ahead" + "".join(f"{f'{s:.0%} n={n}':>22}" for s, n in cases))
    print("dense                  " + "".join(f"{1e6 * dense[case]:>22.1f}" for case in cases))
    for variant in dict.fromkeys(t.variant for t in timings if t.variant is not None):
        found = {(t.sparsity, t.batch): t for t in timings if t.variant == variant}
        cells = []
        for case in cases:
            one = found.get(case)
            mark = "" if one is None or is_rounding(one.error, dtype) else "!"
            rate = one.nbytes / one.seconds / 1e12 if one else 0.0
            cells.append(f"{1e6 * one.seconds:.1f} {dense[case] / one.seconds:.2f}x {rate:.1f}T{mark}" if one else "-")
        print("{:4}{:6}{:7}{:6}".format(*variant) + "".join(f"{cell:>22}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--shape", default="8192x8192", help="of the matrix")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.7, 0.9, 0.95], help="shares of zeros")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], choices=VARIANTS, help="numbers of vectors")
    parser.add_argument("--patience", type=float, default=1.0, help="seconds for each matrix and batch")
    options = parser.parse_args()
    rows, columns = map(int, options.shape.split("x"))
    timings: list[Timing] = []
    with torch.inference_mode():
        for sparsity, batch in product(options.sparsities, options.batches):
            weight = (torch.randn(rows, columns, device="cuda") / columns**0.5).half()
            timings += time_variants(weight, sparsity, batch, options.patience)
    print_table(timings, torch.float16)
    write_record(options.json, device=torch.cuda.get_device_name(), timings=[asdict(t) for t in timings])


if __name__ == "__main__":
    main()
