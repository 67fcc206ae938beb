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
from ...errors import PomonaError, require
from ...methods import OneShot, prune
from .domains import best_bounds
from .gradient_attack import attack_graph
from .norm_bounds import Layer
from .paired_graph import PairedGraph, pair_networks
from .paired_value import euclidean_norm
from .regions import Ball, Region
from .steps import DENSE

FOUND_MARGIN = 1e-9  # relative to the bound and to the outputs: the rounding of an attack in float64


@dataclass(frozen=True)
class Certificate:
    """The result of `certify`: sup ‖f − F‖ over the region is at most `error` and at least `found`."""

    error: float
    found: float
    output: float  # a bound of ‖F(x) − F(centre)‖, the scale to compare the error with
    layers: tuple[Layer, ...] = field(repr=False)
    domain: str = "norms"  # the kind of bounds that gave the error: norms, intervals or linear


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

    `pruned` is a network like `dense`, or the state dict of one. Both are taken in evaluation mode and for one example
    at a time. The region is the unit ball by default. `steps=0` leaves out the attack. Raise PomonaError for networks
    that cannot be exported, that compute different operations, or that have an operation without a known bound.
    """
    graph = pair_networks(dense, pruned, torch.zeros(1, *input_shape, dtype=torch.float64))
    return certify_graph(graph, region or Ball(), steps=steps, starts=starts, seed=seed)


def certify_graph(
    graph: PairedGraph, region: Region, *, steps: int = 100, starts: int = 8, seed: int = 0
) -> Certificate:
    """Return the certificate of two networks from their common graph."""
    bounds = best_bounds(graph, region)
    found = attack_graph(graph, region=region, steps=steps, starts=starts, seed=seed)
    require_not_exceeded(found, bounds.error, graph, region)
    return Certificate(bounds.error, found, bounds.output, bounds.layers, bounds.domain)


def require_not_exceeded(found: float, error: float, graph: PairedGraph, region: Region) -> None:
    """Raise PomonaError where an attack found more than a certificate allows, which is a fault of the certificate."""
    centre, _ = region.centre(tuple(graph.input_shape[1:]))
    with torch.no_grad():
        scale = euclidean_norm(graph.evaluate(DENSE, centre.to(graph.device))[-1])
    if found <= error + FOUND_MARGIN * (error + scale):
        return
    raise PomonaError(
        f"the certificate says that the networks differ by {error:.9g} at most, but {found:.9g} was found: this is a "
        "fault of certify, please report it with the two networks."
    )


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
    region = region or Ball()
    graph = pair_networks(model, model.state_dict(), torch.zeros(1, *input_shape, dtype=torch.float64))
    low, high = 0.0, 1.0
    for _ in range(halvings):
        middle = (low + high) / 2
        if middle > limit:  # some layer would be empty
            high = middle
            continue
        pruned = prune_by_magnitude(model, middle, pattern=pattern, allocation=allocation)
        error = best_bounds(graph.with_pruned(pruned.state_dict()), region).error
        low, high = (middle, high) if error <= epsilon else (low, middle)
    return low or None


cut, largest = prune_by_magnitude, largest_certified_sparsity  # former names, still public
