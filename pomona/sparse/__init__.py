"""What sparsity buys: networks that are smaller in memory and on the clock."""

from __future__ import annotations

from .shrink import Change, Shrunk, shrink

__all__ = ["Change", "Shrunk", "shrink"]
