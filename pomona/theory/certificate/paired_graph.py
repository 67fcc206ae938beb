"""The common graph of two networks: one list of ATen operations, with the weights of both.

`torch.export` turns a network into a graph of functional operations: modules, views, in-place operations and dropout
are resolved, and every setting of an operation is an argument in the graph. What does not depend on the input is
computed and becomes a weight, so a masked or parametrized layer is a plain one. Two networks can be certified if their
graphs are then equal up to the values of the weights.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ...errors import PomonaError, require
from .exported_network import (
    device_of,
    evaluation_copy,
    export_network,
    is_flatten,
    is_switched_off_dropout,
    live_nodes,
    load_copy,
    operation_name,
    output_node,
    placeholder_targets,
    require_deterministic,
    tensors_of,
)
from .fused_steps import rewrite_steps
from .steps import DENSE, PRUNED, Step, Value, Weight, is_reference

EXTRA_STATE = "_extra_state"  # the end of the key of a state dict that holds more than tensors
BATCH = 3  # examples in the check that a network treats each example of a batch alone
AGREEMENT = 1e-4  # relative to the largest output: above float32 rounding inside a network
DIFFERENT = "the networks differ in more than their weights"


@dataclass(frozen=True)
class Source:
    """The exported dense network of a paired graph, to exchange the weights of the pruned one."""

    program: ExportedProgram
    names: frozenset[str]  # of all entries of the dense network's state dict


@dataclass(frozen=True)
class PairedGraph:
    """The steps of a dense and a pruned network on one example; the first is the input, the last is the output."""

    steps: tuple[Step, ...]
    source: Source | None = field(default=None, repr=False, compare=False)

    @property
    def input_shape(self) -> torch.Size:
        """The shape of the input, with a leading 1 for the batch."""
        return self.steps[0].shape

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next((w.dense.device for step in self.steps for w in step.weights), torch.device("cpu"))

    def evaluate(self, side: int, x: Tensor) -> list[Tensor]:
        """Return the results of all steps of one network for an input of `input_shape`."""
        values: list[Tensor] = [x]
        for step in self.steps[1:]:
            values.append(step.evaluate(side, values))
        return values

    def run(self, side: int, batch: Tensor) -> Tensor:
        """Return the outputs of one network for a batch of examples, each with its leading 1 in the result."""
        return torch.func.vmap(lambda x: self.evaluate(side, x)[-1])(batch.unsqueeze(1))

    def with_pruned(self, state: Mapping[str, Tensor]) -> PairedGraph:
        """Return the graph with other pruned weights, which have the names of the dense network's state dict.

        Tensors that `state` leaves out are those of the dense network. Nothing is exported again.
        """
        assert self.source is not None
        program, tensors = self.source.program, tensors_of(self.source.program)
        for name, tensor in state.items():
            require(name in self.source.names, f"the dense network has no weight '{name}'.")
            if name not in tensors:
                continue
            shapes = tuple(tensor.shape), tuple(tensors[name].shape)
            same = shapes[0] == shapes[1]
            require(same, f"'{name}' has the shape {shapes[0]}, and {shapes[1]} in the dense network.")
        own = tied_entries(tensors)
        for name, other in own.items():  # the graph may read any one of the tied entries
            same = name not in state or other not in state or torch.equal(state[name], state[other])
            require(same, f"'{name}' and '{other}' are one weight in the dense network and differ in the pruned one.")
        pruned = tensors | {n: tensor.to(tensors[n].device) for n, tensor in state.items() if n in tensors}
        steps = pair_steps(build_steps(program, tensors), build_steps(program, pruned))
        return replace(self, steps=steps)


def pair_networks(dense: nn.Module, pruned: nn.Module | Mapping[str, Tensor], example: Tensor) -> PairedGraph:
    """Return the common graph in float64 of two networks in evaluation mode for one example (1 × …).

    `pruned` is a network, or a state dict of the dense one. Neither network is changed. Raise PomonaError where a
    network cannot be exported, where the two compute different operations, or where an example's result depends on
    the other examples of its batch.
    """
    dense = evaluation_copy(dense)
    example = example.detach().to(device_of(dense))
    example = example.double() if example.is_floating_point() else example
    program = export_network(dense, example.clone())
    graph = PairedGraph(
        pair_steps(build_steps(program, tensors_of(program)), build_steps(program, tensors_of(program))),
        Source(program, frozenset(dense.state_dict())),
    )
    require_faithful(graph, DENSE, dense, example)
    if isinstance(pruned, Mapping) and not any(str(name).endswith(EXTRA_STATE) for name in pruned):
        return graph.with_pruned(load_copy(dense, pruned).state_dict())
    other = load_copy(dense, pruned) if isinstance(pruned, Mapping) else evaluation_copy(pruned).to(example.device)
    other_program = export_network(other, example.clone())
    steps = pair_steps(build_steps(program, tensors_of(program)), build_steps(other_program, tensors_of(other_program)))
    graph = replace(graph, steps=steps)
    require_faithful(graph, PRUNED, other, example)
    return graph


def build_steps(program: ExportedProgram, tensors: Mapping[str, Tensor], output: fx.Node | None = None) -> list[Step]:
    """Return the steps from the input to the output of one network, whose weights hold its tensors on both sides."""
    output = output_node(program) if output is None else output
    targets = placeholder_targets(program)
    known: dict[fx.Node, Value | Weight] = {}
    steps: list[Step] = []
    for node in live_nodes(program, output):
        if node.op == "placeholder" and node.name in targets:
            known[node] = single_weight(targets[node.name], tensors[targets[node.name]])
        elif node.op == "placeholder":
            require(not steps, "certify takes networks of one input.")
            known[node] = Value(0)
            steps.append(Step(node.name, "input", None, (), {}, None, node.meta["val"].shape))
        elif isinstance(node.meta.get("val"), Tensor):
            require_deterministic(node)
            step = build_step(node, known)
            if step.inputs:
                known[node] = Value(len(steps))
                steps.append(step)
            else:
                name = step.weights[0].name if step.weights else node.name
                known[node] = single_weight(name, step.evaluate(DENSE, []))
        # Other nodes have several results, of which getitem selects, or none that a step may read.
    require(isinstance(known[output], Value), "the output does not depend on the input.")
    return steps


def single_weight(name: str, tensor: Tensor) -> Weight:
    """Return a weight that is the same in both networks."""
    tensor = tensor.detach()
    tensor = tensor.double() if tensor.is_floating_point() else tensor
    return Weight(name, tensor, tensor)


def build_step(node: fx.Node, known: Mapping[fx.Node, Value | Weight]) -> Step:
    """Return the step of a node whose result is one tensor; it computes in float64, whatever types the network has."""
    source, item = node, None
    if node.target is operator.getitem:
        source, item = cast(tuple[fx.Node, int], node.args)
        require_deterministic(source)

    def look_up(argument: fx.Node) -> Any:
        if argument in known:
            return known[argument]
        operation = operation_name(argument)
        raise PomonaError(f"certify cannot follow {operation} at '{argument.name}', whose result is no tensor.")

    args, kwargs = fx.node.map_arg((source.args, source.kwargs), look_up)
    args, kwargs = tree_map(in_float64, (tuple(args), dict(kwargs)), is_leaf=is_reference)
    step = Step(node.name, operation_name(source), source.target, args, kwargs, item, node.meta["val"].shape)
    aten = torch.ops.aten
    if source.target is aten.view.default:  # which needs the strides of the exported tensors; a reshape takes any
        return replace(step, function=aten.reshape.default)
    if is_switched_off_dropout(source):
        return replace(step, op="clone", function=aten.clone.default, args=args[:1], kwargs={})
    if is_flatten(source):
        sides = fx.immutable_collections.immutable_list(step.shape)  # as those of a view, to compare equal
        return replace(step, op="view", function=aten.reshape.default, args=(args[0], sides), kwargs={})
    if source.target is aten.copy.default and node.meta["val"].is_floating_point():
        # The values of one tensor in the shape of another; it has no derivative.
        return replace(step, op="expand", function=aten.expand.default, args=(args[1], list(step.shape)), kwargs={})
    if source.target is aten._native_batch_norm_legit_no_training.default:  # has no batching rule for vmap
        args = (*args[:5], False, *args[5:7], False)
        return replace(step, op="batch_norm", function=aten.batch_norm.default, args=args, item=None)
    return step


def in_float64(leaf: Any) -> Any:
    """Return torch.float64 for a floating-point type, and any other argument as it is."""
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf


# ---- two networks


def pair_steps(dense: Sequence[Step], pruned: Sequence[Step]) -> tuple[Step, ...]:
    """Return the common steps of two networks; raise PomonaError where they differ in more than their weights."""
    steps = tuple(pair_step(one, other) for one, other in zip(dense, pruned, strict=False))
    counts = f"{len(dense)} and {len(pruned)}"
    require(len(dense) == len(pruned), f"{DIFFERENT}: they have {counts} operations.")
    return rewrite_steps(steps)


def pair_step(dense: Step, pruned: Step) -> Step:
    """Return the common step of two networks; raise PomonaError where it is not the same operation."""
    leaves, structure = tree_flatten((dense.args, dense.kwargs), is_leaf=is_reference)
    others, other_structure = tree_flatten((pruned.args, pruned.kwargs), is_leaf=is_reference)
    same = (dense.function, dense.item, dense.shape) == (pruned.function, pruned.item, pruned.shape)
    same = same and structure == other_structure and all(map(is_same_argument, leaves, others))
    require(same, f"{DIFFERENT}: '{dense.name}' is {dense.describe()} in one, and {pruned.describe()} in the other.")
    merged = [pair_weight(a, b) if isinstance(a, Weight) else a for a, b in zip(leaves, others, strict=True)]
    args, kwargs = structure.unflatten(merged)
    return replace(dense, args=args, kwargs=kwargs)


def is_same_argument(one: Any, other: Any) -> bool:
    """Return whether two arguments are equal; weights only need the same shape and type."""
    if isinstance(one, Weight) and isinstance(other, Weight):
        return (one.dense.shape, one.dense.dtype) == (other.dense.shape, other.dense.dtype)
    return type(one) is type(other) and repr(one) == repr(other)


def pair_weight(dense: Weight, pruned: Weight) -> Weight:
    """Return the weight of both networks."""
    same = dense.dense.is_floating_point() or torch.equal(dense.dense, pruned.dense)
    require(same, f"{DIFFERENT}: the whole numbers '{dense.name}', such as positions or a mask, are not equal.")
    for tensor in (dense.dense, pruned.dense):
        require(not bool(tensor.isnan().any()), f"'{dense.name}' has weights that are not a number.")
    return Weight(dense.name, dense.dense, pruned.dense)


def tied_entries(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the name of the first entry that shares its memory with an entry, for each entry that has one."""
    first: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    tied = {}
    for name, tensor in tensors.items():
        key = tensor.data_ptr(), tensor.shape, tensor.stride()
        if tensor.numel() and first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


