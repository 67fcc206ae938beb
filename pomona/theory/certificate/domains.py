"""The kinds of bounds of a certificate, and the choice of the best one for two networks and a region.

norms        one pass with the norms of the layers: strong on large regions, and in networks that are not deep
intervals    one pass with an interval for each entry: quick, and known for every supported operation
linear       intervals that are refined by linear forms: strong on small regions, and slower
linearised   norms of products of matrices, for piecewise linear networks that are not wide: strong in deep ones
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_map

from ...errors import PomonaError
from .forward import interval_bounds
from .intervals import PairBounds
from .linear_bounds import KINDS, Effort, linear_bounds
from .linearised_norms import is_supported, linearised_norms
from .norm_bounds import Layer, norm_bounds
from .paired_graph import PairedGraph
from .paired_value import ROUNDING, euclidean_norm
from .regions import InputSet, Region
from .rules import rule_of
from .steps import DENSE

WORK = 5e7  # coefficients that the linear bounds of one certificate may compute: a few seconds on one core
FEWEST_NEURONS = 16  # with fewer, the linear bounds are hardly better than intervals


@dataclass(frozen=True)
class OutputBounds:
    """Bounds of ‖f − F‖ and of ‖F(x) − F(centre)‖ over a region, the layers, and the domain they come from."""

    domain: str
    error: float
    output: float
    layers: tuple[Layer, ...] = ()


def best_bounds(graph: PairedGraph, region: Region) -> OutputBounds:
    """Return the bounds of the domain with the smallest error; raise PomonaError where no domain supports the graph."""
    found: list[OutputBounds] = []
    refused: list[PomonaError] = []
    for domain in (bound_by_norms, bound_by_intervals, bound_by_linear_forms, bound_by_linearised_norms):
        try:
            bounds = domain(graph, region)
        except PomonaError as error:
            refused.append(error)
        else:
            found.extend([bounds] if bounds is not None and math.isfinite(bounds.error) else [])
    if not found:
        raise refused[-1] if refused else PomonaError("the bounds are infinite: use a smaller region.")
    best = min(found, key=lambda bounds: bounds.error)
    layers = next((bounds.layers for bounds in found if bounds.layers), ())
    return replace(best, output=min(bounds.output for bounds in found), layers=layers)


def bound_by_norms(graph: PairedGraph, region: Region) -> OutputBounds | None:
    """Return the bounds in the Euclidean norm."""
    bounds = norm_bounds(graph, region)
    return OutputBounds("norms", bounds.output.gap, bounds.output.dense_spread, bounds.layers)


def bound_by_intervals(graph: PairedGraph, region: Region) -> OutputBounds | None:
    """Return the bounds from intervals."""
    return summarize_output("intervals", graph, region, interval_bounds(graph, input_set(graph, region))[-1])


def bound_by_linear_forms(graph: PairedGraph, region: Region) -> OutputBounds | None:
    """Return the bounds from linear forms, or None where the network is too large for them."""
    neurons = affordable_neurons(graph)
    if neurons < FEWEST_NEURONS:
        return None
    bounds = linear_bounds(graph, input_set(graph, region), Effort(neurons=neurons))[-1]
    return summarize_output("linear", graph, region, bounds)


def bound_by_linearised_norms(graph: PairedGraph, region: Region) -> OutputBounds | None:
    """Return the bounds from norms of the linearised network, or None for a network that has no such bounds."""
    if not is_supported(graph):
        return None
    inputs = input_set(graph, region)
    spread, bounds = linearised_norms(graph, inputs)
    by_entries = summarize_output("linearised", graph, region, bounds[-1])
    return replace(by_entries, error=min(spread.gap, by_entries.error))


def input_set(graph: PairedGraph, region: Region) -> InputSet:
    """Return a region as a set of inputs on the graph's device."""
    inputs: InputSet = tree_map(lambda x: x.to(graph.device), region.inputs(tuple(graph.input_shape[1:])))
    return inputs


@torch.no_grad()
def summarize_output(domain: str, graph: PairedGraph, region: Region, bounds: PairBounds) -> OutputBounds:
    """Return the norms of the intervals of the output: of the gap, and of the distance from the value at the centre."""
    centre, _ = region.centre(tuple(graph.input_shape[1:]))
    value = graph.evaluate(DENSE, centre.to(graph.device))[-1]
    moved = torch.maximum(bounds.dense.high - value, value - bounds.dense.low)
    gap = torch.maximum(bounds.gap.high, -bounds.gap.low)
    return OutputBounds(domain, euclidean_norm(gap) * (1 + ROUNDING), euclidean_norm(moved) * (1 + ROUNDING))


def affordable_neurons(graph: PairedGraph) -> int:
    """Return the number of entries of each value whose linear bounds can be computed with the work of a certificate."""
    before, work = 0, 0
    readers = {i for step in graph.steps[1:] if not rule_of(step).affine for i in step.inputs}
    for index, step in enumerate(graph.steps):
        before += step.shape.numel()
        if index in readers or index == len(graph.steps) - 1:
            work += KINDS * before
    return int(min(Effort().neurons, WORK // max(1, work)))
