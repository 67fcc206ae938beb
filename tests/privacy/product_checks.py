"""Checks of sums of outer products, in integers: exactness, the norm of each example, and the change by one example."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pomona.privacy import clipping
from pomona.privacy.clipped_sum import ClippedSum
from pomona.privacy.clipping import OTHER_ROWS, UNITS, GradientGrid
from pomona.privacy.outer_products import OuterProducts, RowGradients
from pomona.privacy.product_sums import FINE, ProductShape, ProductSum, round_factors

KINDS = ("normal", "equal", "sparse", "uneven", "aligned", "similar", "cancelling", "zero")
LARGEST = UNITS * (1 - OTHER_ROWS)  # of the change by one example, in units


def make_factors(kind: str, rows: int, positions: int, size: int, generator: torch.Generator) -> Tensor:
    """Return float64 factors of a kind that may be hard to clip."""
    values = torch.randn(rows, positions, size, generator=generator, dtype=torch.float64)
    if kind == "equal":
        return torch.ones_like(values)
    if kind == "sparse":
        values[..., 1:] = 0
    elif kind == "uneven":
        values = torch.exp(6 * values) * values.sign()
    elif kind == "aligned":  # all positions are the same, so that the norms of the positions add up
        values = values[:, :1].expand_as(values).clone()
    elif kind == "similar":
        values = 1 + 0.01 * values
    elif kind == "zero":
        values = values * 0
    return values


def make_products(
    kind: str,
    rows: int,
    shape: tuple[int, int, int],
    exponents: tuple[float, float] = (0.0, 0.0),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> OuterProducts:
    """Return outer products of a kind, of (positions, outputs, inputs), times 2^exponent of outputs and inputs."""
    generator, (positions, outputs, inputs) = torch.Generator().manual_seed(seed), shape
    ours = make_factors(kind, rows, positions, outputs, generator) * 2.0 ** exponents[0]
    theirs = make_factors(kind, rows, positions, inputs, generator) * 2.0 ** exponents[1]
    if kind == "cancelling":  # the second half of the positions takes away the first, but for a little
        half = positions // 2
        for part, sign in ((ours, -1), (theirs, 1)):
            other = 1 + 4e-7 * torch.randn(part[:, :half].shape, generator=generator).double()
            part[:, half : 2 * half] = sign * part[:, :half] * other
        ours[:, 2 * half :] *= 4e-7
    return OuterProducts(ours.to(dtype), theirs.to(dtype))


def sum_of(parts: list[RowGradients], clip: float = 1.0, micro: int = 1000) -> Tensor:
    """Return the released sum of clipped gradients in units, before noise, from micro-batches."""
    sizes = [part.shape[1] for part in parts]
    found = ClippedSum(
        GradientGrid(clip, sum(sizes)), torch.zeros(sum(sizes), dtype=torch.int64, device=parts[0].device)
    )
    for start in range(0, len(parts[0]), micro):
        found.add([copy_rows(part, slice(start, start + micro)) for part in parts])
    return found.finish_own()


def copy_rows(part: RowGradients, rows: slice | list[int]) -> RowGradients:
    """Return a copy of some rows, as sums may overwrite what they get."""
    return part[rows] if isinstance(part, OuterProducts) else part[rows].clone()


def norm_of(values: Tensor) -> float:
    """Return the norm of integers, which are squared as such."""
    return math.sqrt(sum(int(value) ** 2 for value in values.tolist()))


def fine_sum(products: OuterProducts, scales: Tensor, units: int = UNITS) -> Tensor:
    """Return the sum of outer products times scales in steps of 2⁻²⁰ units."""
    own = ProductSum(ProductShape.of(products), units)
    own.add(products.in_float64(), scales)
    total = torch.zeros(own.shape.size, dtype=torch.int64, device=products.device)
    own.add_into(total, is_rounded=False)
    return total


def scales_of(products: OuterProducts, clip: float = 1.0) -> Tensor:
    """Return the factors with which a grid clips outer products alone."""
    shape = ProductShape.of(products)
    grid = GradientGrid(clip, shape.size).with_products([shape])
    squares, spread = products.in_float64().squares()
    return clipping.limit_scales(grid.scale_rows(squares), shape.headroom * UNITS, spread)


def check_exact_sums() -> None:
    """The sum of many rows is the sum of the integers of each row alone, also where it has more than 53 bits."""
    for kind, rows, shape in (
        ("similar", 40_000, (1, 1, 2)),
        ("equal", 100, (5, 2, 3)),
        ("normal", 300, (1, 9, 7)),
        ("normal", 70, (4, 5, 6)),
        ("cancelling", 40, (6, 4, 4)),
    ):
        products = make_products(kind, rows, shape, (8.0, 3.0))
        scales = scales_of(products)
        ours, theirs = (part.long() for part in round_factors(products.in_float64(), scales, UNITS))
        expected = torch.einsum("km,kn->mn", ours, theirs).flatten()
        assert torch.equal(fine_sum(products, scales), expected)
        assert int(expected.abs().max()) > FINE
        alone = [fine_sum(products[k : k + 1], scales[k : k + 1]) for k in range(min(rows, 20))]
        assert torch.equal(fine_sum(products[:20], scales[:20]), torch.stack(alone).sum(0))


def make_rounded_apart(shape: ProductShape) -> OuterProducts:
    """Return an example whose first two positions cancel but for a 3000th, which rounding makes larger by a 64th.

    As integers, the inputs of these positions are k + ½ + 32 and k + ½ − 32, by turns, and a little more and less.
    """
    largest, half = shape.largest_input(UNITS), (shape.inputs - 1) // 2
    middle = math.floor(largest / math.sqrt(2 * half + 1)) + 0.5
    rest = (largest / middle) ** 2 - 2 * half * (1 + (32.02 / middle) ** 2)
    low, high = 1 - 32.02 / middle, 1 + 32.02 / middle
    first, second = ([*[one] * half, *[other] * half, math.sqrt(rest)] for one, other in ((high, low), (low, high)))
    outputs, inputs = torch.zeros(1, shape.positions, 1), torch.zeros(1, shape.positions, shape.inputs)
    outputs[0, 0], outputs[0, 1] = 1e9, -1e9
    inputs[0, :2] = torch.tensor([first, second])
    return OuterProducts(outputs, inputs)


def check_norms() -> None:
    """The integers of one example, with those of its other parameters, have a norm of at most 2²¹ units."""
    for kind in KINDS:
        for shape in ((1, 30, 20), (1, 400, 3), (8, 12, 9), (2, 1, 1), (2, 60, 50), (20, 5, 40)):
            for exponents in ((0.0, 0.0), (20.0, -3.0), (30.0, 30.0), (-40.0, 45.0), (85.0, 85.3), (-120.0, 110.0)):
                products = make_products(kind, 1, shape, exponents)
                dense = torch.full((1, 50), 1e-3 if exponents[0] else 1.0)
                for parts in ([products], [dense, products], [products, dense.clone(), products]):
                    assert norm_of(sum_of(parts)) <= LARGEST
    assert norm_of(sum_of([make_rounded_apart(ProductShape(512, 1, 1025))])) <= LARGEST
    large = sum_of([make_products("aligned", 1, (4, 10, 10), (9.0, 9.0))])
    assert norm_of(large) > 0.99 * UNITS


def check_change() -> None:
    """An example that is added at any place changes the released sum by at most 2²¹ units."""
    for seed, kind in enumerate(("normal", "uneven", "aligned", "cancelling")):
        for shape in ((1, 40, 30), (6, 20, 20)):
            products = make_products(kind, 40, shape, (6.0, 6.0), seed)
            dense = torch.randn(40, 70, generator=torch.Generator().manual_seed(seed)) * 3
            parts = [dense, products]
            kept = [k for k in range(40) if k != 5 + seed]
            for micro in (1000, 8):
                change = sum_of(parts, micro=micro) - sum_of([copy_rows(part, kept) for part in parts], micro=micro)
                assert norm_of(change) <= LARGEST


def check_rounded_sum() -> None:
    """The bound holds where an example moves every coordinate of the rounded sum by almost a whole unit more."""
    made = {size: make_products("equal", 1, (1, 2000, size), (9.0, 0.0)) for size in range(1980, 2020)}
    size = min(made, key=lambda size: fine_entry(made[size]) % FINE)
    row, whole = made[size], fine_entry(made[size]) // FINE
    others = [make_products("equal", 1, row_shape(row), (-12.0 - k / 50, 0.0)) for k in range(400)]
    other = next(one for one in others if 0 <= fine_entry(one) % FINE + fine_entry(row) % FINE - FINE // 2 < FINE // 64)
    both = OuterProducts(*(torch.cat(pair) for pair in ((row.outputs, other.outputs), (row.inputs, other.inputs))))
    change = sum_of([both]) - sum_of([other])
    assert bool((change == whole + 1).all())
    assert (whole + 1) * math.sqrt(len(change)) <= LARGEST


def row_shape(products: OuterProducts) -> tuple[int, int, int]:
    """Return the positions, outputs and inputs of outer products."""
    shape = ProductShape.of(products)
    return shape.positions, shape.outputs, shape.inputs


def fine_entry(products: OuterProducts) -> int:
    """Return the first entry of the sum of one example in steps of 2⁻²⁰ units."""
    ours, theirs = round_factors(products.in_float64(), scales_of(products), UNITS)
    return int(ours[0, 0]) * int(theirs[0, 0])


def check_lost_rows() -> None:
    """A row that is not finite adds nothing, and neither does it change what other rows add."""
    for bad in (math.nan, math.inf, -math.inf):
        for shape in ((1, 6, 5), (3, 6, 5)):
            for place in ("outputs", "inputs", "dense"):
                products = make_products("normal", 4, shape)
                dense = torch.ones(4, 3)
                {"outputs": products.outputs, "inputs": products.inputs, "dense": dense}[place][2, ..., 1] = bad
                parts = [products, dense]
                expected = sum_of([copy_rows(part, [0, 1, 3]) for part in parts])
                assert torch.equal(sum_of(parts), expected)
                assert bool(expected.any())


def check_values() -> None:
    """The sum is that of the gradients, clipped as vectors over all parameters."""
    for shape, exponent in (((1, 20, 10), 3.0), ((5, 7, 8), 3.0), ((1, 20, 10), -9.0), ((5, 7, 8), -9.0)):
        products = make_products("normal", 30, shape, (exponent, 0.0))
        dense = torch.randn(30, 11, generator=torch.Generator().manual_seed(3)) * 2.0**exponent
        rows = torch.cat([products.in_float64().gradients().flatten(1), dense.double()], 1)
        limit = GradientGrid(1.0, rows.shape[1]).with_products([ProductShape.of(products)]).norm_limit / UNITS
        expected = (rows * (limit / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
        found = sum_of([products, dense]).double() / UNITS
        torch.testing.assert_close(found, expected, rtol=0, atol=30 / UNITS)


PRODUCT_CHECKS = (check_exact_sums, check_norms, check_change, check_rounded_sum, check_lost_rows, check_values)
