"""Where sums of outer products cost less than the gradients of all examples, by a count of operations and of memory.

The count depends on shapes, the dtype and the kind of device alone, so that a resumed run computes in the same way. Its
unit is a multiplication and addition of a matrix product in float32. The constants of a CPU are fitted to times that
`benchmarks/measure/gradient_costs.py` measures with one thread. Those of a GPU were not measured yet: they follow from
the bytes that each pass moves and the rates that the vendor states for an H200, and decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .outer_products import MAX_TERMS
from .product_sums import UNITS, ProductShape

WIDE_CAPABILITIES = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))  # of GPUs that are half as fast in float64, or better
MEASURED = ("cpu",)  # the kinds of devices whose costs are measured; others keep gradients of examples
MARGIN = 1.2  # by which sums of products must cost less than gradients, as the count is a rough one
MAX_ERROR = 2.0**-9  # of the clipping norm, for the rounding of factors


@dataclass(frozen=True)
class Costs:
    """What a part of the work costs on a device, in multiplications and additions in float32."""

    entry: float  # of an example's gradient, which is written, squared, scaled, rounded and added
    cached_entry: float  # of one of gradients that fit in the cache
    cache: int  # bytes
    factor: float  # of an entry of the factors, which are squared, scaled and rounded
    patch: float  # of an entry of the factors of a convolution, whose inputs are unfolded first
    coordinate: float  # of the sum of all rows, which is rounded and added to the total
    wide: float  # of a multiplication and addition in float64
    convolution: float  # of one in the weight gradients of examples of a convolution
    narrow: float  # of one in 16 bits
    calls: float  # of launching what sums of products need in addition


CPU = Costs(110, 20, 1 << 24, 300, 600, 100, 2, 4, 1, 1e7)
GPU = Costs(110, 110, 0, 600, 1500, 500, 2, 1, 0.1, 6e9)


def device_costs(device: torch.device) -> Costs | None:
    """Return the costs of a device, or None where float64 is so slow that sums of products never pay."""
    if device.type != "cuda":
        return CPU
    return GPU if torch.cuda.get_device_capability(device) in WIDE_CAPABILITIES else None


def are_products_cheaper(
    rows: int, shape: ProductShape, dtype: torch.dtype, device: torch.device, *, is_convolution: bool = False
) -> bool:
    """Return whether the norms and the sum of outer products cost less than the gradients of so many rows."""
    if device.type not in MEASURED:
        return False
    costs, positions = device_costs(device), shape.positions
    terms = shape.inputs + shape.outputs + positions**2
    if costs is None or not rows * positions or terms > MAX_TERMS or shape.error(UNITS) > MAX_ERROR * UNITS:
        return False
    gradients = count_gradients(costs, rows, shape, dtype, is_convolution)
    return MARGIN * count_products(costs, rows, shape, is_convolution) < gradients


def count_gradients(
    costs: Costs, rows: int, shape: ProductShape, dtype: torch.dtype, is_convolution: bool = False
) -> float:
    """Return the cost of the gradients of all rows."""
    is_cached = rows * shape.size * dtype.itemsize <= costs.cache
    operation = costs.convolution if is_convolution else 1.0
    operation *= costs.narrow if dtype.itemsize <= 2 else 1.0
    return rows * shape.size * (shape.positions * operation + (costs.cached_entry if is_cached else costs.entry))


def count_products(costs: Costs, rows: int, shape: ProductShape, is_convolution: bool = False) -> float:
    """Return the cost of the norms and the sum of outer products."""
    positions, width = shape.positions, shape.inputs + shape.outputs
    norms = costs.wide * positions**2 * width if positions > 1 else 0.0
    factors = positions * width * (costs.patch if is_convolution else costs.factor)
    row = costs.wide * positions * shape.size + norms + factors
    return rows * row + costs.coordinate * shape.size + costs.calls
