"""Pomona: sparse neural networks in PyTorch.

import pomona as pm

pruner = pm.DPF(0.9)
pruner.attach(model, optimizer, loader=loader, epochs=10)
...                                                  # the training loop, as it is
pruner.finish()

A name is imported when it is first used, so that `import pomona` and `pomona --help` do not wait for torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import cpu_features as _cpu_features  # noqa: F401  first: it must run before torch is imported

# isort: split
from .errors import PomonaError
from .version import __version__

if TYPE_CHECKING:
    from . import data, models, privacy, theory
    from .compressors import Binary, PowerThreshold, Quantize, Soft, SoftThreshold
    from .core.pruner import Pruner
    from .core.targets import prunable
    from .export import export
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
        prune,
    )
    from .models import summary
    from .patterns import NM, Balanced, Block, Filter, Kernel, Unstructured
    from .posttraining import SparseGPT, Wanda
    from .schedules import Constant, Cosine, Cubic, Linear
    from .sparse.bitmap import BitmapTensor
    from .sparse.blocks import BlockTensor
    from .sparse.compress import compress, decompress
    from .sparse.files import load, save
    from .sparse.format import BalancedTensor
    from .sparse.gaps import GapTensor
    from .sparse.shrink import shrink
    from .sparse.two_of_four import TwoOfFourTensor
    from .sparse.unstructured import UnstructuredTensor
    from .theory.certificate.predictions import certify_predictions
    from .theory.certified_pruning import Certified

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
    "BitmapTensor",
    "Block",
    "BlockTensor",
    "Certified",
    "Constant",
    "Cosine",
    "Cubic",
    "EdgePopup",
    "Feather",
    "Filter",
    "Finetune",
    "GapTensor",
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
    "SparseGPT",
    "SparseMomentum",
    "TwoOfFourTensor",
    "Unstructured",
    "UnstructuredTensor",
    "Wanda",
    "__version__",
    "certify_predictions",
    "compress",
    "data",
    "decompress",
    "export",
    "load",
    "models",
    "privacy",
    "prunable",
    "prune",
    "save",
    "shrink",
    "summary",
    "theory",
]

# The module of each public name that is imported when it is first used: the imports for type checkers above.
_PUBLIC_NAMES = {
    "compressors": "Binary PowerThreshold Quantize Soft SoftThreshold",
    "core.pruner": "Pruner",
    "core.targets": "prunable",
    "export": "export",
    "methods": "ACDC DPF DSR EdgePopup Feather Finetune Incremental IteRand Lottery OneShot Random RigL SET SFP SNIP "
    "SRigL ST3 SparseMomentum prune",
    "models": "summary",
    "patterns": "NM Balanced Block Filter Kernel Unstructured",
    "posttraining": "SparseGPT Wanda",
    "schedules": "Constant Cosine Cubic Linear",
    "sparse.bitmap": "BitmapTensor",
    "sparse.blocks": "BlockTensor",
    "sparse.compress": "compress decompress",
    "sparse.files": "load save",
    "sparse.format": "BalancedTensor",
    "sparse.gaps": "GapTensor",
    "sparse.shrink": "shrink",
    "sparse.two_of_four": "TwoOfFourTensor",
    "sparse.unstructured": "UnstructuredTensor",
    "theory.certificate.predictions": "certify_predictions",
    "theory.certified_pruning": "Certified",
}
_MODULE_OF = {name: module for module, names in _PUBLIC_NAMES.items() for name in names.split()}
# The modules that are attributes of the package, such as `pm.theory`.
_MODULES = frozenset(
    {
        "allocation",
        "compressors",
        "core",
        "data",
        "integrations",
        "masking",
        "methods",
        "models",
        "patterns",
        "posttraining",
        "privacy",
        "registry",
        "schedules",
        "scores",
        "sparse",
        "theory",
    }
)


class _Package(ModuleType):
    """The package, where a public function keeps its name when a module of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Return a public name or a module of the package, which is imported when it is first used."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    elif name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    """Return all names of the package, also those that are not imported yet."""
    return sorted({*globals(), *__all__, *_MODULES})
