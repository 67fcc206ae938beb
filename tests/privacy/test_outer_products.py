"""Norms of outer products against those of the gradients that they stand for."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from product_checks import KINDS, make_products

from pomona.privacy.outer_products import OuterProducts, as_tensor


def exact_square(products: OuterProducts) -> Fraction:
    """Return the squared norm of the gradient of the first row, by fractions."""
    ours = [[Fraction(value) for value in row] for row in products.outputs[0].tolist()]
    theirs = [[Fraction(value) for value in row] for row in products.inputs[0].tolist()]
    entries = (
        sum(b[j] * a[k] for b, a in zip(ours, theirs, strict=True))
        for j in range(len(ours[0]))
        for k in range(len(theirs[0]))
    )
    return sum((entry**2 for entry in entries), Fraction(0))


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 7)),
    exponents=st.tuples(st.floats(-140, 100), st.floats(-140, 100)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_squares_are_not_below_those_of_the_gradients(kind, shape, exponents, dtype, seed):
    """Also for denormal numbers; the bound exceeds the norm only where the positions cancel out."""
    if dtype == torch.float16:
        exponents = exponents[0] / 20, exponents[1] / 20
    products = make_products(kind, 1, shape, exponents, seed, dtype).in_float64()
    assume(bool(products.outputs.isfinite().all() and products.inputs.isfinite().all()))
    squares, spread = products.squares()
    exact = exact_square(products)
    if exact >= Fraction(2) ** 128:
        assert float(squares) == math.inf
        return
    assert Fraction(float(squares)) >= exact * (1 - Fraction(1, 2**40))
    assert Fraction(float(squares)) <= exact * (1 + Fraction(1, 2**40)) + Fraction(float(spread)) ** 2 / 2**29


def test_norm_by_hand():
    ones = OuterProducts(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 12.0, 5.0]]])).in_float64()
    assert [float(part) for part in ones.squares()] == pytest.approx([65.0**2, 65.0])
    two = OuterProducts(torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[[2.0], [2.0]]])).in_float64()
    assert float(two.gram()) == 0
    assert float(two.squares()[1]) == 4.0


@pytest.mark.parametrize("positions", [1, 3])
def test_rows_sums_and_differences(positions):
    one, other = (make_products("normal", 5, (positions, 4, 3), seed=seed).in_float64() for seed in (1, 2))
    gradients = one.gradients()
    assert one.shape == (5, 12)
    assert torch.equal(torch.cat([as_tensor(part) for part in one.split(2)]), gradients)
    assert torch.equal(as_tensor(one[[4, 0]]), gradients[[4, 0]])
    torch.testing.assert_close(one.sum(), gradients.sum(0))
    torch.testing.assert_close(one.minus(other).gradients(), gradients - other.gradients())
    torch.testing.assert_close(one.minus(other).gram(), (gradients - other.gradients()).square().sum((1, 2)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300, 1e25])
def test_squares_that_are_not_finite(bad):
    products = make_products("normal", 3, (2, 4, 3), dtype=torch.float64)
    products.inputs[1, 0, 1] = bad
    assert products.in_float64().squares()[0].isfinite().tolist() == [True, False, True]
