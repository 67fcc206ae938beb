"""Trace a model's forward symbolically: the graph of what it calls."""

from __future__ import annotations

import inspect
import operator
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..sharding import is_fully_sharded
from .layer_kind import layer_kind

# torch.fx patches `nn.Module` while it traces: two traces at the same time would not undo this in the right order.
TRACING = threading.RLock()


class LayerTracer(torch.fx.Tracer):
    """A tracer that does not look into layers, and records buffers as nodes instead of failing on operations.

    Modules that other threads call while it traces are none of its business: it lets them run.
    """

    proxy_buffer_attributes = True
    thread: int | None = None  # the one that traces

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> torch.fx.Graph:
        """Return the graph of a module's forward."""
        self.thread = threading.get_ident()
        return super().trace(root, concrete_args)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return the attribute of a module: a proxy for a parameter or buffer."""
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one call of the graph: torch's own, and layers and norms derived from them."""
        derived = layer_kind(m) != "other" and not any(m.children())
        return derived or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module without the hooks of FSDP2, which would gather its weights."""
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, m.forward if is_fully_sharded(m) else forward, args, kwargs)


def trace(
    model: nn.Module, tracer: type[LayerTracer] = LayerTracer, training: bool | None = None
) -> torch.fx.Graph | None:
    """Return the model's symbolic forward, or None where it cannot be traced.

    Every argument is symbolic at first. Where that fails, arguments with a default take it. The model is traced in its
    own mode, or with `training` in that one.
    """
    graph = try_to_trace(model, {}, tracer, training)
    if graph is None:
        parameters = inspect.signature(model.forward).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        graph = try_to_trace(model, defaults, tracer, training) if defaults else None
    return graph


def trace_both_modes(model: nn.Module) -> list[torch.fx.Graph]:
    """Return the model's symbolic forward in its own mode and in the other one, where each can be traced.

    A branch on `self.training`, such as an auxiliary head, is in one of the two only.
    """
    graphs = [trace(model), trace(model, training=not model.training)]
    return [graph for graph in graphs if graph is not None]


def cached_trace(model: nn.Module) -> torch.fx.Graph | None:
    """Return the model's symbolic forward as `trace` does, traced again only where modules were replaced."""
    modules = [*map(id, model.modules())]
    known = _traces.get(model)
    if known is None or known[0] != modules:
        known = _traces[model] = modules, trace(model)
    return known[1]


_traces: weakref.WeakKeyDictionary[nn.Module, tuple[list[int], torch.fx.Graph | None]] = weakref.WeakKeyDictionary()


def try_to_trace(
    model: nn.Module,
    fixed: dict[str, Any],
    tracer: type[LayerTracer] = LayerTracer,
    training: bool | None = None,
) -> torch.fx.Graph | None:
    """Return the model's symbolic forward for fixed values of some arguments, or None where it cannot be traced."""
    try:
        # A forward may draw random numbers, to leave out layers say.
        with (
            TRACING,
            restored_attributes(model),
            in_mode(model, training),
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=[]),
        ):
            warnings.simplefilter("ignore")
            return tracer().trace(model, fixed)
    except Exception:  # tracing runs the user's forward on proxies, which may fail in any way
        return None


@contextmanager
def in_mode(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Put all modules into training or evaluation mode, and back at the end; None leaves them in their own."""
    modes = [(module, module.training) for module in model.modules()] if training is not None else []
    try:
        for module, _ in modes:
            module.training = bool(training)
        yield
    finally:
        for module, mode in modes:
            if module.training != mode:  # what else it holds may be restored already
                module.training = mode


@contextmanager
def restored_attributes(model: nn.Module) -> Iterator[None]:
    """Undo at the end what a forward assigns: it may count its calls, or store its inputs.

    What has not changed is left alone, as other threads may run the model.
    """
    attributes = [vars(module) for module in model.modules()]
    lists = [value for names in attributes for value in names.values() if type(value) is list]
    tables = [*attributes, *(value for names in attributes for value in names.values() if isinstance(value, dict))]
    before = [(values, list(values)) for values in lists], [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for values, items in before[0]:
            if not is_same(values, items):
                values[:] = items
        for table, entries in before[1]:
            if list(table) != list(entries) or not is_same(table.values(), entries.values()):
                table.clear()
                table.update(entries)


def is_same(first: Collection[Any], second: Collection[Any]) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(first) == len(second) and all(map(operator.is_, first, second))


def called_modules(model: nn.Module, graph: torch.fx.Graph) -> list[nn.Module]:
    """Return the modules that a graph calls, in their order."""
    return [model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]


def called_name(node: torch.fx.Node) -> str:
    """Return the name of the function or method that a node calls, without leading underscores."""
    return str(getattr(node.target, "__name__", node.target)).strip("_")
