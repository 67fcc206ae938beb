"""Pruned copies of networks for the tests of certificates."""

from __future__ import annotations

import copy

import torch
from torch import nn


def perturbed_copy(model: nn.Module, seed: int = 0, share: float = 0.5, noise: float = 0.1) -> nn.Module:
    """Return a copy with a random share of the weights zero, and with other biases and batch-norm statistics."""
    other, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand(parameter.shape, generator=draw) >= share)
            else:
                parameter.add_(noise * torch.randn(parameter.shape, generator=draw))
        for buffer in other.buffers():
            if buffer.is_floating_point():
                buffer.add_(noise * torch.rand(buffer.shape, generator=draw))
    return other


def without_small_weights(model: nn.Module, share: float = 0.2) -> nn.Module:
    """Return a copy without the smallest weights of each matrix."""
    pruned = copy.deepcopy(model)
    for weight in pruned.parameters():
        if weight.ndim > 1:
            weight.data[weight.abs() <= weight.abs().quantile(share)] = 0
    return pruned
