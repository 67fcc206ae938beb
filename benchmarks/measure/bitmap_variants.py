"""Time divisions of the work of the kernel for matrices packed with bitmaps on a GPU, from which it chooses one.

    python benchmarks/measure/bitmap_variants.py [--json FILE] [--shape 8192x8192] [--batches 1 8 16 64]

All variants of a matrix take turns, with emptied caches, together with the dense product; the first variant is the one
that the kernel chooses. Every output is compared with float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from record_file import write_record
from torch import Tensor
from torch.nn.functional import linear

from pomona.lab.kernels.implementations import is_rounding, prune_unequal_rows
from pomona.sparse.bitmap import BitmapTensor, count_steps
from pomona.sparse.cuda import bitmap_tiles
from pomona.sparse.cuda.bitmap_tiles import BitmapConfig
from pomona.sparse.timing import make_cache_flusher, median_seconds

# warps, slice_k, split_k, cluster and stages
DIVISIONS = (
    (16, 4, 4, 2, 2),
    (16, 4, 4, 2, 4),
    (16, 8, 2, 2, 2),
    (16, 2, 8, 2, 2),
    (16, 4, 4, 4, 2),
    (8, 2, 4, 2, 3),
    (8, 4, 4, 2, 2),
    (8, 1, 8, 2, 3),
)


@dataclass(frozen=True)
class Timing:
    """The time of one variant for one matrix."""

    sparsity: float
    batch: int
    variant: BitmapConfig | None  # None for the dense product
    nbytes: int
    seconds: float
    error: float


def find_variants(packed: BitmapTensor, batch: int) -> list[BitmapConfig]:
    """Return the variant that the kernel chooses for a matrix, and the others that fit the device."""
    device = torch.cuda.get_device_properties(packed.device)
    slabs, steps = count_steps(*packed.matrix)
    limit = device.shared_memory_per_block_optin
    chosen = bitmap_tiles.choose_config(batch, slabs, steps, packed.most, device.multi_processor_count, True, limit)
    if chosen is None:
        return []
    names = "warps", "slice_k", "split_k", "cluster", "stages"
    variants = [replace(chosen, **dict(zip(names, division, strict=True))) for division in DIVISIONS]
    pieces = bitmap_tiles.stage_pieces(packed.most)
    return list(dict.fromkeys([chosen, *(v for v in variants if v.shared_bytes(steps, pieces) <= limit)]))


def make_call(packed: BitmapTensor, x: Tensor, variant: BitmapConfig) -> tuple[Callable[[], None], Tensor]:
    """Return a call of the kernel in one variant, and its output; raise RuntimeError where it is not compiled."""
    y = x.new_full((len(x), packed.matrix[0]), torch.nan)
    original = bitmap_tiles.choose_config
    bitmap_tiles.choose_config = lambda *_: variant  # type: ignore[assignment]
    bitmap_tiles.prepare_launch.cache_clear()
    slabs, steps = count_steps(*packed.matrix)
    prepared = bitmap_tiles.prepare_launch(x.dtype, len(x), slabs, steps, packed.most, x.get_device())
    bitmap_tiles.choose_config = original
    if prepared is None:
        raise RuntimeError("not compiled")

    def call() -> None:
        # Every variant has a launch of its own, in place of the one that is kept for these sizes.
        bitmap_tiles.prepare_launch = lambda *_: prepared  # type: ignore[assignment]
        bitmap_tiles.multiply(x, *packed.parts, None, y, x.shape[1], packed.most, False)

    return call, y


def time_variants(weight: Tensor, sparsity: float, batch: int, patience: float) -> Iterator[Timing]:
    """Yield the timings of all variants for one matrix and batch size, the dense product first."""
    pruned = prune_unequal_rows(weight, sparsity)
    packed = BitmapTensor.from_dense(pruned)
    x = torch.randn(batch, weight.shape[1], device=weight.device).to(weight.dtype)
    exact = x.double() @ pruned.double().T
    found: list[tuple[BitmapConfig | None, int, float]] = [(None, weight.nbytes, 0.0)]
    calls: list[Callable[[], object]] = [partial(linear, x, pruned)]
    prepare = bitmap_tiles.prepare_launch
    for variant in find_variants(packed, batch):
        bitmap_tiles.prepare_launch = prepare  # type: ignore[assignment]
        try:
            call, y = make_call(packed, x, variant)
            call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{variant} fails for {sparsity:.0%} and batch {batch}: {error}")
            continue
        found.append((variant, packed.nbytes, float((y.double() - exact).abs().max() / exact.abs().max())))
        calls.append(call)
    times = median_seconds(calls, weight.device, before=make_cache_flusher(weight.device), patience=patience)
    bitmap_tiles.prepare_launch = prepare  # type: ignore[assignment]
    for (variant, nbytes, error), seconds in zip(found, times, strict=True):
        yield Timing(sparsity, batch, variant, nbytes, seconds, error)


def print_table(timings: Sequence[Timing], dtype: torch.dtype) -> None:
    """Print the microseconds of each variant and how many times faster than dense it is, a line for each."""
    dense = {(t.sparsity, t.batch): t.seconds for t in timings if t.variant is None}
    for t in timings:
        v = t.variant
        name = (
            "dense" if v is None else f"{v.vector_tiles} {v.warps:2} {v.slice_k} {v.split_k:2} {v.cluster} {v.stages}"
        )
        mark = "" if is_rounding(t.error, dtype) else f" WRONG {t.error:.1e}"
        rate = t.nbytes / t.seconds / 1e12
        speedup = dense[t.sparsity, t.batch] / t.seconds
        print(
            f"{t.sparsity:.0%} n={t.batch:<3} {name:16} {1e6 * t.seconds:7.1f} µs {speedup:5.2f}x {rate:.1f} TB/s{mark}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--shape", default="8192x8192", help="of the matrix")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.7, 0.9], help="shares of zeros")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="numbers of vectors")
    parser.add_argument("--patience", type=float, default=0.3, help="seconds for each matrix and batch")
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
