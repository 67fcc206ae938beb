"""Private training that prunes the gradient: GIP (Yang et al., 2023), and what it is measured against.

step = pm.privacy.gip(model, optimizer, rows=len(x), batch_size=512, epsilon=2, delta=1e-5, steps=1000)
for rows in step:
    step(x[rows], y[rows])
"""

from . import network, schedule  # noqa: F401  (they register themselves)
from .accounting import Budget, Pair, Split, best_split, splits
from .audit import audit
from .mechanism import IndexMechanism
from .noise import Source
from .schedule import Exponential
from .step import METHODS, PrivateStep, gip
from .validate import fix, problems, validate

__all__ = [
    "METHODS",
    "Budget",
    "Exponential",
    "IndexMechanism",
    "Pair",
    "PrivateStep",
    "Source",
    "Split",
    "audit",
    "best_split",
    "fix",
    "gip",
    "problems",
    "splits",
    "validate",
]
