"""Time variants of the kernel for int8 and int4 codes on a GPU, from which its defaults were chosen.

    python benchmarks/measure/code_variants.py [--json FILE] [--shapes 16384x16384] [--batches 1 8] [--bits 4]

A variant is the size of a unit and a division of the work. All variants of a matrix take turns, with emptied caches,
together with the dense product; every output is compared with float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_kernels import parse_shape
from record_file import write_record
from torch import Tensor
from torch.nn.functional import linear

from pomona.lab.kernels.implementations import is_rounding
from pomona.patterns.balanced import select_per_block
from pomona.sparse import QuantizedBalancedTensor
from pomona.sparse.cuda import code_gather
from pomona.sparse.cuda.code_gather import GatherConfig, Tiles
from pomona.sparse.cuda.code_units import UnitLayout, arrange_units, make_layout
from pomona.sparse.format import LANES
from pomona.sparse.timing import make_cache_flusher, median_seconds

BLOCK, KEPT = 32, 3


class Variant(NamedTuple):
    """The size of a unit, and the rest of a configuration after the number of vectors."""

    unit_blocks: int
    warps: int
    stages: int
    min_blocks: int
    parts: int = 0  # thread blocks that share the columns; 0 for the choice of the kernel


# By vectors of a launch.
VARIANTS = {
    1: [
        Variant(32, 16, 3, 1),
        Variant(32, 16, 2, 1),
        Variant(32, 16, 1, 1),
        Variant(32, 8, 3, 2),
        Variant(32, 12, 4, 1),
        Variant(16, 32, 3, 1),
        Variant(16, 16, 3, 2),
        Variant(16, 16, 1, 2),
        Variant(16, 16, 4, 1),
        Variant(16, 16, 6, 1),
        Variant(16, 16, 2, 1),
        Variant(8, 32, 4, 1),
        Variant(8, 16, 8, 1),
    ],
    8: [
        Variant(32, 16, 1, 1),
        Variant(32, 16, 2, 1),
        Variant(16, 16, 1, 1),
        Variant(16, 16, 2, 1),
        Variant(16, 24, 1, 1),
        Variant(16, 8, 1, 2),
        Variant(8, 16, 1, 1),
        Variant(8, 24, 1, 1),
        Variant(32, 16, 1, 1, 4),
        Variant(16, 16, 1, 1, 8),
        Variant(16, 16, 1, 1, 4),
    ],
}


@dataclass(frozen=True)
class Timing:
    """The time of one variant for one matrix."""

    rows: int
    columns: int
    bits: int
    batch: int
    variant: Variant | None  # None for the dense product
    tiles: Tiles | None
    nbytes: int
    seconds: float
    error: float


def make_call(
    units: Tensor, layout: UnitLayout, x: Tensor, rows: int, variant: Variant
) -> tuple[Callable[[], Any], Tensor, Tiles] | None:
    """Return a call of the kernel in one variant, its output and tiles; None where it cannot be used."""
    vectors = min(len(x), 16 // x.element_size())
    gather = vectors > 1 or layout.block > LANES
    config = GatherConfig(vectors, *variant[1:4], int(gather))
    device, slices = x.get_device(), units.shape[1]
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tiles = code_gather.choose_tiles(config, layout, x.dtype, len(units), slices, processors)
    if variant.parts:
        tiles = Tiles(-(-len(units) * variant.parts // (processors * config.min_blocks)), variant.parts)
    if tiles is None or not code_gather.fits(config, layout, x.dtype, slices, tiles):
        return None
    launch = code_gather.compile_launch(config, tiles, layout, x.dtype, slices, device)
    if launch is None:
        return None
    y = x.new_full((len(x), rows), torch.nan)
    return partial(code_gather.run, launch, x, units, None, y, x.shape[1], False), y, tiles


def time_variants(
    packed: QuantizedBalancedTensor, weight: Tensor, batch: int, variants: Sequence[Variant], patience: float
) -> Iterator[Timing]:
    """Yield the timings of all variants for one matrix and batch size, the dense product first."""
    (rows, columns), blocks = packed.matrix, packed.values.shape[1]
    x = torch.randn(batch, columns, device=weight.device).to(weight.dtype)
    exact = x.double() @ packed.dense().double().T
    place = rows, columns, packed.bits, batch
    empty = torch.empty(rows, device=weight.device)
    floor = median_seconds(
        [empty.zero_], weight.device, before=make_cache_flusher(weight.device), patience=patience / 4
    )
    print(f"the smallest kernel: {1e6 * floor[0]:.1f} µs")
    found: list[tuple[Variant | None, Tiles | None, int, float]] = [(None, None, weight.nbytes, 0.0)]
    calls: list[Callable[[], Any]] = [partial(linear, x, weight)]
    arranged: dict[int, tuple[Tensor, UnitLayout]] = {}
    for variant in variants:
        if variant.unit_blocks not in arranged:
            layout = make_layout(packed.kept, packed.block, packed.bits, variant.unit_blocks, blocks, packed.span)
            arranged[variant.unit_blocks] = (
                arrange_units(*packed.parts, packed.block, packed.span, layout),
                layout,
            )
        units, layout = arranged[variant.unit_blocks]
        try:
            made = make_call(units, layout, x, rows, variant)
            if made is None:
                print(f"{variant} cannot be used for {place}")
                continue
            call, y, tiles = made
            call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{variant} fails for {place}: {error}")
            continue
        error_size = float((y.double() - exact).abs().max() / exact.abs().max())
        found.append((variant, tiles, units.nbytes, error_size))
        calls.append(call)
    times = median_seconds(calls, weight.device, before=make_cache_flusher(weight.device), patience=patience)
    for (variant, tiles, nbytes, error_size), seconds in zip(found, times, strict=True):
        yield Timing(*place, variant, tiles, nbytes, seconds, error_size)


def print_table(timings: Sequence[Timing], dtype: torch.dtype) -> None:
    """Print the microseconds of each variant, how many times faster than dense it is, and its rate in TB/s."""
    dense = {(t.rows, t.columns, t.bits, t.batch): t.seconds for t in timings if t.variant is None}
    for t in timings:
        case = t.rows, t.columns, t.bits, t.batch
        mark = "" if is_rounding(t.error, dtype) else f" WRONG {t.error:.1e}"
        name = "dense" if t.variant is None else f"{tuple(t.variant)} {tuple(t.tiles or ())}"
        speed, rate = dense[case] / t.seconds, t.nbytes / t.seconds / 1e12
        place = f"{t.rows}x{t.columns} int{t.bits} n={t.batch}"
        print(f"{place} {name:40} {1e6 * t.seconds:7.1f} {speed:6.2f}x {rate:.2f}T{mark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=[(16384, 16384)], help="such as 4096x4096")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], choices=VARIANTS, help="numbers of vectors")
    parser.add_argument("--bits", type=int, nargs="+", default=[4], choices=[4, 8], help="of a code")
    parser.add_argument("--patience", type=float, default=1.0, help="seconds for each matrix and batch")
    options = parser.parse_args()
    timings: list[Timing] = []
    with torch.no_grad():
        for (rows, columns), bits in product(options.shapes, options.bits):
            weight = torch.randn(rows, columns, device="cuda") / columns**0.5
            pruned = torch.where(select_per_block(weight.abs(), BLOCK, KEPT), weight, 0)
            packed = QuantizedBalancedTensor.from_dense(pruned, BLOCK, f"int{bits}")
            for batch in options.batches:
                timings += time_variants(packed, weight.half(), batch, VARIANTS[batch], options.patience)
    print_table(timings, torch.float16)
    write_record(options.json, device=torch.cuda.get_device_name(), timings=[asdict(t) for t in timings])


if __name__ == "__main__":
    main()
