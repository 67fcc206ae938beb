"""What is promised: one file a paper, each bound with its constants and what was measured.

bounds        how much may be pruned, with a guarantee (Qian & Klabjan), and its solvers
laws          the random matrices and draws that the bounds rest on
certificate   what a real network and its pruned copy can differ at most
spectral      operator norms of convolutions
gip           the randomised top-k of private training
balanced      what balanced pruning removes, against unconstrained
iterand       how wide a random network must be to hide a given one
convergence   dynamic pruning with feedback
qian          tables 1 to 3 and figures 1 and 2 of Qian & Klabjan
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["balanced", "bounds", "certificate", "convergence", "gip", "iterand", "laws", "qian", "spectral"]


def __getattr__(name: str) -> ModuleType:
    """Each module when it is first asked for: a pruner needs none of them, and they need scipy."""
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
