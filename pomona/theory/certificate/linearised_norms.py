"""Euclidean bounds of the gap of two networks from norms of the linearised network instead of products of norms.

A piecewise linear function with slopes in [m, M] is its linear part of slope (m + M) / 2, and a rest that is at most
(M − m) / 2 times its input. Substituted back to the input, the gap of a layer is a linear map of the input, and a sum
of linear maps of the rests before it. The norm of each of these maps, which are products of matrices, is far below the
product of their norms. Where a neuron cannot change its sign, there is no rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import spectral
from .forward import input_bounds, interval_bounds, step_bounds
from .intervals import Interval, PairBounds
from .linear_form import Form, as_matrix, contract
from .paired_graph import PairedGraph
from .paired_value import ROUNDING, euclidean_norm
from .regions import InputSet, neighbourhoods
from .rules import rule_of
from .rules.bilinear import multiply_numbers
from .rules.piecewise import pieces_of, same_function
from .steps import DENSE, Step

PIECEWISE = ("relu", "leaky_relu", "prelu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "abs")
LARGEST_VALUE = 512  # entries; the norms of larger matrices take minutes


@dataclass(frozen=True)
class Spread:
    """Norms over the inputs of a value's gap, and of its distance from the centre's value in the pruned network."""

    gap: float
    pruned: float


@dataclass(frozen=True)
class Rest:
    """What a piecewise linear function has beside its linear part: slopes, half their range, the rest at the centre."""

    step: int
    gap_slope: Tensor
    gap_half: Tensor
    gap_at_centre: Interval
    slope: Tensor
    half: Tensor


def is_supported(graph: PairedGraph) -> bool:
    """Return whether a graph has only affine operations and piecewise linear functions, and no large value."""
    functions = all(rule_of(s).affine or (s.op in PIECEWISE and same_function(s)) for s in graph.steps[1:])
    return functions and max(step.shape.numel() for step in graph.steps) <= LARGEST_VALUE


@torch.no_grad()
def linearised_norms(
    graph: PairedGraph, inputs: InputSet, known: list[PairBounds] | None = None
) -> tuple[Spread, list[PairBounds]]:
    """Return the norms of the output over the inputs of one example, and the bounds of every step.

    `known` are bounds of every step from elsewhere, which say what neurons cannot change their sign.
    """
    middle, radius = enclosing_ball(inputs)
    centre = [first_example(at) for at in interval_bounds(graph, neighbourhoods(middle, 0.0))]
    bounds, spreads = [input_bounds(inputs)], {0: Spread(0.0, radius)}
    rests: dict[int, Rest] = {}
    readers = {i for step in graph.steps[1:] if step.op in PIECEWISE for i in step.inputs} | {len(graph.steps) - 1}
    for index, step in enumerate(graph.steps[1:], 1):
        bounds.append(step_bounds(step, bounds))
        if known is not None:
            bounds[index] = bounds[index].intersect(known[index]).tighten()
        if step.op in PIECEWISE:
            rests[index] = rest_of(step, bounds, centre, index)
        if index in readers:
            spreads[index], bounds[index] = measure(graph, index, bounds, spreads, rests, centre)
    return spreads[len(graph.steps) - 1], bounds


def enclosing_ball(inputs: InputSet) -> tuple[Tensor, float]:
    """Return the centre and the radius of a ball around the inputs of the first example."""
    if bool(inputs.radius[0].isfinite()):
        return inputs.centre[0], float(inputs.radius[0])
    middle = (inputs.low[0] + inputs.high[0]) / 2
    farthest = torch.maximum(inputs.high[0] - middle, middle - inputs.low[0])
    return middle, float(torch.linalg.vector_norm(farthest)) * (1 + ROUNDING)


def rest_of(step: Step, bounds: list[PairBounds], centre: list[PairBounds], index: int) -> Rest:
    """Return the rest of a piecewise linear function, from the bounds of its input and those at the centre."""
    (source,) = step.inputs
    x = first_example(bounds[source])
    function = pieces_of(step, x.gap.low, DENSE)
    both, side = function.slope_range(x.hull), function.slope_range(x.pruned)
    slope = both.centre
    rest = centre[index].gap - multiply_numbers(Interval(slope, slope), centre[source].gap)
    return Rest(source, both.centre, both.radius, rest, side.centre, side.radius)


def measure(
    graph: PairedGraph, index: int, bounds: list[PairBounds], spreads: dict[int, Spread], rests: dict[int, Rest],
    centre: list[PairBounds],
) -> tuple[Spread, PairBounds]:  # fmt: skip
    """Return the norms of a step, and its bounds with each entry cut to what the norms before it allow."""
    shape = graph.steps[index].shape
    unit = torch.eye(shape.numel(), dtype=torch.float64, device=graph.device).view(-1, *shape)
    zero = torch.zeros_like(unit)
    known = [first_example(b) for b in bounds]
    pruned, gap = (side.map(torch.flatten) for side in (centre[index].pruned, centre[index].gap))
    _, moved, entries = spread_of(graph, index, Form(zero, unit), known, spreads, rests)
    pruned_bounds = bounds[index].pruned.intersect(around(pruned.centre, entries + pruned.radius, shape))
    at_centre, varied, entries = spread_of(graph, index, Form(unit, zero), known, spreads, rests)
    base = gap.centre - at_centre
    error = gap.radius + ROUNDING * (gap.magnitude + at_centre.abs())
    gap_bounds = bounds[index].gap.intersect(around(base, entries + error, shape))
    length = euclidean_norm(base) + euclidean_norm(error)
    spread = Spread((length + varied) * (1 + ROUNDING), moved * (1 + ROUNDING))
    return spread, replace(bounds[index], pruned=pruned_bounds, gap=gap_bounds).tighten()


def around(middle: Tensor, distances: Tensor, shape: torch.Size) -> Interval:
    """Return intervals around a vector for one example, with a margin for rounding."""
    distances = distances + ROUNDING * (distances + middle.abs() + 1)
    return Interval((middle - distances).view(1, *shape), (middle + distances).view(1, *shape))


def first_example(bounds: PairBounds) -> PairBounds:
    """Return the bounds of the first example."""
    return PairBounds(*(Interval(i.low[0], i.high[0]) for i in (bounds.dense, bounds.pruned, bounds.gap)))


def spread_of(
    graph: PairedGraph, index: int, form: Form, bounds: list[PairBounds], spreads: dict[int, Spread],
    rests: dict[int, Rest],
) -> tuple[Tensor, float, Tensor]:  # fmt: skip
    """Return how rows of forms vary: the part of the rests at the centre, and the norm and entries of what varies."""
    pending = {index: form}
    rows = len(form.gap)
    zero = form.gap.new_zeros(rows)
    shift, length, entries, slack = zero, 0.0, zero, zero
    for i in range(index, 0, -1):
        if (here := pending.pop(i, None)) is None:
            continue
        step = graph.steps[i]
        if i in rests:
            rest = rests[i]
            shift = shift + contract(here.gap, rest.gap_at_centre.centre)
            slack = slack + contract(here.gap.abs(), rest.gap_at_centre.radius)
            slack = slack + ROUNDING * contract(here.gap.abs(), rest.gap_at_centre.magnitude)
            for matrix, norm in (
                (here.gap * rest.gap_half, spreads[rest.step].gap),
                (here.pruned * rest.half, spreads[rest.step].pruned),
            ):
                length += norm_bound(matrix) * norm
                entries = entries + torch.linalg.vector_norm(as_matrix(matrix), dim=1) * norm
            parts = {rest.step: Form(here.gap * rest.gap_slope, here.pruned * rest.slope)}
        else:
            arguments = [bounds[j] for j in step.inputs]
            one, other = (rule_of(step).substitute(step, f, arguments) for f in (here, Form(-here.gap, -here.pruned)))
            assert one is not None
            assert other is not None
            slack = slack + (one.constant + other.constant) / 2
            parts = {}
            for j, part in zip(step.inputs, one.forms, strict=True):
                parts[j] = part + parts[j] if j in parts else part
        for j, part in parts.items():
            pending[j] = part + pending[j] if j in pending else part
    if 0 in pending:
        matrix = pending[0].pruned
        length += norm_bound(matrix) * spreads[0].pruned
        entries = entries + torch.linalg.vector_norm(as_matrix(matrix), dim=1) * spreads[0].pruned
    return shift, length + float(torch.linalg.vector_norm(slack)), entries + slack


def norm_bound(matrix: Tensor) -> float:
    """Return an upper bound of a matrix's norm, rows × anything."""
    flat = as_matrix(matrix)
    return spectral.bound(flat) if bool(flat.any()) else 0.0
