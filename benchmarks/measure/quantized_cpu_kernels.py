"""Time products with balanced weights in fewer bits on a CPU, against ONNX Runtime's dense products in int8 and int4.

    python benchmarks/measure/quantized_cpu_kernels.py [--json FILE] [--quick]

Balanced weights keep 3 of 32 (90.6 % zeros). *int8, int8 activations* rounds every input vector to 8 bits, as ONNX
Runtime's int8 products do; without that, our kernels round inputs to 16 bits where the processor multiplies integers.
ONNX Runtime has several products for each type of values, in onnx_products.py: all are timed, and the fastest counts.
The activations of its `QLinearMatMul` have a range that is known before, and its results have 8 bits.

All sides run on one thread and take turns; a time is a median. Every time is given twice: *warm*, each side right after
itself, and *cold*, after all caches were emptied. The error is that of a product with the weight before rounding, in
float64, over normally distributed inputs: the root of the mean square, relative to that of the product. Target: int8
ahead of ONNX Runtime's int8 at batch 1, 16, 64 and 256.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from onnx_products import dense_products
from record_file import write_record
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pomona.lab.kernels.benchmark import benchmark_threads, describe_device
from pomona.patterns import Balanced
from pomona.sparse import BalancedTensor, QuantizedBalancedTensor
from pomona.sparse.timing import make_cache_flusher, median_seconds

SHAPES, BATCHES = ((4096, 4096), (3000, 1536)), (1, 16, 64, 256)
BLOCK, SPARSITY = 32, 0.90625
STATES = ("warm", "cold")
DENSE, ONNX = "dense float32, PyTorch", "ONNX Runtime, dense"
OURS = {
    "balanced float32": {},
    "balanced int8": {"values": "int8"},
    "balanced int4": {"values": "int4"},
    "balanced int8, int8 activations": {"values": "int8", "activations": "int8"},
    "balanced int4, int8 activations": {"values": "int4", "activations": "int8"},
}
# Our side, ONNX Runtime's, and whether it is a target of ours to be ahead.
COMPARISONS = (
    ("balanced int8", "int8", True),
    ("balanced int8, int8 activations", "int8", True),
    ("balanced int4", "int4", False),
    ("balanced int4, int8 activations", "int4", False),
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One way to compute the product; of several with one name the fastest counts."""

    name: str
    way: str
    multiply: Callable[[], Any]  # of the input that is timed
    weight: Tensor  # before rounding
    nbytes: int | None  # of the weight, where it is ours or the dense one


def make_sides(weight: Tensor, x: Tensor) -> list[Side]:
    """Return every way to compute the product of one input."""
    mask = Balanced(block=BLOCK, pad=True).select_masks([weight.abs()], SPARSITY)[0]
    pruned, array = torch.where(mask, weight, 0), x.numpy()
    sides = [Side(DENSE, "", partial(torch.nn.functional.linear, x, weight), weight, weight.nbytes)]
    for values, products in dense_products(weight.numpy(), array).items():
        sides += [Side(f"{ONNX} {values}", way, partial(run, array), weight, None) for way, run in products.items()]
    for name, options in OURS.items():
        packed = (
            QuantizedBalancedTensor.from_dense(pruned, BLOCK, **options)
            if options
            else BalancedTensor.from_dense(pruned, BLOCK)
        )
        sides.append(Side(name, "", partial(packed.linear, x), pruned, packed.nbytes))
    return sides


def measure_error(side: Side, x: Tensor) -> float:
    """Return the error of a side's product, relative to the product: roots of mean squares."""
    exact = x.double() @ side.weight.double().T
    return float((torch.as_tensor(side.multiply()).double() - exact).norm() / exact.norm())


def measure_product(rows: int, columns: int, batch: int, patience: float) -> list[Row]:
    """Return a row for each side and state of the caches, of several with one name the fastest."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    x, device = torch.randn(batch, columns, generator=generator), torch.device("cpu")
    sides = make_sides(weight, x)
    errors = [measure_error(side, x) for side in sides]
    found: dict[tuple[str, str], Row] = {}
    for state in STATES:
        before = make_cache_flusher(device) if state == "cold" else None
        times = median_seconds([side.multiply for side in sides], device, before=before, patience=patience)
        head = {"rows": rows, "columns": columns, "batch": batch, "state": state}
        for side, error, seconds in zip(sides, errors, times, strict=True):
            row = {**head, "side": side.name, "way": side.way, "seconds": seconds, "error": error, "bytes": side.nbytes}
            best = found.setdefault((state, side.name), row | {"ways": {}})
            best["ways"][side.way] = seconds
            if seconds < best["seconds"]:
                best |= row
    return list(found.values())


def compare(rows: list[Row]) -> list[Row]:
    """Return how many times as fast as ONNX Runtime's fastest product each of ours is."""
    times = {(r["rows"], r["columns"], r["batch"], r["state"], r["side"]): r["seconds"] for r in rows}
    heads = list(dict.fromkeys(key[:4] for key in times))
    return [
        {
            **dict(zip(("rows", "columns", "batch", "state"), head, strict=True)),
            "side": ours,
            "peer": f"{ONNX} {values}",
            "ratio": times[*head, f"{ONNX} {values}"] / times[*head, ours],
            "target": 1.0 if target else None,
        }
        for head in heads
        for ours, values, target in COMPARISONS
    ]


def print_rows(rows: list[Row], console: Console) -> None:
    """Print the times of one product."""
    first = rows[0]
    table = Table("", "side", "µs", "error", "way", title=f"{first['rows']}×{first['columns']}, batch {first['batch']}")
    for row in rows:
        table.add_row(row["state"], row["side"], f"{1e6 * row['seconds']:,.1f}", f"{row['error']:.1e}", row["way"])
    console.print(table)


def measure_all(quick: bool) -> dict[str, Any]:
    """Measure all products, print the results and return them."""
    console = Console(width=140)
    rows: list[Row] = []
    with benchmark_threads(1, torch.device("cpu")), torch.inference_mode():
        for height, width in ((96, 128),) if quick else SHAPES:
            for batch in BATCHES:
                found = measure_product(height, width, batch, 0.02 if quick else 2.5)
                print_rows(found, console)
                rows += found
    comparisons = compare(rows)
    for row in comparisons:
        met = "" if row["target"] is None else ", ahead" if row["ratio"] > row["target"] else ", BEHIND"
        product = f"{row['rows']}×{row['columns']}, batch {row['batch']}, {row['state']}"
        print(f"{product}: {row['side']} {row['ratio']:.2f}× {row['peer']}{met}")
    device = describe_device(torch.device("cpu"))
    return {"device": device, "kept": BLOCK - round(SPARSITY * BLOCK), "rows": rows, "comparisons": comparisons}


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="a small matrix, to see that the script runs")
    options = parser.parse_args()
    import onnxruntime

    write_record(options.json, onnxruntime=onnxruntime.__version__, **measure_all(options.quick))


if __name__ == "__main__":
    main()
