"""How much the gradients of a layer's outputs are shortened, from their norms.

`methods._latent.BoundedFeedback` says why, and `methods._bounded_growth.BoundedGrowth` where hard methods differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .method import GradientBound


def output_factors(weight_norm: Tensor, norm: Tensor, bound: GradientBound) -> Tensor:
    """Return the factor of each output's gradient, 1 or less, given the norms of its weights and of its gradient.

    Norms are (layers, outputs).
    """
    weak = weight_norm < bound.weak * weight_norm.mean(1, keepdim=True)
    median = median_norm(norm, ~weak & (norm > 0))
    largest = median * torch.where(weak, bound.feedback, 1 / bound.weak)
    return torch.where(norm > largest, largest / norm, 1)


def growth_factors(weight_norm: Tensor, norm: Tensor, bound: GradientBound) -> Tensor:
    """Return the factors of `output_factors` for layers in which many outputs without weights grow at once.

    A layer's typical norm is the mean of its outputs' norms, each weighted by itself. Where no output is compared, the
    gradient of a weak one is shortened to feedback · weak² of its length.
    """
    typical = weight_norm.square().sum(1, keepdim=True) / weight_norm.sum(1, keepdim=True)
    weak = weight_norm < bound.weak * typical  # none is in a layer without weights, where the typical norm is NaN
    compared = ~weak & (norm > 0)
    median = median_norm(norm, compared)
    largest = torch.where(weak, bound.feedback * median, median / bound.weak)
    alone = weak & ~compared.any(1, keepdim=True)
    return torch.where(alone, min(bound.feedback * bound.weak**2, 1.0), torch.where(norm > largest, largest / norm, 1))


def median_norm(norm: Tensor, compared: Tensor) -> Tensor:
    """Return the lower median of each row's compared norms, inf where none is; the host does not wait for it."""
    ranked = norm.masked_fill(~compared, torch.inf).sort(1).values
    return ranked.gather(1, (compared.sum(1, keepdim=True) - 1).clamp(min=0) // 2)
