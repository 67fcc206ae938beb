"""Sparsity patterns: which weights are pruned together. Every top-k selection of weights is made here."""

from .balanced import NM, Balanced
from .base import PATTERNS, Pattern
from .units import Block, Filter, Kernel, UnitPattern, Unstructured

__all__ = ["NM", "PATTERNS", "Balanced", "Block", "Filter", "Kernel", "Pattern", "UnitPattern", "Unstructured"]
