"""DataLens' compression: a worked case, its norm by hypothesis, rows that are not finite, and whole steps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_training import flat_parameters, gradients_one_by_one, make_data, make_step, mean_of_clipped

from pomona.privacy.clipping import UNITS, GradientGrid
from pomona.privacy.datalens import keep_largest_signs


def test_signs_of_the_largest_entries_by_hand():
    rows = [torch.tensor([[3.0, -1.0], [0.5, 0.0]]), torch.tensor([[-2.0, 0.5], [-4.0, 0.1]])]
    first, second = keep_largest_signs(rows, 0.5, clip=2.0)
    share = 2 / math.sqrt(2)
    torch.testing.assert_close(first, torch.tensor([[share, 0.0], [share, 0.0]]))
    torch.testing.assert_close(second, torch.tensor([[-share, 0.0], [-share, 0.0]]))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.floats(0.01, 1.0), st.floats(0.1, 4.0), st.integers(0, 1000))
def test_each_row_has_the_clipping_norm_and_its_integers_stay_within_the_grid(size, keep, clip, seed):
    row = torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
    (signs,) = keep_largest_signs([row], keep, clip)
    assert int(signs.count_nonzero()) == max(round(keep * size), 1)
    assert float(signs.norm()) == pytest.approx(clip, rel=1e-5)
    total = torch.zeros(size, dtype=torch.int64)
    GradientGrid(clip, size).add_clipped([signs], total)
    assert 0 < sum(int(value) ** 2 for value in total) <= UNITS**2


def test_a_row_that_is_not_finite_counts_as_zero():
    rows = torch.tensor([[1.0, math.nan, 2.0], [math.inf, 0.0, 1.0], [0.0, 3.0, 1.0]])
    (signs,) = keep_largest_signs([rows], 0.3, clip=1.0)
    total = torch.zeros(3, dtype=torch.int64)
    GradientGrid(1.0, 3).add_clipped([signs], total)
    assert (total[0], total[2]) == (0, 0)
    assert 0 < int(total[1]) <= UNITS


@pytest.mark.parametrize("micro", [256, 7])
def test_a_step_without_noise_is_the_mean_of_signs(micro):
    model, step = make_step(noiseless=True, clip=0.5, method="datalens", keep=0.1, micro=micro)
    (x, y), before = make_data(), flat_parameters(model)
    rows = step.draw()
    gradients = gradients_one_by_one(model, x[rows], y[rows])
    kept = round(0.1 * gradients.shape[1])
    chosen = gradients.abs().topk(kept, dim=1).indices
    signs = torch.zeros_like(gradients).scatter(1, chosen, gradients.gather(1, chosen).sign())
    step(x[rows], y[rows])
    expected = mean_of_clipped(signs * 0.5 / math.sqrt(kept), 0.5)
    torch.testing.assert_close(before - flat_parameters(model), expected, rtol=0, atol=2 * 0.5 / UNITS)
    assert step.lost(0) == 0.0
    assert step.facts()["keep"] == 0.1
