"""Projected gradient ascent on the difference of two networks."""

from __future__ import annotations

import torch
from torch import nn

from .regions import Ball, Region, sample_norms

# Step sizes fall geometrically over the attack. The first is so large that a step forgets its starting point, as in a
# power iteration.
FIRST_STEP, LAST_STEP_RATIO = 2, 0.01


def attack(
    dense: nn.Module,
    pruned: nn.Module,
    input_shape: tuple[int, ...],
    *,
    region: Region | None = None,
    steps: int = 100,
    starts: int = 8,
    seed: int = 0,
) -> float:
    """Return the largest ‖f(x) − F(x)‖ that projected gradient ascent finds in the region."""
    region, best = region or Ball(), 0.0
    generator = torch.Generator().manual_seed(seed)
    x = region.sample(max(starts, 1), input_shape, generator).to(device_of(dense))
    for step in range(steps):
        x = x.detach().requires_grad_()
        distance = sample_norms(pruned(x) - dense(x)).flatten()
        best = max(best, float(distance.detach().max()))
        (gradient,) = torch.autograd.grad(distance.sum(), x)
        x = region.step(x, gradient, FIRST_STEP * LAST_STEP_RATIO ** (step / max(1, steps - 1)))
    return best


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU for a model without parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
