"""Follow a model's forward symbolically: which modules it calls, and which take whose output."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def called_modules(model: nn.Module) -> list[nn.Module] | None:
    """Return the leaf modules in the order a symbolic forward calls them, or None where it cannot be traced."""
    graph = trace(model)
    if graph is None:
        return None
    return [model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]


def connected_modules(model: nn.Module, skip: Callable[[Any], bool]) -> list[tuple[nn.Module, nn.Module]] | None:
    """Return (module, module that takes its output) pairs of a symbolic forward, or None where it cannot be traced.

    Calls for which `skip` is true are skipped over, as long as nothing else takes their output.
    """
    graph = trace(model)
    if graph is None:
        return None
    pairs = []
    for node in graph.nodes:
        if node.op != "call_module":
            continue
        for user in node.users:
            while len(user.users) == 1 and skip(callee(model, user)):
                user = next(iter(user.users))
            if user.op == "call_module":
                pairs.append((model.get_submodule(str(node.target)), model.get_submodule(str(user.target))))
    return pairs


def callee(model: nn.Module, node: torch.fx.Node) -> Any:
    """Return what a node calls: a module, a function, or the name of a method."""
    return model.get_submodule(str(node.target)) if node.op == "call_module" else node.target


class BufferTracer(torch.fx.Tracer):
    """A tracer that records buffers as graph nodes instead of failing on operations with them."""

    proxy_buffer_attributes = True


def trace(model: nn.Module) -> torch.fx.Graph | None:
    """Return the model's symbolic forward, or None where it cannot be traced."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return BufferTracer().trace(model)
    except Exception:  # tracing runs the user's forward on proxies, which may fail in any way
        return None
    finally:
        for module, state in before:  # a forward may count its calls, or store its inputs
            vars(module).clear()
            vars(module).update(state)
