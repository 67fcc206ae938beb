"""The common graph of two networks: one list of ATen operations, with the weights of both.

`torch.export` turns a network into a graph of functional operations: modules, views, in-place operations and dropout
are resolved, and every setting of an operation is an argument in the graph. Two networks can be certified if their
graphs are equal up to the values of parameters and buffers.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import PomonaError, require

DENSE, PRUNED = 0, 1
# Operations that have a bound of their own and are not taken apart.
KEPT_WHOLE = (
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "relu", "relu6",
    "leaky_relu", "prelu", "elu", "celu", "selu", "gelu", "silu", "mish", "softplus", "log_sigmoid", "hardtanh",
    "hardsigmoid", "hardswish", "softmax", "layer_norm", "group_norm", "batch_norm", "scaled_dot_product_attention",
    "matmul", "embedding", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "avg_pool1d", "avg_pool2d", "max_pool1d",
    "max_pool2d",
)  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A reference to the result of an earlier step, by its position in the graph."""

    index: int


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor that does not depend on the input: a parameter, a buffer or what is computed from them."""

    name: str
    dense: Tensor
    pruned: Tensor

    def of(self, side: int) -> Tensor:
        """Return the tensor of one network: DENSE or PRUNED."""
        return self.pruned if side else self.dense


@dataclass(frozen=True, eq=False)
class Step:
    """One operation of both networks on the results of earlier steps; the first step of a graph is the input.

    `op` is the name of the ATen operation without its overload, such as "linear"; `function` is the operation itself.
    Tensors in `args` and `kwargs` are a Value or a Weight. `item` selects one of several results.
    """

    name: str
    op: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None
    shape: torch.Size

    @property
    def inputs(self) -> list[int]:
        """The positions of the steps that this one reads, each as often as it is read."""
        return [leaf.index for leaf in self.leaves() if isinstance(leaf, Value)]

    @property
    def weights(self) -> list[Weight]:
        """The weights that this step reads."""
        return [leaf for leaf in self.leaves() if isinstance(leaf, Weight)]

    def leaves(self) -> list[Any]:
        """Return the arguments, those in lists and tuples too."""
        return tree_leaves((self.args, self.kwargs), is_leaf=is_reference)

    def evaluate(self, side: int, values: Sequence[Tensor | None]) -> Tensor:
        """Return the step's result in one network, from the results of all earlier steps in it."""

        def look_up(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return values[leaf.index]
            return leaf.of(side) if isinstance(leaf, Weight) else leaf

        args, kwargs = tree_map(look_up, (self.args, self.kwargs), is_leaf=is_reference)
        result = self.function(*args, **kwargs)
        return result if self.item is None else result[self.item]


@dataclass(frozen=True)
class PairedGraph:
    """The steps of a dense and a pruned network on one example; the first is the input, the last is the output."""

    steps: tuple[Step, ...]

    @property
    def input_shape(self) -> torch.Size:
        """The shape of the input, with a leading 1 for the batch."""
        return self.steps[0].shape

    def evaluate(self, side: int, x: Tensor) -> list[Tensor]:
        """Return the results of all steps of one network for an input of `input_shape`."""
        values: list[Tensor] = [x]
        for step in self.steps[1:]:
            values.append(step.evaluate(side, values))
        return values


def is_reference(leaf: Any) -> bool:
    """Return whether an argument is a Value or a Weight."""
    return isinstance(leaf, (Value, Weight))


def pair_networks(dense: nn.Module, pruned: nn.Module, example: Tensor) -> PairedGraph:
    """Return the common graph of two networks in evaluation mode for one example (1 × …).

    Raise PomonaError where a network cannot be exported, or where the two compute different operations.
    """
    programs = [export_network(model, example) for model in (dense, pruned)]
    nodes = [list(program.graph.nodes) for program in programs]
    require_equal_graphs(nodes[DENSE], nodes[PRUNED], programs)
    return PairedGraph(tuple(build_steps(programs, nodes[DENSE])))


def export_network(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """Return a network as a graph of functional ATen operations."""
    kept = {overload for name in KEPT_WHOLE for overload in overloads(name)}
    table = {op: function for op, function in torch.export.default_decompositions().items() if op not in kept}
    try:
        with warnings.catch_warnings(), without_fast_attention(), quiet_export():
            warnings.simplefilter("ignore")
            return torch.export.export(model.eval(), (example,), strict=False).run_decompositions(table)
    except PomonaError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PomonaError(
            f"{type(model).__name__} cannot be exported, so there is no graph to certify ({first}): leave out control "
            "flow that depends on values, and give inputs of the right shape."
        ) from error


def overloads(name: str) -> Iterator[Any]:
    """Yield every overload of an ATen operation."""
    packet = getattr(torch.ops.aten, name)
    yield from (getattr(packet, overload) for overload in packet.overloads())


def require_equal_graphs(
    dense: Sequence[fx.Node], pruned: Sequence[fx.Node], programs: Sequence[torch.export.ExportedProgram]
) -> None:
    """Raise PomonaError unless two graphs have the same operations, arguments and shapes."""
    for one, other in zip(dense, pruned, strict=False):
        same = (one.op, one.target, repr(one.args), repr(one.kwargs), shape_of(one)) == (
            other.op,
            other.target,
            repr(other.args),
            repr(other.kwargs),
            shape_of(other),
        )
        require(
            same,
            f"the networks differ in more than their weights: '{one.name}' is {describe(one)} in one and "
            f"{describe(other)} in the other.",
        )
    count = f"{len(dense)} and {len(pruned)}"
    require(len(dense) == len(pruned), f"the networks differ in more than their weights: they have {count} operations.")
    targets = [[(spec.kind, spec.target) for spec in p.graph_signature.input_specs] for p in programs]
    require(
        targets[0] == targets[1], "the networks differ in more than their weights: their parameters have other names."
    )


def describe(node: fx.Node) -> str:
    """Return an operation with its settings, for a message."""
    settings = [repr(a) for a in tree_leaves((node.args, node.kwargs)) if not isinstance(a, fx.Node)]
    return f"{operation_name(node)}({', '.join(settings)})" if settings else operation_name(node)


def operation_name(node: fx.Node) -> str:
    """Return the name of an ATen operation without its overload."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))


def shape_of(node: fx.Node) -> Any:
    """Return the shape and dtype of a node's tensor, or None."""
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def build_steps(programs: Sequence[torch.export.ExportedProgram], nodes: Sequence[fx.Node]) -> list[Step]:
    """Return the steps that lead from the input to the output; what does not depend on the input becomes a Weight."""
    placeholders = weights_of(programs)
    known: dict[fx.Node, Value | Weight] = {}
    steps: list[Step] = []
    for node in nodes:
        if node.op == "placeholder":
            if node.name in placeholders:
                known[node] = placeholders[node.name]
                continue
            require(not steps, "certify takes networks of one input.")
            known[node] = Value(0)
            steps.append(Step(node.name, "input", None, (), {}, None, node.meta["val"].shape))
        elif node.op == "output":
            outputs = tree_leaves(node.args)
            result = known.get(outputs[0])
            require(len(outputs) == 1 and result is not None, "certify takes networks of one output, a tensor.")
            require(isinstance(result, Value), "the output does not depend on the input.")
            assert isinstance(result, Value)
            return steps[: result.index + 1]
        elif not isinstance(node.meta.get("val"), Tensor):
            continue  # several results, of which getitem selects
        else:
            step = build_step(node, known)
            if step.inputs:
                known[node] = Value(len(steps))
                steps.append(step)
            else:
                sides = [step.evaluate(side, []) for side in (DENSE, PRUNED)]
                name = step.weights[0].name if step.weights else node.name
                known[node] = Weight(name, *sides)
    raise AssertionError("a graph ends with its output")


def build_step(node: fx.Node, known: dict[fx.Node, Value | Weight]) -> Step:
    """Return the step of a node whose result is one tensor."""
    source, item = node, None
    if node.target is operator.getitem:
        source, item = node.args  # type: ignore[assignment]
    args, kwargs = fx.node.map_arg((source.args, source.kwargs), known.__getitem__)
    return Step(
        node.name, operation_name(source), source.target, tuple(args), dict(kwargs), item, node.meta["val"].shape
    )


def weights_of(programs: Sequence[torch.export.ExportedProgram]) -> dict[str, Weight]:
    """Return the parameters, buffers and constants of both networks, by the names of their placeholders."""
    weights = {}
    for spec in programs[DENSE].graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            assert spec.target is not None
            sides = [read_tensor(program, spec.target).detach() for program in programs]
            weights[spec.arg.name] = Weight(spec.target, *sides)
    return weights


def read_tensor(program: torch.export.ExportedProgram, target: str) -> Tensor:
    """Return a parameter, buffer or constant of an exported network by its name."""
    tensor = program.state_dict.get(target)
    return program.constants[target] if tensor is None else tensor


class without_fast_attention:
    """A context in which nn.MultiheadAttention and nn.TransformerEncoderLayer compute what their code says."""

    def __enter__(self) -> None:
        self.enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *_: Any) -> None:
        torch.backends.mha.set_fastpath_enabled(self.enabled)


class quiet_export:
    """A context in which torch.export logs errors only."""

    def __enter__(self) -> None:
        self.logger = logging.getLogger("torch.export")
        self.level = self.logger.level
        self.logger.setLevel(logging.ERROR)

    def __exit__(self, *_: Any) -> None:
        self.logger.setLevel(self.level)
