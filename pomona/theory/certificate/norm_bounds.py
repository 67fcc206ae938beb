"""Bounds in the Euclidean norm: one pass through a paired graph with the norms of its layers.

    ‖W y − W* y*‖ ≤ ‖W‖ ‖y − y*‖ + ‖(W − W*) y*‖,        and ‖y*‖ is known near the value at the region's centre.

Three numbers travel through the graph: how far the values of both networks can be from those at the centre, and from
each other. Biases and the shifts of batch norm are in the values at the centre. A batch norm is folded into the layer
before it, and a circular padding into the convolution after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import PomonaError
from .affine_map import AffineMap, affine_map, batch_norm_coefficients, is_circular_padding
from .lipschitz import jump, lipschitz_constant, sum_constants
from .paired_graph import PairedGraph
from .paired_value import ROUNDING, PairedValue, apply_lipschitz, combine_values, euclidean_norm
from .regions import Region
from .steps import DENSE, PRUNED, Step

SIDES = (DENSE, PRUNED)


@dataclass(frozen=True)
class Layer:
    """The norms of one layer: dense, pruned and of the removed part; `gap` bounds the distance of the outputs."""

    name: str
    dense: float
    pruned: float
    removed: float
    gap: float


@dataclass(frozen=True)
class NormBounds:
    """What is known about the value of each step, and the layers; a step that is part of another has None."""

    values: tuple[PairedValue | None, ...]
    layers: tuple[Layer, ...]

    @property
    def output(self) -> PairedValue:
        """The bounds of the networks' output."""
        assert self.values[-1] is not None
        return self.values[-1]


@torch.no_grad()
def norm_bounds(graph: PairedGraph, region: Region) -> NormBounds:
    """Return the bounds of all values for inputs in the region; raise PomonaError where one has no norm."""
    centre, spread = region.centre(tuple(graph.input_shape[1:]))
    centre = centre.to(graph.device)
    propagation = NormPropagation(graph)
    propagation.known[0] = PairedValue(centre, centre.clone(), spread, spread, 0.0)
    for index in range(1, len(graph.steps)):
        propagation.known[index] = propagation.propagate(index)
    hidden = {*propagation.norms.values(), *propagation.paddings.values()}
    values = [None if index in hidden else propagation.known[index] for index in range(len(graph.steps))]
    result = NormBounds(tuple(values), tuple(propagation.layers))
    if not math.isfinite(result.output.gap):
        raise PomonaError("the bounds in the Euclidean norm overflow.")
    return result


