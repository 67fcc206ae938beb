"""Scores: how important each weight is. The highest are kept. A score has the shape of its weight.

Two values have a special meaning for every pattern: entries with −inf are kept only if no others remain, and entries
with +inf are kept first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .masking import fill_pruned
from .sharding import place_like

Scores = dict[str, Tensor]


def magnitude(weights: Mapping[str, Tensor]) -> Scores:
    """Return |w|, the score of Han et al. (2015)."""
    return dict(zip(weights, torch._foreach_abs(list(weights.values())), strict=True))  # one kernel launch for all


def random_scores(weights: Mapping[str, Tensor], seed: int) -> Scores:
    """Return uniform random scores, the same on every device: they are drawn on the CPU from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return {name: place_like(torch.rand(w.shape, generator=generator).to(w.device), w) for name, w in weights.items()}


def exclude_pruned(scores: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Scores:
    """Return the scores with −inf for every entry off its mask, so that pruned weights stay pruned."""
    return {name: fill_pruned(score, masks[name], -torch.inf) for name, score in scores.items()}


def saliency(weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Scores:
    """Return |w · ∂L/∂w|, the first-order change of the loss when the weight is removed (SNIP, Lee et al., 2019)."""
    return {name: (w * gradients[name]).abs() for name, w in weights.items()}
