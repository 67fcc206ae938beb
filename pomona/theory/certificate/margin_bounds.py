"""Bounds of margins: by how much the output of one class exceeds that of another, in a dense and a pruned network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import require
from .exported_network import evaluation_copy, load_copy
from .forward import interval_bounds
from .intervals import EPS, Interval, PairBounds
from .linear_bounds import largest_output, linear_bounds
from .linear_form import Form
from .paired_graph import PairedGraph, pair_networks
from .regions import InputSet


@dataclass(frozen=True)
class NetworkPair:
    """A dense and a pruned network in float64 and evaluation mode, with their common graph."""

    dense: nn.Module
    pruned: nn.Module
    graph: PairedGraph

    @staticmethod
    def of(dense: nn.Module, pruned: nn.Module | Mapping[str, Tensor], example: Tensor) -> NetworkPair:
        """Return the pair of a network and its pruned copy, or the state dict of one, for inputs like `example`."""
        first = evaluation_copy(dense)
        second = load_copy(first, pruned) if isinstance(pruned, Mapping) else evaluation_copy(pruned)
        graph = pair_networks(first, second, example[None])
        shape = graph.steps[-1].shape
        require(
            len(shape) > 0 and shape[:-1].numel() == 1 and shape[-1] > 1,
            "a prediction needs one output for each class, of which there are at least two, and the networks have "
            f"outputs of shape {tuple(shape[1:])}.",
        )
        return NetworkPair(first, second.to(graph.device), graph)

    def with_pruned(self, model: nn.Module) -> NetworkPair:
        """Return the pair with another pruned copy of the dense network."""
        pruned = evaluation_copy(model).to(self.graph.device)
        return NetworkPair(self.dense, pruned, self.graph.with_pruned(pruned.state_dict()))

    @property
    def classes(self) -> int:
        """The number of outputs."""
        return self.graph.steps[-1].shape[-1]

    @property
    def is_equal(self) -> bool:
        """Whether all weights of the two networks are equal."""
        weights = [weight for step in self.graph.steps for weight in step.weights]
        return all(torch.equal(weight.dense, weight.pruned) for weight in weights)


@dataclass(frozen=True)
class MarginBounds:
    """Lower bounds of margins over the inputs of each example, in both networks: examples × rows."""

    dense: Tensor
    pruned: Tensor


def class_rows(classes: Tensor, count: int) -> Tensor:
    """Return the margins of a class over each other one as rows of coefficients: examples × (count − 1) × count."""
    unit = torch.eye(count, dtype=torch.float64, device=classes.device)
    others = torch.stack([torch.cat([unit[:c], unit[c + 1 :]]) for c in range(count)])
    return unit[classes][:, None] - others[classes]


def bound_margins(pair: NetworkPair, inputs: InputSet, rows: Tensor) -> MarginBounds:
    """Return lower bounds of margins, given as rows of coefficients of the outputs: examples × rows × classes.

    Over single points intervals are enough: there they are wider than the value by the rounding only. Over regions the
    bound of a network is the best of its own and of the other's minus the gap.
    """
    is_point = not bool((inputs.high > inputs.low).any())
    bounds = (interval_bounds if is_point else linear_bounds)(pair.graph, inputs)
    dense, pruned = (smallest(rows, side) for side in (bounds[-1].dense, bounds[-1].pruned))
    if not is_point:
        zero = torch.zeros_like(rows)
        # Upper bounds of −dense, −pruned, gap and −gap, where a form on the dense network is one on pruned + gap.
        on_gap, on_pruned = torch.cat([-rows, zero, rows, -rows], 1), torch.cat([-rows, -rows, zero, zero], 1)
        above = bound_output_forms(pair.graph, inputs, bounds, on_gap, on_pruned).split(rows.shape[1], 1)
        direct = torch.maximum(dense, -above[0]), torch.maximum(pruned, -above[1])
        dense = torch.maximum(direct[0], round_down(direct[1], above[3]))
        pruned = torch.maximum(direct[1], round_down(direct[0], above[2]))
    return MarginBounds(dense, pruned)


def bound_gaps(pair: NetworkPair, inputs: InputSet) -> Tensor:
    """Return for each pair of classes an upper bound of gap_i − gap_j over a set of inputs, classes × classes.

    The gap is the output of the dense network minus that of the pruned one.
    """
    unit = torch.eye(pair.classes, dtype=torch.float64, device=inputs.low.device)
    rows = (unit[:, None] - unit).flatten(0, 1)[None]
    bounds = linear_bounds(pair.graph, inputs)
    above = bound_output_forms(pair.graph, inputs, bounds, rows, torch.zeros_like(rows))
    return torch.minimum(-smallest(-rows, bounds[-1].gap), above).view(pair.classes, pair.classes)


def round_down(value: Tensor, taken: Tensor) -> Tensor:
    """Return value − taken, rounded down."""
    return value - taken - 2 * EPS * (value.abs() + taken.abs())


def bound_output_forms(
    graph: PairedGraph, inputs: InputSet, bounds: list[PairBounds], gap: Tensor, pruned: Tensor
) -> Tensor:
    """Return upper bounds of gap · (dense − pruned) + pruned · pruned over the outputs, for rows of coefficients."""
    shape = graph.steps[-1].shape
    form = Form(gap.unflatten(2, shape), pruned.unflatten(2, shape))
    return largest_output(graph, inputs, bounds, form)


def smallest(rows: Tensor, outputs: Interval) -> Tensor:
    """Return a lower bound of rows · outputs from the interval of each output, rounded down."""
    low, high = (end.flatten(1)[:, None] for end in (outputs.low, outputs.high))
    terms = torch.where(rows > 0, rows * low, torch.where(rows < 0, rows * high, 0.0))
    return terms.sum(2) - 2 * rows.shape[2] * EPS * terms.abs().sum(2)
