"""Trace a model's forward symbolically: the graph of what it calls."""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import Any

import torch
from torch import nn

from ..sharding import is_fully_sharded
from .layer_kind import layer_kind


class LayerTracer(torch.fx.Tracer):
    """A tracer that does not look into layers, and records buffers as nodes instead of failing on operations."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one call of the graph: torch's own, and layers and norms derived from them."""
        derived = layer_kind(m) != "other" and not any(m.children())
        return derived or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module without the hooks of FSDP2, which would gather its weights."""
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
    before = [(module, module.training, dict(vars(module))) for module in model.modules()]
    try:
        for module in model.modules() if training is not None else ():
            module.training = bool(training)
        # A forward may draw random numbers, to leave out layers say.
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            return tracer().trace(model, fixed)
    except Exception:  # tracing runs the user's forward on proxies, which may fail in any way
        return None
    finally:
        for module, mode, state in before:  # a forward may count its calls, or store its inputs
            vars(module).clear()
            vars(module).update(state)
            if module.training != mode:  # a compiled module does not keep it among its variables
                module.training = mode


def called_modules(model: nn.Module, graph: torch.fx.Graph) -> list[nn.Module]:
    """Return the modules that a graph calls, in their order."""
    return [model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]


def called_name(node: torch.fx.Node) -> str:
    """Return the name of the function or method that a node calls, without leading underscores."""
    return str(getattr(node.target, "__name__", node.target)).strip("_")
