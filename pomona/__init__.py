"""Pomona: sparse neural networks in PyTorch.

import pomona as pm

pruner = pm.DPF(sparsity=0.9)
pruner.attach(model, optimizer, total_steps=steps)
...                                                  # the training loop, as it is
pruner.finish()
"""

from . import data, models, theory
from .compressors import Binary, Quantize
from .core.errors import PomonaError
from .core.pruner import Pruner
from .core.targets import prunable
from .methods import (
    DPF,
    DSR,
    SET,
    SFP,
    SNIP,
    EdgePopup,
    Finetune,
    Incremental,
    IteRand,
    Lottery,
    OneShot,
    Random,
    RigL,
    SparseMomentum,
)
from .models import summary
from .patterns import NM, Balanced, Block, Filter, Kernel, Unstructured
from .schedules import Constant, Cosine, Cubic, Linear
from .sparse import shrink
from .version import __version__

__all__ = [
    "DPF",
    "DSR",
    "NM",
    "SET",
    "SFP",
    "SNIP",
    "Balanced",
    "Binary",
    "Block",
    "Constant",
    "Cosine",
    "Cubic",
    "EdgePopup",
    "Filter",
    "Finetune",
    "Incremental",
    "IteRand",
    "Kernel",
    "Linear",
    "Lottery",
    "OneShot",
    "PomonaError",
    "Pruner",
    "Quantize",
    "Random",
    "RigL",
    "SparseMomentum",
    "Unstructured",
    "__version__",
    "data",
    "models",
    "prunable",
    "shrink",
    "summary",
    "theory",
]
