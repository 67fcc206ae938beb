"""Time products with unstructured sparse matrices on a CPU against dense, CSR, balanced and DeepSparse products.

    python benchmarks/measure/unstructured_kernels.py [--json FILE] [--quick] [--deepsparse PYTHON] [--structured]

Matrices keep their largest weights after their rows were scaled unequally, so that rows keep unequal counts, as those
that DPF leaves. All sides but *balanced* keep the same weights, and that one as many. One thread is used, all sides
take turns, and every output is compared with float64. *warm* is each side right after itself, *cold* after all caches
were emptied. CSR is MKL's with 32-bit indices, for inputs in rows or transposed, whichever is faster. DeepSparse runs
in a process of its own (`deepsparse_peer.py`), with the PYTHON of an environment that has it. `--structured` adds
matrices of dense blocks with as many weights and, at 50 %, a 2:4 matrix.

Targets at 4096² and 90 %, warm: ≥ 3× CSR at batch 1 and ≥ 2× at batch 64, and faster than DeepSparse at both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from deepsparse_process import DeepSparse, start_deepsparse
from record_file import write_record
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pomona.lab.kernels.benchmark import benchmark_threads, describe_device
from pomona.lab.kernels.implementations import (
    BALANCED,
    DENSE,
    UNSTRUCTURED,
    Implementation,
    csr_implementations,
    is_rounding,
    measure_error,
    prune_unequal_rows,
)
from pomona.patterns import NM, Balanced, Block
from pomona.sparse import BalancedTensor, BlockTensor, TwoOfFourTensor, UnstructuredTensor
from pomona.sparse.timing import FLUSH_BYTES, flush_caches, warm_caches

SHAPES = ((4096, 4096), (3000, 1536), (777, 4032), (5120, 13824))
SPARSITIES = (0.5, 0.7, 0.9, 0.95, 0.99)
BATCHES = (1, 8, 16, 64)
STATES = ("warm", "cold")
LARGEST = 32 << 20  # weights of a matrix above which only one sparsity is measured
HALF = f"{UNSTRUCTURED}, float16"
BLOCKS = ((4, 4), (8, 8), (16, 16), (1, 16))
CSR, DEEPSPARSE = "CSR", "DeepSparse"
WARMUP_TURNS, MIN_TURNS = 1, 5
# The batch, the other side, and the smallest ratio of times that meets the target.
TARGETS = ((1, CSR, 3.0), (64, CSR, 2.0), (1, DEEPSPARSE, 1.0), (64, DEEPSPARSE, 1.0))


@dataclass(frozen=True)
class Timing:
    """The time of one side for one matrix and batch size."""

    rows: int
    columns: int
    sparsity: float
    batch: int
    state: str
    side: str
    seconds: float  # the median
    fastest: float
    nbytes: int | None  # of the weight
    error: float  # the largest difference from float64, relative to the largest value


def make_sides(weight: Tensor, pruned: Tensor, sparsity: float) -> list[Implementation]:
    """Return the sides that run in this process."""
    packed = UnstructuredTensor.from_dense(pruned)
    half = packed.to(torch.float16)
    mask = Balanced(block=32, pad=True).select_masks([weight.abs()], sparsity)[0]
    balanced = BalancedTensor.from_dense(torch.where(mask, weight, 0), 32)
    return [
        Implementation(DENSE, lambda x: torch.nn.functional.linear(x, weight), weight, weight.nbytes),
        *csr_implementations(pruned),
        Implementation(BALANCED, balanced.linear, balanced.dense(), balanced.nbytes),
        Implementation(UNSTRUCTURED, packed.linear, pruned, packed.nbytes),
        Implementation(HALF, half.linear, half.dense(), half.nbytes),
    ]


def make_structured_sides(weight: Tensor, sparsity: float) -> Iterator[Implementation]:
    """Yield the sides with blocks that divide the matrix and, at 50 %, the one with a 2:4 matrix."""
    for height, width in BLOCKS:
        if weight.shape[0] % height or weight.shape[1] % width:
            continue
        mask = Block((height, width)).select_masks([weight.abs()], sparsity)[0]
        blocks = BlockTensor.from_dense(torch.where(mask, weight, 0), height, width)
        yield Implementation(f"blocks {height}×{width}", blocks.linear, blocks.dense(), blocks.nbytes)
    if sparsity == 0.5 and weight.shape[1] % 4 == 0:
        mask = NM(2, 4).select_masks([weight.abs()], sparsity)[0]
        packed = TwoOfFourTensor.from_dense(torch.where(mask, weight, 0))
        yield Implementation(packed.format_name, packed.linear, packed.dense(), packed.nbytes)


def time_in_turns(sides: Sequence[Callable[[bool], float]], cold: bool, patience: float) -> list[list[float]]:
    """Return the times of each side, in turns for about `patience` seconds."""
    times: list[list[float]] = [[] for _ in sides]
    start = time.perf_counter()
    turn = -WARMUP_TURNS
    while turn < MIN_TURNS or time.perf_counter() - start < patience:
        for side, measured in zip(sides, times, strict=True):
            seconds = side(cold)
            if turn >= 0:
                measured.append(seconds)
        turn += 1
    return times


def time_call(call: Callable[[], Any], flush: Callable[[], None], cold: bool) -> float:
    """Return the seconds of one call, with warm or with emptied caches."""
    flush() if cold else warm_caches(call)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def time_matrix(
    weight: Tensor,
    sparsity: float,
    batches: Sequence[int],
    patience: float,
    peer: DeepSparse | None,
    structured: bool = False,
) -> Iterator[Timing]:
    """Yield the timings of one matrix, with matrices of a structure beside it if asked."""
    pruned = prune_unequal_rows(weight, sparsity)
    sides, flush = make_sides(weight, pruned, sparsity), partial(flush_caches, torch.zeros(FLUSH_BYTES).byte())
    sides += make_structured_sides(weight, sparsity) if structured else ()
    for batch in batches:
        x = torch.randn(batch, weight.shape[1], generator=torch.Generator().manual_seed(batch))
        errors = [measure_error(side, x) for side in sides]
        calls = [partial(time_call, partial(side.run, side.arrange(x)), flush) for side in sides]
        names, sizes = [side.name for side in sides], [side.nbytes for side in sides]
        if peer is not None:
            errors.append(peer.compile(pruned, x))
            calls.append(peer.seconds)  # type: ignore[arg-type]
            names, sizes = [*names, DEEPSPARSE], [*sizes, None]  # type: ignore[list-item]
        for state in STATES:
            times = time_in_turns(calls, state == "cold", patience)
            found: dict[str, Timing] = {}
            for name, nbytes, error, measured in zip(names, sizes, errors, times, strict=True):
                place = (*weight.shape, sparsity, batch, state, name)
                one = Timing(*place, statistics.median(measured), min(measured), nbytes, error)
                if name not in found or (one.seconds < found[name].seconds and is_rounding(error, x.dtype)):
                    found[name] = one
            yield from found.values()


def compare_with_targets(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """Return the targets that this run can answer, and what was reached."""
    chosen = {(t.batch, t.side): t for t in timings if (t.rows, t.sparsity, t.state) == (4096, 0.9, "warm")}
    return [
        {
            "batch": batch,
            "peer": peer,
            "target": least,
            "reached": chosen[batch, peer].seconds / chosen[batch, UNSTRUCTURED].seconds,
            "reached_fastest": chosen[batch, peer].fastest / chosen[batch, UNSTRUCTURED].fastest,
        }
        for batch, peer, least in TARGETS
        if (batch, peer) in chosen
    ]


def make_table(timings: Sequence[Timing], figure: str) -> Table:
    """Return the microseconds of every side, one line for each matrix, batch size and state of the caches.

    `figure` is "seconds", the medians, or "fastest", which other programs on a busy machine disturb less.
    """
    names = list(dict.fromkeys(t.side for t in timings))
    title = f"µs, {'medians' if figure == 'seconds' else 'the fastest calls'}, one thread"
    table = Table("matrix", "zeros", "batch", "caches", *names, "× dense", "× CSR", title=title)
    lines: dict[tuple[Any, ...], dict[str, float]] = {}
    for t in timings:
        lines.setdefault((t.rows, t.columns, t.sparsity, t.batch, t.state), {})[t.side] = getattr(t, figure)
    for (rows, columns, sparsity, batch, state), found in lines.items():
        ratios = [f"{found[peer] / found[UNSTRUCTURED]:.2f}" for peer in (DENSE, CSR)]
        cells = [f"{1e6 * found[name]:,.0f}" if name in found else "" for name in names]
        table.add_row(f"{rows}×{columns}", f"{sparsity:.0%}", str(batch), state, *cells, *ratios)
    return table


@torch.inference_mode()
def measure_all(
    shapes: Sequence[tuple[int, int]],
    sparsities: Sequence[float],
    batches: Sequence[int],
    deepsparse: str | None,
    patience: float,
    structured: bool = False,
) -> dict[str, Any]:
    """Measure all matrices, print the results and return them."""
    console, timings = Console(width=160), []
    with benchmark_threads(1, torch.device("cpu")), start_deepsparse(deepsparse) as peer:
        for (rows, columns), sparsity in product(shapes, sparsities):
            if rows * columns > LARGEST and sparsity != 0.9:
                continue
            weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) / columns**0.5
            found = list(time_matrix(weight, sparsity, batches, patience, peer, structured))
            console.print(make_table(found, "seconds"), make_table(found, "fastest"))
            timings += found
    for answer in (answers := compare_with_targets(timings)):
        met = "met" if answer["reached"] >= answer["target"] else "MISSED"
        print(
            f"4096², 90 %, batch {answer['batch']}: {answer['reached']:.2f}× {answer['peer']} "
            f"({answer['reached_fastest']:.2f}× by the fastest calls), target {answer['target']}×: {met}"
        )
    device = describe_device(torch.device("cpu"))
    return {"device": device, "timings": [asdict(timing) for timing in timings], "targets": answers}


def parse_shape(text: str) -> tuple[int, int]:
    """Return the rows and columns of a text such as "4096x1024"."""
    rows, columns = map(int, text.split("x"))
    return rows, columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="a small matrix, to see that the script runs")
    parser.add_argument("--deepsparse", metavar="PYTHON", help="the Python of an environment that has DeepSparse")
    parser.add_argument("--structured", action="store_true", help="measure dense blocks and 2:4 matrices too")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="seconds for each matrix, batch and state of caches"
    )
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=SHAPES, help="matrices, such as 4096x4096")
    parser.add_argument("--sparsities", type=float, nargs="+", default=SPARSITIES, help="shares of zeros, such as 0.9")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="numbers of vectors")
    options = parser.parse_args()
    sizes = options.shapes, options.sparsities, options.batches
    if options.quick:
        sizes = [(300, 200)], [0.9], [1, 64]
    results = measure_all(*sizes, options.deepsparse, options.patience, options.structured)
    write_record(options.json, **results)


if __name__ == "__main__":
    main()
