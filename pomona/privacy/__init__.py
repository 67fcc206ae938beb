"""Private training with gradients index pruning (GIP; Yang et al., 2023), and the methods it is compared with.

step = pm.privacy.gip(model, optimizer, rows=len(x), batch_size=512, epsilon=2, delta=1e-5, steps=1000)
for rows in step:
    step(x[rows], y[rows], rows)
"""

from . import exponential_schedule, private_cnn  # noqa: F401  (they register themselves)
from .accounting import Pair
from .budget import Budget, solve_steps
from .budget_split import Split, best_split, splits
from .canary_audit import audit
from .clipping_norms import Clipping
from .exponential_schedule import Exponential
from .gip_steps import gip
from .index_mechanism import IndexMechanism
from .ledger import Ledger, digest_rows
from .model_validation import fix, problems, validate
from .poisson_loader import poisson_loader
from .private_step import METHODS, PrivateStep
from .ramp import EPSILON_RAMP, Ramp
from .random_source import Source

__all__ = [
    "EPSILON_RAMP",
    "METHODS",
    "Budget",
    "Clipping",
    "Exponential",
    "IndexMechanism",
    "Ledger",
    "Pair",
    "PrivateStep",
    "Ramp",
    "Source",
    "Split",
    "audit",
    "best_split",
    "digest_rows",
    "fix",
    "gip",
    "poisson_loader",
    "problems",
    "solve_steps",
    "splits",
    "validate",
]
