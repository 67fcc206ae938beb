"""Helpers of the tests on random matrices."""

from __future__ import annotations

import numpy as np


def spectral_norm(matrix: np.ndarray) -> float:
    """Return ‖W‖₂."""
    return float(np.linalg.norm(matrix, 2))


def keep_smallest(W: np.ndarray, N: int) -> np.ndarray:
    """Return the N smallest entries by magnitude, with zeros elsewhere."""
    flat = np.abs(W).ravel()
    removed = np.zeros(W.size)
    positions = np.argsort(flat)[:N]
    removed[positions] = W.ravel()[positions]
    return removed.reshape(W.shape)
