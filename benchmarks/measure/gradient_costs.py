"""Measure gradients of examples against sums of outer products over shapes of layers, and how well their choice fits.

    python benchmarks/measure/gradient_costs.py [--device cuda] [--dtype bfloat16] [--rows 32] [--json PATH]

Both are computed from the inputs of a layer and the gradients of its outputs, squared, clipped and added on the grid.
`pomona/privacy/gradient_costs.py` chooses between them by a count of operations; the constants there are fitted to
these times.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from interleaved_timing import time_in_turns
from record_file import write_record

from pomona.privacy.clipping import GradientGrid
from pomona.privacy.gradient_costs import are_products_cheaper, count_gradients, count_products, device_costs
from pomona.privacy.layer_gradients import Geometry, conv2d_weight_gradient
from pomona.privacy.outer_products import OuterProducts, RowGradients
from pomona.privacy.product_sums import ProductShape, ProductSum
from pomona.privacy.recorded_gradients import unfold

LINEAR = (  # positions, inputs, outputs
    *((1, 64, 64), (1, 256, 32), (1, 256, 256), (1, 1024, 1024), (1, 3072, 512)),
    *((8, 256, 256), (8, 768, 768), (16, 256, 256), (16, 768, 768), (32, 512, 512)),
    *((64, 256, 256), (64, 768, 768), (128, 768, 768)),
)
CONVOLUTIONS = (  # height and width, inputs, outputs, kernel
    *((32, 16, 64, 3), (16, 64, 64, 3), (16, 128, 128, 3), (8, 128, 128, 3), (8, 256, 256, 3)),
    *((8, 256, 256, 1), (4, 256, 256, 3), (4, 512, 512, 3), (2, 512, 512, 3)),
)
TURNS = 5


def add(gradient: RowGradients, total: torch.Tensor) -> None:
    """Add the clipped gradients of one layer to a total."""
    grid, sums = GradientGrid(1.0, gradient.shape[1]), []
    if isinstance(gradient, OuterProducts):
        shape = ProductShape.of(gradient)
        grid, sums = grid.with_products([shape]), [ProductSum(shape, grid.units)]
    grid.add_clipped([gradient], total, sums)
    for own in sums:
        own.add_into(total, is_rounded=True)


def measure_linear(rows: int, positions: int, inputs: int, outputs: int, like: torch.Tensor) -> dict[str, Any]:
    """Time both ways for a linear layer."""
    a, b = (torch.randn(rows, positions, size).to(like) for size in (inputs, outputs))
    products, total = OuterProducts(b, a), torch.zeros(inputs * outputs, dtype=torch.int64, device=like.device)
    steps = {
        "gradients": lambda: add(products.gradients()[:, None].flatten(1), total),
        "products": lambda: add(products, total),
    }
    return measure("linear", rows, ProductShape.of(products), like, steps)


def measure_convolution(rows: int, size: int, inputs: int, outputs: int, kernel: int, like: torch.Tensor) -> Any:
    """Time both ways for a convolution with as many outputs as inputs in height and width."""
    layout = torch.channels_last if like.is_cuda and like.dtype != torch.float32 else torch.contiguous_format
    a, b = (torch.randn(rows, c, size, size).to(like).to(memory_format=layout) for c in (inputs, outputs))
    weight = torch.empty(outputs, inputs, kernel, kernel)
    geometry = Geometry.of(weight, 1, kernel // 2, 1, 1)
    total = torch.zeros(weight.numel(), dtype=torch.int64, device=like.device)
    steps = {
        "gradients": lambda: add(conv2d_weight_gradient(a, b, geometry, rows)[:, None].flatten(1), total),
        "products": lambda: add(unfold(a, b, geometry, rows), total),
    }
    return measure("convolution", rows, ProductShape(size * size, outputs, inputs * kernel**2), like, steps)


def measure(layer: str, rows: int, shape: ProductShape, like: torch.Tensor, steps: dict[str, Any]) -> dict[str, Any]:
    """Return the smallest times of both ways, their counts, and which is chosen."""
    times = time_in_turns(steps, TURNS, 1, like.device.type)
    is_convolution, costs = layer == "convolution", device_costs(like.device)
    assert costs is not None
    chosen = are_products_cheaper(rows, shape, like.dtype, like.device, is_convolution=is_convolution)
    return {
        "layer": layer,
        "rows": rows,
        "shape": [shape.positions, shape.outputs, shape.inputs],
        "milliseconds": {name: 1000 * min(taken) for name, taken in times.items()},
        "counts": {
            "gradients": count_gradients(costs, rows, shape, like.dtype, is_convolution),
            "products": count_products(costs, rows, shape, is_convolution),
        },
        "chosen": "products" if chosen else "gradients",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    like = torch.zeros((), device=options.device, dtype=getattr(torch, options.dtype))
    torch.manual_seed(0)
    found = [measure_linear(options.rows, *case, like) for case in LINEAR]
    found += [measure_convolution(options.rows, *case, like) for case in CONVOLUTIONS]
    for row in found:
        times, counts = row["milliseconds"], row["counts"]
        print(
            f"{row['layer']:11} {options.dtype} {row['rows']} rows {row['shape']!s:18} gradients "
            f"{times['gradients']:8.2f} ms, products {times['products']:8.2f} ms, measured ratio "
            f"{times['gradients'] / times['products']:5.2f}, counted {counts['gradients'] / counts['products']:5.2f}: "
            f"{row['chosen']}"
        )
    write_record(options.json, costs=found, device=options.device, dtype=options.dtype)


if __name__ == "__main__":
    main()
