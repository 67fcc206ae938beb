"""The export of a network to a graph of functional ATen operations, in evaluation mode and in float64."""

from __future__ import annotations

import copy
import functools
import logging
import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.parameter import is_lazy

from ...errors import PomonaError, require

# Operations that have a bound of their own and are not taken apart.
KEPT_WHOLE = (
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "relu", "relu6",
    "leaky_relu", "prelu", "elu", "celu", "selu", "gelu", "silu", "mish", "softplus", "log_sigmoid", "hardtanh",
    "hardsigmoid", "hardswish", "softmax", "layer_norm", "group_norm", "batch_norm", "scaled_dot_product_attention",
    "matmul", "embedding", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "avg_pool1d", "avg_pool2d", "max_pool1d",
    "max_pool2d", "max_pool3d", "pad",
)  # fmt: skip
UNINITIALIZED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
FLOAT64_DEVICES = ("cpu", "cuda")


def evaluation_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a network in float64 and evaluation mode, without gradients of its parameters."""
    name = type(model).__name__
    lazy = [key for key, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
    require(not lazy, f"{name} has lazy parameters without a shape, such as '{next(iter(lazy), '')}': run it once.")
    try:
        # A tensor that is computed in a forward pass, as by torch.nn.utils.prune, cannot be copied with its history.
        computed = [t for part in model.modules() for t in vars(part).values() if isinstance(t, Tensor) and t.grad_fn]
        memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in computed}
        copied = copy.deepcopy(model, memo).double().eval().requires_grad_(False)
    except Exception as error:
        reason = first_line(error)
        raise PomonaError(f"{name} cannot be copied to float64, so it has no certificate ({reason}).") from error
    return copied if device_of(copied).type in FLOAT64_DEVICES else copied.cpu()


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer; the CPU for a model without any."""
    return next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


def load_copy(model: nn.Module, state: Any) -> nn.Module:
    """Return a copy of an evaluation copy with the weights of a state dict."""
    copied = copy.deepcopy(model)
    try:
        copied.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise PomonaError(f"the pruned weights do not fit {type(model).__name__}: {reason}") from error
    return copied


def export_network(model: nn.Module, *examples: Tensor) -> ExportedProgram:
    """Return a network in evaluation mode as a graph of functional ATen operations; refuse one with a state."""
    name = type(model).__name__
    try:
        with warnings.catch_warnings(), without_fast_attention(), without_logs():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, examples, strict=False)
            if any(needs_decomposition(node) for node in program.graph.nodes):  # which takes most of the time
                program = program.run_decompositions(decompositions())
    except Exception as error:
        raise PomonaError(
            f"{name} cannot be exported, so there is no graph to certify ({first_line(error)}): leave out control "
            "flow that depends on values, and give inputs of the right shape."
        ) from error
    for spec in program.graph_signature.output_specs:
        require(
            spec.kind in (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION),
            f"{name} writes to '{spec.target}' in its forward pass, so its output depends on earlier inputs.",
        )
    return program


def needs_decomposition(node: fx.Node) -> bool:
    """Return whether an operation of an exported network writes to its inputs or is made of others without a bound."""
    if node.op in ("placeholder", "output") or node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return True
    if operation_name(node) in KEPT_WHOLE or is_flatten(node) or is_switched_off_dropout(node):
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), "CompositeImplicitAutograd")
    return composite or node.target in decompositions()


def is_flatten(node: fx.Node) -> bool:
    """Return whether a node joins some axes of a tensor."""
    return node.target is torch.ops.aten.flatten.using_ints


def is_switched_off_dropout(node: fx.Node) -> bool:
    """Return whether a node is dropout in evaluation mode, whose result is its input."""
    return node.target is torch.ops.aten.dropout.default and node.args[2:] == (False,)


def output_node(program: ExportedProgram) -> fx.Node:
    """Return the node of a network's only output."""
    outputs = output_nodes(program)
    require(len(outputs) == 1 and isinstance(outputs[0], fx.Node), "certify takes networks of one output, a tensor.")
    dtype = outputs[0].meta["val"].dtype
    require(dtype.is_floating_point, f"the output has the type {dtype}, and a certificate bounds real numbers.")
    return outputs[0]


def output_nodes(program: ExportedProgram) -> list[Any]:
    """Return what a network returns: nodes, or other values."""
    (last,) = (node for node in program.graph.nodes if node.op == "output")
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    results: Any = last.args[0]
    outputs = [node for node, kind in zip(results, kinds, strict=True) if kind is OutputKind.USER_OUTPUT]
    return [node for node in outputs if node is not None]


def live_nodes(program: ExportedProgram, output: fx.Node) -> list[fx.Node]:
    """Return the nodes that an output depends on, in order, with the output last."""
    found: set[fx.Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return [node for node in program.graph.nodes if node in found]


def require_deterministic(node: fx.Node) -> None:
    """Raise PomonaError for an operation whose result is random or uninitialized."""
    name = operation_name(node)
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    random = random and not is_switched_off_dropout(node)
    if name == "scaled_dot_product_attention":  # which may have dropout, and so always has the tag
        random = bool((node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)) != 0)
    require(
        not random,
        f"'{node.name}' is random ({name}) in evaluation mode too, so there is no certificate: give F.dropout "
        "training=self.training, and leave out noise.",
    )
    require(name not in UNINITIALIZED, f"'{node.name}' is uninitialized memory ({name}): use torch.zeros instead.")


def tensors_of(program: ExportedProgram) -> dict[str, Tensor]:
    """Return the parameters, buffers and constants of an exported network by their names."""
    return {**program.constants, **program.state_dict}


def placeholder_targets(program: ExportedProgram) -> dict[str, str]:
    """Return the names of the parameters, buffers and constants by the names of their placeholders."""
    targets = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        known = spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        require(known and spec.target is not None, f"certify cannot follow the object '{spec.target}' of the network.")
        targets[str(spec.arg.name)] = str(spec.target)
    return targets


def operation_name(node: fx.Node) -> str:
    """Return the name of an ATen operation without its overload."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))


@functools.cache
def decompositions() -> dict[Any, Any]:
    """Return the decompositions of ATen operations, without those that are kept whole."""
    kept = {overload for name in KEPT_WHOLE for overload in overloads(name)}
    return {op: function for op, function in torch.export.default_decompositions().items() if op not in kept}


def overloads(name: str) -> Iterator[Any]:
    """Yield every overload of an ATen operation."""
    packet = getattr(torch.ops.aten, name)
    yield from (getattr(packet, overload) for overload in packet.overloads())


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def without_fast_attention() -> Iterator[None]:
    """Let nn.MultiheadAttention and nn.TransformerEncoderLayer compute what their code says."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def without_logs() -> Iterator[None]:
    """Keep torch.export from logging; what it raises says enough."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
