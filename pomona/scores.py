"""How much a weight matters: higher is kept. A score has the shape of its weight.

Two values have a meaning of their own for every pattern: −inf marks an entry that must not be
kept while any other can be, +inf one that must be kept first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Scores = dict[str, Tensor]


def magnitude(weights: Mapping[str, Tensor]) -> Scores:
    """|w|, the score of Han et al. (2015)."""
    return dict(zip(weights, torch._foreach_abs(list(weights.values())), strict=True))  # one kernel for all


def random_scores(weights: Mapping[str, Tensor], seed: int) -> Scores:
    """Uniform draws, the same on every device: one stream on the CPU from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(w.shape, generator=generator).to(w.device) for name, w in weights.items()}


def exclude_pruned(scores: Scores, masks: Mapping[str, Tensor]) -> Scores:
    """The same scores, with every entry off its mask put last: what is pruned stays pruned."""
    return {name: score.masked_fill(~masks[name], -torch.inf) for name, score in scores.items()}


def saliency(weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Scores:
    """|w · ∂L/∂w|: what the loss loses, to first order, with the weight (SNIP)."""
    return {name: (w * gradients[name]).abs() for name, w in weights.items()}
