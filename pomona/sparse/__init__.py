"""What sparsity buys: networks that are smaller in memory and on the clock."""

from __future__ import annotations

from .compress import Compression, compress, decompress
from .files import load, save
from .format import BalancedTensor
from .shrink import Change, Shrunk, shrink

__all__ = [
    "BalancedTensor",
    "Change",
    "Compression",
    "Shrunk",
    "compress",
    "decompress",
    "load",
    "save",
    "shrink",
]
