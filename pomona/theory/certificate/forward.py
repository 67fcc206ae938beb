"""The forward pass of intervals through the graph of two networks, for many examples at once."""

from __future__ import annotations

import torch

from .intervals import Interval, PairBounds, require_numbers
from .paired_graph import PairedGraph
from .regions import InputSet
from .rules import rule_of
from .steps import Step


def interval_bounds(graph: PairedGraph, inputs: InputSet) -> list[PairBounds]:
    """Return the bounds of every step over a set of inputs for each example, examples first."""
    bounds = [input_bounds(inputs)]
    for step in graph.steps[1:]:
        bounds.append(step_bounds(step, bounds))
    return bounds


def input_bounds(inputs: InputSet) -> PairBounds:
    """Return the bounds of the input, which both networks share."""
    box, zero = Interval(inputs.low, inputs.high), torch.zeros_like(inputs.low)
    return PairBounds(box, box, Interval(zero, zero))


def step_bounds(step: Step, bounds: list[PairBounds]) -> PairBounds:
    """Return the bounds of a step from those of all earlier steps, for each example."""
    rule, arguments = rule_of(step), [bounds[index] for index in step.inputs]
    result = torch.func.vmap(lambda inputs: rule.bounds(step, inputs))(arguments)
    require_numbers(result, step.name)
    return result
