"""Sparse networks that are smaller and faster: packed weights and their kernels, removal of filters, and files."""

from __future__ import annotations

from .bitmap import BitmapTensor
from .blocks import BlockTensor
from .compress import Compression, compress, decompress
from .files import load, save
from .format import BalancedTensor
from .gaps import GapTensor
from .quantized import QuantizedBalancedTensor
from .shrink import Change, Shrunk, shrink
from .two_of_four import TwoOfFourTensor
from .unstructured import UnstructuredTensor

__all__ = [
    "BalancedTensor",
    "BitmapTensor",
    "BlockTensor",
    "Change",
    "Compression",
    "GapTensor",
    "QuantizedBalancedTensor",
    "Shrunk",
    "TwoOfFourTensor",
    "UnstructuredTensor",
    "compress",
    "decompress",
    "load",
    "save",
    "shrink",
]
