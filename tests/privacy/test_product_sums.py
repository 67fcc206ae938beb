"""Sums of outer products on the grid: sensitivity in integers, and the sum that gradients of examples have."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from product_checks import KINDS, LARGEST, copy_rows, fine_sum, make_products, norm_of, scales_of, sum_of

from pomona.privacy.clipping import NORM_ERROR, UNITS, GradientGrid
from pomona.privacy.outer_products import OuterProducts, as_tensor
from pomona.privacy.product_sums import EXACT, FINE, HEADROOM, ProductShape, round_factors, round_to_units

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 30), st.integers(1, 30))
EXPONENTS = st.tuples(st.floats(-40, 40), st.floats(-40, 40))
CLIPS = st.sampled_from([2.0**-20, 0.01, 1.0, 3.7, 2.0**20])


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    shapes=st.tuples(SHAPES, SHAPES),
    exponents=st.tuples(EXPONENTS, EXPONENTS),
    clip=CLIPS,
    place=st.integers(0, 6),
    micro=st.sampled_from([2, 3, 100]),
    seed=st.integers(0, 1000),
)
def test_added_example_changes_the_sum_by_at_most_the_sensitivity(kinds, shapes, exponents, clip, place, micro, seed):
    """Two layers with outer products and a third without, of sizes and kinds that differ between the layers."""
    parts = [make_products(*given, seed) for given in zip(kinds, (7, 7), shapes, exponents, strict=True)]
    dense = torch.randn(7, 40, generator=torch.Generator().manual_seed(seed)) * 2.0 ** exponents[1][0]
    parts.insert(1, dense)
    kept = [k for k in range(7) if k != place]
    change = sum_of(parts, clip, micro) - sum_of([copy_rows(part, kept) for part in parts], clip, micro)
    assert norm_of(change) <= LARGEST
    alone = sum_of([copy_rows(part, [place]) for part in parts], clip)
    assert norm_of(change - alone) <= math.sqrt(len(change))  # the rounding of the sum


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["normal", "equal", "sparse", "aligned", "similar", "zero"]),
    shape=SHAPES,
    exponents=st.tuples(st.floats(-15, 15), st.floats(-15, 15)),
    clip=CLIPS,
    seed=st.integers(0, 1000),
)
def test_sum_is_that_of_the_gradients_of_examples(kind, shape, exponents, clip, seed):
    """They differ by the limits of the norms, by their errors and by rounding, where positions do not cancel out."""
    rows, products = 9, make_products(kind, 9, shape, exponents, seed)
    dense = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))
    gradients = products.in_float64().gradients().flatten(1).float()
    norms = torch.cat([gradients, dense], 1).double().norm(dim=1)
    assume(bool((products.in_float64().squares()[1] < HEADROOM * norms).all()))
    found, expected = sum_of([products, dense], clip), sum_of([gradients, dense], clip)
    size, own = len(found), ProductShape.of(products)
    limits = GradientGrid(clip, size).norm_limit - GradientGrid(clip, size).with_products([own]).norm_limit
    row = limits + 2 * NORM_ERROR * UNITS + math.sqrt(size) / 2 + own.error(UNITS)
    assert norm_of(found - expected) <= rows * row + math.sqrt(size) / 2


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), shape=SHAPES, exponents=EXPONENTS, units=st.sampled_from([UNITS, UNITS // 64]))
def test_rounding_of_the_factors_is_within_its_bound(kind, shape, exponents, units):
    products = make_products(kind, 1, shape, exponents)
    own, wide = ProductShape.of(products), products.in_float64()
    squares, spread = wide.squares()
    factor = min(float((units / squares.sqrt()).nan_to_num(0, 0, 0)), UNITS)
    factor = min(factor, own.headroom * units / max(float(spread), 1e-300))
    scales = torch.tensor([factor]).float() * (1 - 2.0**-20)
    ours, theirs = round_factors(wide, scales, units)
    exact = wide.gradients()[0] * scales.double()
    assert float((ours.mT @ theirs / FINE - exact).norm()) <= own.error(units) + 1e-9 * float(spread * scales)


@pytest.mark.parametrize("shape", [ProductShape(1, 10, 10), ProductShape(4, 512, 3072), ProductShape(64, 768, 768)])
@pytest.mark.parametrize("units", [UNITS, UNITS // 64])
def test_products_have_fewer_bits_than_float64(shape, units):
    rows = shape.rows_per_product(units)
    assert rows >= 16
    assert rows * (shape.headroom * units + shape.error(units)) * FINE <= EXACT
    assert shape.headroom == (1 if shape.positions == 1 else HEADROOM)


@pytest.mark.parametrize("cut", [0, 1, 20, 49])
def test_sum_has_no_order(cut):
    products = make_products("uneven", 50, (3, 11, 13), (4.0, 2.0))
    scales = scales_of(products)
    expected = fine_sum(products, scales)
    assert torch.equal(expected, fine_sum(products[cut:], scales[cut:]) + fine_sum(products[:cut], scales[:cut]))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(cut))
    assert torch.equal(expected, fine_sum(products[order], scales[order]))


def test_sums_are_rounded_to_the_nearest_unit():
    halves = torch.tensor([-3, -2, -1, 0, 1, 2, 3]) * (FINE // 2)
    assert round_to_units(halves.clone()).tolist() == [-1, -1, 0, 0, 1, 1, 2]
    assert round_to_units(halves - 1).tolist() == [-2, -1, -1, 0, 0, 1, 1]


def test_denormal_and_tiny_factors_add_nothing_wrong():
    for exponents in ((-149.0, -149.0), (-149.0, 120.0), (-140.0, 0.0)):
        products = make_products("normal", 3, (1, 8, 9), exponents)
        gradients = products.in_float64().gradients().flatten(1)
        found = sum_of([products]).double() / UNITS
        torch.testing.assert_close(found, gradients.sum(0), rtol=0, atol=2 / UNITS)
        assert as_tensor(products).shape == (3, 8, 9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("positions", [1, 4])
def test_sums_are_exact_on_each_device(device, positions):
    products = make_products("similar", 700, (positions, 33, 65), (9.0, 3.0))
    moved = OuterProducts(products.outputs.to(device), products.inputs.to(device))
    scales = scales_of(moved)
    factors = round_factors(moved.in_float64(), scales, UNITS)
    expected = torch.einsum("km,kn->mn", *(part.long().cpu() for part in factors)).flatten()
    assert torch.equal(fine_sum(moved, scales).cpu(), expected)
    dense = torch.randn(700, 9, generator=torch.Generator().manual_seed(0))
    found, here = sum_of([moved, dense.to(device)]).cpu(), sum_of([products, dense])
    assert norm_of(found - here) <= 700 * NORM_ERROR * UNITS
    assert norm_of(found) > 100 * UNITS
