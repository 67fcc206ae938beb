"""Coupled parameters: the bias of a removed filter and the norm after it, which would make a constant of its zeros."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from .targets import Target
from .tracing import connected_modules

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


# Modules that map a channel of zeros to zeros.
ZERO_PRESERVING = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Hardswish, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
ZERO_FUNCTIONS = frozenset({"relu", "relu_", "relu6", "leaky_relu", "elu", "gelu", "silu", "tanh", "dropout"})


def preserves_zero(call: Any) -> bool:
    """Return whether a module, function or method maps zero to zero."""
    return isinstance(call, ZERO_PRESERVING) or getattr(call, "__name__", call) in ZERO_FUNCTIONS


def find_norms(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return layer → the norm that takes its output, from a traced forward, else from the order of definition."""
    calls = connected_modules(model, preserves_zero)
    if calls is None:
        children = [list(module.children()) for module in model.modules()]
        calls = [pair for siblings in children for pair in pairwise(siblings)]
        if any(isinstance(module, NORMS) for module in model.modules()):
            warnings.warn(
                f"the forward of {type(model).__name__} cannot be traced: each norm is assumed to follow the layer "
                "that it is defined after; where that is wrong, a removed filter may leave a constant behind.",
                stacklevel=4,
            )
    return {module: user for module, user in calls if isinstance(user, NORMS)}


def find_coupled(
    model: nn.Module, leaders: Sequence[Target], norms: dict[nn.Module, nn.Module]
) -> list[tuple[Target, Target]]:
    """Return (coupled parameter, leader) pairs: vectors with one entry for each output of the leader."""
    names = {module: name for name, module in model.named_modules()}
    taken = {(leader.module, leader.leaf) for leader in leaders}
    pairs = []
    for leader in leaders:
        if leader.leaf != "weight":  # recurrent and attention weights hold several gates or heads
            continue
        norm = norms.get(leader.module)
        for module in (leader.module,) if norm is None else (leader.module, norm):
            for leaf in ("weight", "bias"):
                vector = module._parameters.get(leaf)
                if vector is None or vector.ndim != 1 or (module, leaf) in taken:
                    continue
                if vector.shape[0] == leader.shape[leader.output_dim]:
                    name = f"{names[module]}.{leaf}".removeprefix(".")
                    tags = frozenset({"bias" if module is leader.module else "norm"})
                    pairs.append((Target(name, module, leaf, vector.shape, tags), leader))
    return pairs
