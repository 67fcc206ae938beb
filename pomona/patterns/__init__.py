"""Which weights fall together, and the only place where a top-k is taken."""

from .balanced import NM, Balanced
from .base import PATTERNS, Pattern
from .units import Block, Filter, Kernel, UnitPattern, Unstructured

__all__ = ["NM", "PATTERNS", "Balanced", "Block", "Filter", "Kernel", "Pattern", "UnitPattern", "Unstructured"]
