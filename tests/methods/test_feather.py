"""Feather: cubic thresholds, and gradients of pruned weights scaled, against plain tensors."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import attach_to_network, train
from hypothesis import given, settings
from hypothesis import strategies as st
from straight_through import train_reference
from torch import Tensor

import pomona as pm
from pomona.compressors import PowerThreshold

TOTAL = 30


def cubic_threshold(weight: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Return sign(w) · (|w|³ − t³)^⅓ where kept, else 0."""
    return torch.where(mask, weight.sign() * (weight.abs() ** 3 - threshold**3).clamp(min=0) ** (1 / 3), 0.0)


@pytest.mark.parametrize(("sparsity", "theta", "used"), [(0.8, None, 1.0), (0.96, None, 0.5), (0.8, 0.25, 0.25)])
def test_feather_matches_the_reference(sparsity: float, theta: float | None, used: float) -> None:
    method = pm.Feather(sparsity=sparsity, theta=theta, allocation="global(floor=0)", feedback=None)
    model, optimizer, pruner = attach_to_network(method, total=TOTAL)
    assert pruner.method.theta == used
    train(model, optimizer, range(TOTAL))
    expected = train_reference(cubic_threshold, final=sparsity, until=0.5, total=TOTAL, theta=used)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=1e-7, atol=1e-10)


def test_a_threshold_by_hand() -> None:
    weights = torch.tensor([[2.0, -3.0, 1.0, 0.5]])
    mask = torch.tensor([[True, True, False, False]])
    compressor, out = PowerThreshold(power=3.0), torch.where(mask, weights, 0.0)
    compressor.compress(out, mask, compressor.calibrate(weights, mask, 0))  # t = 1: 8 − 1 = 7 and −(27 − 1) = −26
    torch.testing.assert_close(out, torch.tensor([[7 ** (1 / 3), -(26 ** (1 / 3)), 0.0, 0.0]]))


@settings(max_examples=50, deadline=None)
@given(power=st.floats(1.0, 60.0), seed=st.integers(0, 1000))
def test_thresholds_shrink_towards_zero_and_lie_between_soft_and_hard(power: float, seed: int) -> None:
    weights = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = weights.abs() > 0.7
    compressor, out = PowerThreshold(power=power), torch.where(mask, weights, 0.0)
    calibration = compressor.calibrate(weights, mask, 0)
    compressor.compress(out, mask, calibration)
    soft = (weights.abs() - calibration[1]).clamp(min=0) * mask
    assert (out.abs() <= weights.abs() + 1e-12).all()
    assert (out.abs() >= soft - 1e-9).all()
    assert (out * weights >= 0).all()
    assert not out[~mask].any()


@pytest.mark.parametrize("theta", [-0.1, 1.5])
def test_a_theta_outside_0_to_1_is_refused(theta: float) -> None:
    with pytest.raises(pm.PomonaError, match=rf"in \[0, 1\], got {theta}"):
        pm.Feather(theta=theta)
