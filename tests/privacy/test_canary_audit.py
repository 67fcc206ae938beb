"""The audit: it stays below what is promised, and finds out a step that lacks its noise or its clipping."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scipy.stats import beta

from pomona.errors import PomonaError
from pomona.privacy import Budget, PrivateStep, audit, private_step
from pomona.privacy.canary_audit import chance, lower_bound, refuted

# σ as `Budget.solve` finds it for two steps of all rows at ε = 8; checked below.
PROMISED = Budget(8.0, 1e-6, 1024, 1024, 2, 0.0, 0.9234, 0.0, ((2, 8.0),))


def silent(step: PrivateStep) -> None:
    step.budget = dataclasses.replace(step.budget, sigma=0.0)


def test_a_sound_run_lies_between():
    pytest.importorskip("dp_accounting")
    solved = Budget.solve(epsilon=8, delta=1e-6, rows=1024, batch_size=1024, steps=2)
    assert solved.sigma == pytest.approx(PROMISED.sigma, rel=1e-3)
    assert 1 < audit(solved) < 8


def test_without_noise_it_is_found_out():
    assert audit(PROMISED, change=silent) > 8


def test_without_clipping_it_is_found_out(monkeypatch):
    monkeypatch.setattr(private_step, "clip_and_sum", lambda parts, clip: torch.cat([part.sum(0) for part in parts]))
    assert audit(PROMISED) > 8


def test_gip_lies_below_its_budget_and_above_nothing():
    solved = Budget(8.0, 1e-6, 1024, 1024, 2, 0.5, 1.671, 2.0, ((2, 8.0),))
    assert 0.5 < audit(solved, method="gip", keep=0.5, schedule="constant", group=None) < 8


def test_for_no_delta_the_bound_is_clopper_and_pearsons():
    # 90 of 100 right: the lower end of a one-sided 95 % interval for the share, as an ε.
    share = beta.ppf(0.05, 90, 11)
    bound = refuted(90, 100, 100, 0.0, 0.95)
    assert bound == pytest.approx(float(torch.logit(torch.tensor(share, dtype=torch.float64))), abs=1e-6)
    assert refuted(90, 100, 100, 1e-3, 0.95) < bound


def test_guessing_at_random_refutes_nothing():
    generator = torch.Generator().manual_seed(0)
    scores, members = torch.randn(2000, generator=generator), torch.rand(2000, generator=generator) < 0.5
    assert lower_bound(scores, members, 1e-6) < 0.2
    assert chance(0, 10, 10, 1.0, 0.0) == 1.0


def test_the_canaries_are_the_rows():
    with pytest.raises(PomonaError, match="1024 rows, and there are 10 canaries"):
        audit(PROMISED, canaries=10)
