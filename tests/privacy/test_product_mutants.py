"""Deliberate mutants of sums of outer products, and the check that catches each one."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from product_checks import (
    PRODUCT_CHECKS,
    check_change,
    check_exact_sums,
    check_lost_rows,
    check_norms,
    check_rounded_sum,
    check_values,
)

from pomona.errors import PomonaError
from pomona.privacy import clipping, outer_products, product_sums
from pomona.privacy.clipping import UNITS, GradientGrid
from pomona.privacy.outer_products import OuterProducts
from pomona.privacy.product_sums import ProductShape, ProductSum


@pytest.mark.parametrize("check", PRODUCT_CHECKS)
def test_product_checks_pass_on_the_code_as_it_is(check):
    check()


def multiply_in_float32(original):
    def product(self):
        self.waiting = [(ours.float(), theirs.float()) for ours, theirs in self.waiting]
        return original(self).double()

    return product


def multiply_all_rows_at_once(original):
    return lambda self, units: 1 << 40


def add_norms_of_positions(original):
    """Forget that the outer products of two positions are not orthogonal."""

    def squares(self):
        ours, theirs = self.norms
        return (ours * theirs).square().sum(1), (ours * theirs).sum(1)

    return squares


def forget_to_round(original):
    """Multiply factors that are not integers."""

    def round_factors(products, scales, units):
        factor = torch.where(scales > 0, scales.double(), 0.0)[:, None, None] * product_sums.FINE
        return (products.outputs * factor).flatten(0, 1), products.inputs.flatten(0, 1)

    return round_factors


def leave_room_for_half_units(original):
    """Leave room for what is rounded in each example alone, and not in the sum."""
    return property(lambda self: original.fget(SimpleNamespace(size=self.size, units=self.units, products=())))


def clip_products_alone(original):
    def add_clipped(self, gradients, total, sums=()):
        squares, start, rest = 0, 0, iter(sums)
        for part in gradients:
            is_product = isinstance(part, OuterProducts)
            own = dataclasses.replace(self, products=(ProductShape.of(part),) if is_product else ())
            place = total[start : start + part.shape[1]]
            squares = squares + original(own, [part], place, [next(rest)] if is_product else [])
            start += part.shape[1]
        return squares

    return add_clipped


MUTANTS = [
    (ProductSum, "product", multiply_in_float32, check_exact_sums),
    (ProductShape, "rows_per_product", multiply_all_rows_at_once, check_exact_sums),
    (product_sums, "round_factors", forget_to_round, check_exact_sums),
    (OuterProducts, "squares", add_norms_of_positions, check_norms),
    (outer_products, "LARGEST_SQUARE", lambda original: math.inf, check_norms),
    (clipping, "limit_scales", lambda original: lambda scales, *_: scales, check_norms),
    (GradientGrid, "norm_limit", lambda original: property(lambda self: UNITS), check_norms),
    (GradientGrid, "norm_limit", leave_room_for_half_units, check_rounded_sum),
    (GradientGrid, "scale_rows", lambda original: lambda self, squares: 2 * original(self, squares), check_change),
    (GradientGrid, "add_clipped", clip_products_alone, check_norms),
    (
        GradientGrid,
        "scale_rows",
        lambda original: lambda self, squares: original(self, torch.nan_to_num(squares, nan=1.0)),
        check_lost_rows,
    ),
    (product_sums, "FINE", lambda original: original // 2, check_values),
    (product_sums, "round_to_units", lambda original: lambda total: original(total) * 2, check_values),
]


@pytest.mark.parametrize(
    ("place", "name", "mutate", "check"),
    MUTANTS,
    ids=[f"{k}-{mutant[0].__name__.split('.')[-1]}.{mutant[1]}" for k, mutant in enumerate(MUTANTS)],
)
def test_product_mutants_are_caught(place, name, mutate, check, monkeypatch):
    monkeypatch.setattr(place, name, mutate(getattr(place, name)))
    with pytest.raises((AssertionError, PomonaError)):
        check()
