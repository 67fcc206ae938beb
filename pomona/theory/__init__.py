"""Bounds and guarantees of the papers, one module or package each, with their constants and measurements.

bounds        Qian & Klabjan (2021): how much may be pruned with a guarantee, and solvers
certificate   an upper bound on the difference between a network and its pruned copy; predictions that cannot change
spectral      operator norms of linear layers and convolutions
gip           Yang et al. (2023): the randomized top-k mask of private training
balanced      Yao et al. (2019): the error of balanced pruning, next to unconstrained pruning
iterand       Chijiwa et al. (2021): how wide a random network must be to contain a given one
convergence   Lin et al. (2020): convergence of dynamic pruning with feedback
qian_tables   Qian & Klabjan (2021): Tables 1 to 3, Figures 1 and 2
certified_pruning   pruning that leaves a given share of predictions provably unchanged
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = [
    "balanced",
    "bounds",
    "certificate",
    "certified_pruning",
    "convergence",
    "gip",
    "iterand",
    "qian_tables",
    "spectral",
]

FORMER_NAMES = {"laws": "bounds", "qian": "qian_tables"}  # modules that were renamed or merged


def __getattr__(name: str) -> ModuleType:
    """Import a module of this package at first use: a pruner needs none of them, and they need scipy."""
    module = FORMER_NAMES.get(name, name)
    if module in __all__:
        return importlib.import_module(f".{module}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
