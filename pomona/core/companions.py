"""What must go with a filter: its bias, and the batch norm behind it, or the channel would leak a constant."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from .targets import Target, traced_calls

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


# What leaves a channel of zeros at zero.
ZERO_STAYS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Hardswish, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
ZERO_FUNCTIONS = frozenset({"relu", "relu_", "relu6", "leaky_relu", "elu", "gelu", "silu", "tanh", "dropout"})


def zero_stays(call: Any) -> bool:
    """Whether a module, function or method gives zero for zero."""
    return isinstance(call, ZERO_STAYS) or getattr(call, "__name__", call) in ZERO_FUNCTIONS


def norms_behind(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Layer → the norm that takes its output: in a traced forward, else as they are defined one after the other."""
    calls = traced_calls(model, zero_stays)
    if calls is None:
        children = [list(module.children()) for module in model.modules()]
        calls = [pair for siblings in children for pair in pairwise(siblings)]
        if any(isinstance(module, NORMS) for module in model.modules()):
            warnings.warn(
                f"the forward of {type(model).__name__} cannot be traced: norms are taken to stand behind the layer "
                "they are defined after; where that is wrong, a removed filter may leave a constant behind.",
                stacklevel=4,
            )
    return {module: user for module, user in calls if isinstance(user, NORMS)}


def companions(
    model: nn.Module, leaders: Sequence[Target], behind: dict[nn.Module, nn.Module]
) -> list[tuple[Target, Target]]:
    """(companion, leader) pairs: vectors with one entry for each output of the leader."""
    names = {module: name for name, module in model.named_modules()}
    taken = {(leader.module, leader.leaf) for leader in leaders}
    pairs = []
    for leader in leaders:
        if leader.leaf != "weight":  # recurrent and attention weights hold several gates or heads
            continue
        follower = behind.get(leader.module)
        for module in (leader.module,) if follower is None else (leader.module, follower):
            for leaf in ("weight", "bias"):
                vector = module._parameters.get(leaf)
                if vector is None or vector.ndim != 1 or (module, leaf) in taken:
                    continue
                if vector.shape[0] == leader.shape[leader.rows]:
                    name = f"{names[module]}.{leaf}".removeprefix(".")
                    tags = frozenset({"bias" if module is leader.module else "norm"})
                    pairs.append((Target(name, module, leaf, vector.shape, tags), leader))
    return pairs
