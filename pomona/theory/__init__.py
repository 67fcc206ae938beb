"""What is promised: one file a paper, each bound with its constants and what was measured."""

from __future__ import annotations

from . import convergence

__all__ = ["convergence"]
