"""Projected gradient ascent on the difference of two networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .exported_network import device_of
from .paired_graph import PairedGraph
from .regions import Ball, Region, sample_norms
from .steps import DENSE, PRUNED

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
    x = starting_points(input_shape, region or Ball(), starts, seed).to(device_of(dense))
    return climb(lambda batch: pruned(batch) - dense(batch), x, region or Ball(), steps)


def attack_graph(graph: PairedGraph, *, region: Region, steps: int = 100, starts: int = 8, seed: int = 0) -> float:
    """Return the largest distance of the outputs of a paired graph that projected gradient ascent finds."""
    x = starting_points(tuple(graph.input_shape[1:]), region, starts, seed).to(graph.device)
    return climb(lambda batch: graph.run(PRUNED, batch) - graph.run(DENSE, batch), x, region, steps)


def starting_points(input_shape: tuple[int, ...], region: Region, starts: int, seed: int) -> Tensor:
    """Return random points of the region."""
    return region.sample(max(starts, 1), input_shape, torch.Generator().manual_seed(seed))


def climb(difference: Callable[[Tensor], Tensor], x: Tensor, region: Region, steps: int) -> float:
    """Return the largest norm of a difference that gradient ascent from the points x finds in the region."""
    best = 0.0
    for step in range(steps):
        x = x.detach().requires_grad_()
        distance = sample_norms(difference(x)).flatten()
        best = max(best, float(distance.detach().max()))
        try:
            (gradient,) = torch.autograd.grad(distance.sum(), x)
        except RuntimeError:  # an operation without a derivative: a step in a random direction
            gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(step), dtype=x.dtype).to(x.device)
        x = region.step(x, gradient.nan_to_num(), FIRST_STEP * LAST_STEP_RATIO ** (step / max(1, steps - 1)))
    return best
