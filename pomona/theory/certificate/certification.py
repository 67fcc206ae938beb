"""Certification of a pruned network, and the search for the largest sparsity that is certified."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...allocation import largest_sparsity
from ...core.attachment import find_targets
from ...errors import require
from ...methods import OneShot, prune
from .gradient_attack import attack
from .propagation import GapPropagation, Layer
from .regions import Ball, Region


@dataclass(frozen=True)
class Certificate:
    """The result of `certify`: sup ‖f − F‖ over the region is at most `error` and at least `found`."""

    error: float
    found: float
    output: float  # a bound of ‖F(x) − F(centre)‖, the scale to compare the error with
    layers: tuple[Layer, ...] = field(repr=False)


def certify(
    dense: nn.Module,
    pruned: nn.Module | Mapping[str, Tensor],
    input_shape: tuple[int, ...],
    *,
    region: Region | None = None,
    steps: int = 100,
    starts: int = 8,
    seed: int = 0,
) -> Certificate:
    """Return a bound on the difference of two networks over a region, and the largest difference an attack finds.

    `pruned` is a network like `dense`, or the state dict of one. Both are taken in evaluation mode. The region is the
    unit ball by default. `steps=0` leaves out the attack. Raise PomonaError for a network that cannot be traced, or
    that has an operation without a known bound.
    """
    region = region or Ball()
    dense_copy, pruned_copy = evaluation_copy(dense), evaluation_copy(dense if isinstance(pruned, Mapping) else pruned)
    if isinstance(pruned, Mapping):
        pruned_copy[0].load_state_dict(pruned)
    with torch.no_grad():
        propagation = GapPropagation(dense_copy, pruned_copy)
        value = propagation.run(tuple(input_shape), region)
    found = attack(dense_copy, pruned_copy, tuple(input_shape), region=region, steps=steps, starts=starts, seed=seed)
    return Certificate(value.gap, found, value.dense_spread, tuple(propagation.layers))


def evaluation_copy(model: nn.Module) -> nn.Sequential:
    """Return a copy in float64 and evaluation mode, in a Sequential so that a single layer is one node of its graph."""
    return nn.Sequential(copy.deepcopy(model).double().eval())


def prune_by_magnitude(
    model: nn.Module, sparsity: float, *, pattern: Any = "unstructured", allocation: str = "uniform"
) -> nn.Module:
    """Return a copy of a model without its smallest weights, as `pm.prune` chooses them."""
    pruned = copy.deepcopy(model)
    prune(pruned, sparsity, pattern=pattern, allocation=allocation)
    return pruned


def largest_certified_sparsity(
    model: nn.Module,
    input_shape: tuple[int, ...],
    epsilon: float,
    *,
    region: Region | None = None,
    pattern: Any = "unstructured",
    allocation: str = "uniform",
    halvings: int = 10,
) -> float | None:
    """Return the largest sparsity, to 2^−halvings, whose pruned copy is certified to err by ε at most, or None."""
    require(epsilon > 0, f"epsilon must be positive, got {epsilon:g}.")
    method = OneShot(sparsity=0.0, pattern=pattern, allocation=allocation).method
    limit = largest_sparsity([target.outputs_first for target in find_targets(model, method)], method.pattern)
    low, high = 0.0, 1.0
    for _ in range(halvings):
        middle = (low + high) / 2
        if middle > limit:  # some layer would be empty
            high = middle
            continue
        pruned = prune_by_magnitude(model, middle, pattern=pattern, allocation=allocation)
        error = certify(model, pruned, input_shape, region=region, steps=0).error
        low, high = (middle, high) if error <= epsilon else (low, middle)
    return low or None


cut, largest = prune_by_magnitude, largest_certified_sparsity  # former names, still public
