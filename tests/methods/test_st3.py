"""ST-3: soft thresholds with straight-through gradients, against plain tensors."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import attach_to_network, train
from straight_through import train_reference
from torch import Tensor

import pomona as pm

TOTAL = 30


def soft_threshold(weight: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Return s · sign(w) · max(|w| − t, 0), with s = 1.01 / (0.01 + the share of Σ|w| that an output keeps)."""
    inner = tuple(range(1, weight.ndim))
    total = weight.abs().mean(inner, keepdim=True) + 1e-6
    kept = (weight.abs() * mask).mean(inner, keepdim=True) + 1e-6
    scale = 1.01 / (0.01 + kept / total)
    return torch.where(mask, scale * weight.sign() * (weight.abs() - threshold).clamp(min=0), 0.0)


def test_st3_matches_the_reference() -> None:
    model, optimizer, pruner = attach_to_network(pm.ST3(sparsity=0.8, feedback=None), total=TOTAL)
    train(model, optimizer, range(TOTAL))
    expected = train_reference(soft_threshold, final=0.8, until=0.75, total=TOTAL)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=1e-9, atol=1e-12)
    assert pruner.at_rest
    assert pruner.sparsity() == pytest.approx(0.8, abs=1e-3)


def test_the_masks_are_selected_at_every_step() -> None:
    model, optimizer, pruner = attach_to_network(pm.ST3(sparsity=0.8), total=TOTAL)
    train(model, optimizer, range(TOTAL))
    assert [entry["step"] for entry in pruner.history] == list(range(TOTAL + 1))


def test_a_pattern_of_groups_is_refused() -> None:
    with pytest.raises(pm.PomonaError, match="prunes groups of weights: use pattern='unstructured'"):
        pm.ST3(pattern=pm.Filter())
