"""Linear bounds of two networks: forms on a value are substituted backwards to the input, where they are maximised.

A form is Σ c · gap + Σ d · pruned. Affine operations are substituted exactly, others by lines around them, which need
the bounds of their inputs. These bounds are refined by the same means, from the first layer to the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .forward import input_bounds, step_bounds
from .intervals import EPS, Interval, PairBounds
from .linear_form import Form, as_matrix, contract, largest_value, rounding
from .paired_graph import PairedGraph
from .regions import InputSet
from .rules import rule_of
from .steps import Step

FEW_ENTRIES = 512  # of a larger value, the dense network's bounds follow from those of the pruned one and of the gap
KINDS = 6  # forms for the bounds of one entry: upper and lower, of dense, pruned and gap


@dataclass(frozen=True)
class Effort:
    """How much work the linear bounds may take.

    `neurons` is the largest number of entries of one value that are refined for each example, the widest first;
    `entries` is the largest number of coefficients in one tensor, which limits the memory.
    """

    neurons: int = 512
    entries: int = 2**21


DEFAULT_EFFORT = Effort()


def linear_bounds(graph: PairedGraph, inputs: InputSet, effort: Effort = DEFAULT_EFFORT) -> list[PairBounds]:
    """Return the bounds of every step over a set of inputs for each example, refined by linear forms."""
    bounds = [input_bounds(inputs)]
    refined = {i for step in graph.steps[1:] if not rule_of(step).affine for i in step.inputs} | {len(graph.steps) - 1}
    for index, step in enumerate(graph.steps[1:], 1):
        bounds.append(relaxed(step, step_bounds(step, bounds), bounds))
        if index in refined and rule_of(step).affine and not is_exact(step, inputs):
            refine_step(graph, inputs, bounds, index, effort)
    return bounds


def is_exact(step: Step, inputs: InputSet) -> bool:
    """Return whether intervals are exact for a step: an affine operation on a box of inputs."""
    return set(step.inputs) == {0} and len(step.inputs) == 1 and bool(inputs.radius.isinf().all())


def relaxed(step: Step, result: PairBounds, bounds: list[PairBounds]) -> PairBounds:
    """Return the bounds of a step with what its rule needs to substitute forms, for each example."""
    relax = rule_of(step).relax
    if relax is None:
        return result
    arguments = [bounds[index] for index in step.inputs]
    return replace(result, relaxation=torch.func.vmap(lambda inputs: relax(step, inputs))(arguments))


def refine_step(graph: PairedGraph, inputs: InputSet, bounds: list[PairBounds], index: int, effort: Effort) -> None:
    """Replace the bounds of one step by tighter ones, for the entries where that helps."""
    priority = as_matrix(refinement_priority(graph, bounds, index))
    count = min(int((priority > 0).sum(1).max()), effort.neurons)
    if count == 0:
        return
    chosen = priority.topk(count, 1).indices
    size = max(1, effort.entries // (KINDS * len(inputs) * largest_value_size(graph, index)))
    for part in chosen.split(size, 1):
        bounds[index] = refine_entries(graph, inputs, bounds, index, part)


def refinement_priority(graph: PairedGraph, bounds: list[PairBounds], index: int) -> Tensor:
    """Return how much each entry of a value matters, for each example: 0 where a reader's rule is exact already."""
    here = bounds[index]
    width = here.dense.radius + here.pruned.radius + here.gap.radius
    if index == len(graph.steps) - 1:
        return width
    open_entries = torch.zeros_like(width, dtype=torch.bool)
    for step in graph.steps[1:]:
        if index in step.inputs and not (rule := rule_of(step)).affine:
            arguments = [bounds[i] if i <= index else None for i in step.inputs]
            if rule.open_entries is None or any(a is None for a in arguments) or len(arguments) > 1:
                return width
            open_entries |= torch.func.vmap(lambda x, step=step, rule=rule: rule.open_entries(step, x))(here)
    return torch.where(open_entries, width, torch.zeros_like(width))


