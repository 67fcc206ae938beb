"""Pomona: sparse neural networks in PyTorch.

import pomona as pm

pruner = pm.DPF(sparsity=0.9)
pruner.attach(model, optimizer, total_steps=steps)
...                                                  # the training loop, as it is
pruner.finish()
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from . import cpu_features as _cpu_features  # noqa: F401  first: it must run before torch is imported

# isort: split
from . import data, models, theory
from .compressors import Binary, PowerThreshold, Quantize, Soft, SoftThreshold
from .core.pruner import Pruner
from .core.targets import prunable
from .errors import PomonaError
from .methods import (
    ACDC,
    DPF,
    DSR,
    SET,
    SFP,
    SNIP,
    ST3,
    EdgePopup,
    Feather,
    Finetune,
    Incremental,
    IteRand,
    Lottery,
    OneShot,
    Random,
    RigL,
    SparseMomentum,
    SRigL,
)
from .models import summary
from .patterns import NM, Balanced, Block, Filter, Kernel, Unstructured
from .schedules import Constant, Cosine, Cubic, Linear
from .sparse import BalancedTensor, compress, decompress, load, save, shrink
from .version import __version__

if TYPE_CHECKING:
    from . import privacy

__all__ = [
    "ACDC",
    "DPF",
    "DSR",
    "NM",
    "SET",
    "SFP",
    "SNIP",
    "ST3",
    "Balanced",
    "BalancedTensor",
    "Binary",
    "Block",
    "Constant",
    "Cosine",
    "Cubic",
    "EdgePopup",
    "Feather",
    "Filter",
    "Finetune",
    "Incremental",
    "IteRand",
    "Kernel",
    "Linear",
    "Lottery",
    "OneShot",
    "PomonaError",
    "PowerThreshold",
    "Pruner",
    "Quantize",
    "Random",
    "RigL",
    "SRigL",
    "Soft",
    "SoftThreshold",
    "SparseMomentum",
    "Unstructured",
    "__version__",
    "compress",
    "data",
    "decompress",
    "load",
    "models",
    "privacy",
    "prunable",
    "save",
    "shrink",
    "summary",
    "theory",
]


def __getattr__(name: str) -> ModuleType:
    """Private training when it is first asked for: it needs much of scipy."""
    if name == "privacy":
        return importlib.import_module(".privacy", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
