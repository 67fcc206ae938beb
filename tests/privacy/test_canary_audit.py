"""The audit: its bound is below ε for a correct step, and above ε for a step without noise or clipping."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scipy.stats import beta

from pomona.errors import PomonaError
from pomona.privacy import Budget, PrivateStep, audit
from pomona.privacy.canary_audit import correct_guess_probability, epsilon_lower_bound, largest_refuted_epsilon
from pomona.privacy.clipping import UNITS, GradientGrid

# σ is that of `Budget.solve` for two steps on all rows at ε = 8, which is tested below.
BUDGET = Budget(8.0, 1e-6, 1024, 1024, 2, 0.0, 0.9234, 0.0, ((2, 8.0),))


def remove_noise(step: PrivateStep) -> None:
    """Set σ of a step to zero."""
    step.budget = dataclasses.replace(step.budget, sigma=0.0)


def unclipped_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of gradients in units of a grid for C = 1."""
    return (torch.cat([part.sum(0) for part in parts]) * UNITS).round().long()


def test_bound_of_a_correct_step_is_below_epsilon():
    pytest.importorskip("dp_accounting")
    solved = Budget.solve(epsilon=8, delta=1e-6, rows=1024, batch_size=1024, steps=2)
    assert solved.sigma == pytest.approx(BUDGET.sigma, rel=1e-3)
    assert 1 < audit(solved) < 8


def test_missing_noise_is_detected():
    assert audit(BUDGET, change=remove_noise) > 8


def test_missing_clipping_is_detected(monkeypatch):
    monkeypatch.setattr(GradientGrid, "add_clipped", lambda self, parts, total, sums: total.add_(unclipped_sum(parts)))
    assert audit(BUDGET) > 8


def test_bound_of_gip_is_below_epsilon_and_above_zero():
    solved = Budget(8.0, 1e-6, 1024, 1024, 2, 0.5, 1.671, 2.0, ((2, 8.0),))
    assert 0.5 < audit(solved, method="gip", keep=0.5, schedule="constant", group=None) < 8


def test_bound_for_zero_delta_is_that_of_clopper_and_pearson():
    # 90 of 100 right: the lower end of a one-sided 95 % interval for the share, as an ε.
    share = beta.ppf(0.05, 90, 11)
    bound = largest_refuted_epsilon(90, 100, 100, 0.0, 0.95)
    assert bound == pytest.approx(float(torch.logit(torch.tensor(share, dtype=torch.float64))), abs=1e-6)
    assert largest_refuted_epsilon(90, 100, 100, 1e-3, 0.95) < bound


def test_random_guesses_refute_almost_nothing():
    generator = torch.Generator().manual_seed(0)
    scores, members = torch.randn(2000, generator=generator), torch.rand(2000, generator=generator) < 0.5
    assert epsilon_lower_bound(scores, members, 1e-6) < 0.2
    assert correct_guess_probability(0, 10, 10, 1.0, 0.0) == 1.0


def test_canaries_must_be_as_many_as_rows():
    with pytest.raises(PomonaError, match="1024 rows, but there are 10 canaries"):
        audit(BUDGET, canaries=10)
