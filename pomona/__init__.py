"""Pomona: sparse neural networks in PyTorch.

    import pomona as pm

    pruner = pm.DPF(sparsity=0.9)
    pruner.attach(model, optimizer, total_steps=steps)
    ...                                                  # the training loop, as it is
    pruner.finish()
"""

from . import models
from .compressors import Binary, Quantize
from .core.errors import PomonaError
from .core.pruner import Pruner
from .core.targets import prunable
from .methods import DPF, Incremental, OneShot, Random
from .models import summary
from .patterns import NM, Balanced, Block, Filter, Kernel, Unstructured
from .schedules import Constant, Cosine, Cubic, Linear
from .version import __version__

__all__ = [
    "DPF",
    "NM",
    "Balanced",
    "Binary",
    "Block",
    "Constant",
    "Cosine",
    "Cubic",
    "Filter",
    "Incremental",
    "Kernel",
    "Linear",
    "OneShot",
    "PomonaError",
    "Pruner",
    "Quantize",
    "Random",
    "Unstructured",
    "__version__",
    "models",
    "prunable",
    "summary",
]