def refine_entries(
    graph: PairedGraph, inputs: InputSet, bounds: list[PairBounds], index: int, chosen: Tensor
) -> PairBounds:
    """Return the bounds of a step with some entries (examples × count) refined."""
    shape = bounds[index].gap.low.shape[1:]
    names = ("dense", "pruned", "gap") if shape.numel() <= FEW_ENTRIES else ("pruned", "gap")

    def refine(known: list[PairBounds], region: InputSet, entries: Tensor) -> PairBounds:
        unit = torch.nn.functional.one_hot(entries, shape.numel()).double().view(-1, *shape)
        zero = torch.zeros_like(unit)
        rows = {"dense": (unit, unit), "pruned": (zero, unit), "gap": (unit, zero)}
        signed = [[sign * part for part in rows[name]] for name in names for sign in (1, -1)]
        form = Form(*(torch.cat(parts) for parts in zip(*signed, strict=True)))
        most = largest_forms(graph, {index: form}, known, region).view(2 * len(names), -1)
        changes = {}
        for k, name in enumerate(names):
            old: Interval = getattr(known[index], name)
            high = old.high.flatten().scatter_reduce(0, entries, most[2 * k], "amin").view(shape)
            low = old.low.flatten().scatter_reduce(0, entries, -most[2 * k + 1], "amax").view(shape)
            changes[name] = Interval(low, high)
        return replace(known[index], **changes).tighten()

    return torch.func.vmap(refine)(bounds[: index + 1], inputs, chosen)


def largest_output(
    graph: PairedGraph, inputs: InputSet, bounds: list[PairBounds], form: Form, effort: Effort = DEFAULT_EFFORT
) -> Tensor:
    """Return upper bounds (examples × rows) of forms on the output (rows × shape, or examples × rows × shape)."""
    last = len(graph.steps) - 1
    each = form.gap.ndim > bounds[last].gap.low.ndim
    size = max(1, effort.entries // (len(inputs) * largest_value_size(graph, last)))
    results = []
    for gap, pruned in zip(form.gap.split(size, int(each)), form.pruned.split(size, int(each)), strict=True):
        in_dims = (0, 0, 0 if each else None)
        bound = torch.func.vmap(lambda known, x, f: largest_forms(graph, {last: f}, known, x), in_dims=in_dims)
        results.append(bound(bounds, inputs, Form(gap, pruned)))
    return torch.cat(results, 1)


def largest_forms(graph: PairedGraph, forms: dict[int, Form], bounds: list[PairBounds], inputs: InputSet) -> Tensor:
    """Return upper bounds of the sum of forms on some steps, for one example, by substitution back to the input."""
    pending = dict(forms)
    rows = len(next(iter(forms.values())).gap)
    terms = [bounds[0].gap.low.new_zeros(rows)]
    for index in range(max(forms), 0, -1):
        form = pending.pop(index, None)
        if form is None:
            continue
        step = graph.steps[index]
        rule = rule_of(step)
        result = rule.substitution(step, form, [bounds[i] for i in step.inputs], bounds[index].relaxation)
        if result is None:
            terms.append(largest_value(form, bounds[index]))
            continue
        terms.append(result.constant)
        for i, part in zip(step.inputs, result.forms, strict=True):
            if i in pending:
                part = part + pending[i]
                terms.append(rounding(part, bounds[i], 2))
            pending[i] = part
    if 0 in pending:
        terms.append(largest_input(pending[0].pruned, inputs))
    summands = torch.stack(terms)
    constant = summands.sum(0) + len(terms) * EPS * summands.abs().sum(0)
    return torch.where(constant.isnan(), torch.inf, constant)  # what is not a number says nothing


def largest_input(coefficients: Tensor, inputs: InputSet) -> Tensor:
    """Return the largest Σ coefficient · x over one example's inputs, for each row."""
    centre, half = (inputs.low + inputs.high) / 2, (inputs.high - inputs.low) / 2
    absolute = coefficients.abs()
    box = contract(coefficients, centre) + contract(absolute, half)
    lengths = torch.linalg.vector_norm(as_matrix(coefficients), dim=1)
    ball = contract(coefficients, inputs.centre) + torch.where(lengths > 0, inputs.radius * lengths, 0.0)
    reach = torch.maximum(inputs.low.abs(), inputs.high.abs()) + inputs.centre.abs()
    return torch.minimum(box, ball) + 4 * (reach.numel() + 8) * EPS * contract(absolute, reach)


def largest_value_size(graph: PairedGraph, index: int) -> int:
    """Return the number of entries of the largest value up to a step."""
    return max(step.shape.numel() for step in graph.steps[: index + 1])