@dataclass
class NormPropagation:
    """The pass through a graph: what is known about its values, and the steps that are computed together.

    `norms` has the layer that each folded batch norm follows, and `paddings` the padding before each convolution that
    includes it; the values of those layers and paddings are not known.
    """

    graph: PairedGraph
    known: dict[int, PairedValue] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    norms: dict[int, int] = field(default_factory=dict)
    paddings: dict[int, int] = field(default_factory=dict)

    def propagate(self, index: int) -> PairedValue:
        """Return what is known about the value of a step."""
        step = self.graph.steps[index]
        if index in self.norms:
            return self.known[self.norms[index]]
        after = self.only_reader(index)
        if after is not None and is_circular_padding(step, self.graph.steps[after]):
            self.paddings[after] = index
            return self.known[step.inputs[0]]
        values = [self.known[i] for i in step.inputs]
        if len(values) == 1:
            maps = self.affine_maps(index, values[0])
            if maps is not None:
                return self.propagate_affine(step, values[0], maps)
        return self.propagate_other(index, values).with_capped_gap()

    def only_reader(self, index: int) -> int | None:
        """Return the only step that reads a value, or None if there are more, or if the value is the output."""
        readers = [k for k, step in enumerate(self.graph.steps) for i in step.inputs if i == index]
        return readers[0] if len(readers) == 1 else None

    def affine_maps(self, index: int, value: PairedValue) -> list[AffineMap] | None:
        """Return the maps of both networks at a step, with the steps around it folded in where possible."""
        step, shape = self.graph.steps[index], value.dense.shape
        padding = self.graph.steps[self.paddings[index]] if index in self.paddings else None
        found = [affine_map(step, side, shape, padding) for side in SIDES]
        maps = [one for one in found if one is not None]
        if len(maps) < len(SIDES):
            return None
        after = self.only_reader(index)
        if after is None or self.graph.steps[after].op != "batch_norm" or maps[0].channel_axis is None:
            return maps
        self.norms[after] = index
        norm = self.graph.steps[after]
        others = zip(maps, reversed(maps), SIDES, strict=True)
        return [m.then_scale(batch_norm_coefficients(norm, side), other) for m, other, side in others]

    def propagate_affine(self, step: Step, value: PairedValue, maps: Sequence[AffineMap]) -> PairedValue:
        """Return the value after an affine layer, and add the layer to `layers`."""
        dense, pruned = maps
        removed = pruned - dense
        dense_norm = dense.norm_bound()
        error = removed.weight_error
        pruned_norm, removed_norm = (
            (pruned.norm_bound(), removed.norm_bound()) if removed else (dense_norm + error, error)
        )
        results = [dense(value.dense), pruned(value.pruned)]
        spreads = [
            (norm * spread + affine.rounding_bound(at, results[0])) * (1 + ROUNDING)
            for norm, spread, affine, at in (
                (dense_norm, value.dense_spread, dense, value.dense),
                (pruned_norm, value.pruned_spread, pruned, value.pruned),
            )
        ]
        # The removed part may act on the dense or on the pruned value; both bounds hold.
        gap = min(
            norm * value.gap
            + euclidean_norm(removed(at).expand_as(results[0]))
            + removed.rounding_bound(at, results[0])
            + removed_norm * spread
            for norm, spread, at in (
                (pruned_norm, value.dense_spread, value.dense),
                (dense_norm, value.pruned_spread, value.pruned),
            )
        )
        result = PairedValue(results[0], results[1], spreads[0], spreads[1], gap * (1 + ROUNDING)).with_capped_gap()
        self.layers.append(Layer(layer_name(step), dense_norm, pruned_norm, removed_norm, result.gap))
        return result

    def propagate_other(self, index: int, values: Sequence[PairedValue]) -> PairedValue:
        """Return the value after an operation that is not a layer."""
        step = self.graph.steps[index]
        sides = [[v.dense for v in values], [v.pruned for v in values]]
        results = [step.call(side, sides[side]) for side in SIDES]
        real = all(result.is_floating_point() for result in results)
        constants = sum_constants(step, sides[DENSE]) if real else None
        if constants is not None:
            return combine_values(values, results, *constants, removed_constant(step, sides[DENSE]))
        same = all(torch.equal(weight.dense, weight.pruned) for weight in step.weights)
        if len(values) == 1 and real and same:
            constant = lipschitz_constant(step, values[0].dense.shape)
            if constant is not None:
                return apply_lipschitz(values[0], results, constant, jump(step))
        if self.is_softsign(step):
            return apply_lipschitz(values[0], results, 1.0)
        raise PomonaError(
            f"certify cannot bound {step.op} at '{step.name}' by norms: they know linear and convolutional layers, "
            "batch norm, pooling, activations of bounded slope, sums and reshaping."
        )

    def is_softsign(self, step: Step) -> bool:
        """Return whether a step is x / (1 + |x|), whose largest slope is 1."""
        if step.op != "div" or len(step.inputs) != 2 or step.kwargs:
            return False
        above, below = step.inputs
        shifted = self.graph.steps[below]
        if shifted.op != "add" or len(shifted.inputs) != 1 or shifted.args[1:] != (1,) or shifted.kwargs:
            return False
        magnitude = self.graph.steps[shifted.inputs[0]]
        return magnitude.op == "abs" and magnitude.inputs == [above]


def removed_constant(step: Step, operands: Sequence[Tensor]) -> float:
    """Return the distance of the constants that a sum of entries adds in the two networks."""
    if not any(weight.dense.is_floating_point() for weight in step.weights):
        return 0.0
    dense, pruned = (step.call(side, [torch.zeros_like(x) for x in operands]) for side in SIDES)
    return euclidean_norm(torch.where(dense == pruned, 0.0, dense - pruned)) * (1 + 1e-12)


def layer_name(step: Step) -> str:
    """Return the name of the module that holds a layer's weight, or its operation for a network of one layer."""
    name = step.weights[0].name.partition("parametrizations.")[0].rstrip(".") or step.weights[0].name
    holder = name.rpartition(".")[0] if name == step.weights[0].name else name
    return holder or step.op