# ---- check


@torch.no_grad()
def require_faithful(graph: PairedGraph, side: int, model: nn.Module, example: Tensor) -> None:
    """Raise PomonaError unless the graph computes what the network does, for each example of a batch alone.

    A network that takes one example at a time, and fails for a batch, is compared on one.
    """
    batches = [example]
    if example.is_floating_point():
        draw = torch.randn(BATCH, *example.shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        batches.append(draw.to(example.device))
    for batch in batches:
        if graph.steps[-1].shape[:1] != (1,) and len(batch) > 1:
            continue  # the first axis of the output is not the batch
        outputs = [graph.evaluate(side, x)[-1] for x in batch.split(1)]
        expected = torch.cat(outputs) if len(batch) > 1 else outputs[0]
        try:
            found = next(leaf for leaf in tree_leaves(model(batch.clone())) if isinstance(leaf, Tensor)).double()
        except Exception:
            require(len(batch) > 1, f"{type(model).__name__} fails for an input of shape {tuple(batch.shape)}.")
            continue
        scale = float(expected.nan_to_num().abs().amax()) if expected.numel() else 0.0
        same = found.shape == expected.shape
        same = same and torch.allclose(found, expected, rtol=0, atol=AGREEMENT * scale + 1e-30, equal_nan=True)
        require(
            same,
            f"{type(model).__name__} gives another result for an example alone than in a batch of {len(batch)}, as a "
            "batch norm without running statistics does, so there is no certificate for one example.",
        )
