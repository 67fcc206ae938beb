"""Scores with ties, special values and other properties that make selection hard."""

from __future__ import annotations

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")

SCORE_KINDS = ["normal", "ties", "equal", "mostly zero", "special"]


def make_scores(kind: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return random scores of one of `SCORE_KINDS`."""
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "ties":
        return scores.round()
    if kind == "equal":
        return torch.full(shape, -0.25)
    if kind == "mostly zero":
        return torch.where(scores > 1, scores, 0.0)
    if kind == "special":
        odd = torch.tensor([NAN, -NAN, INF, -INF, -0.0, 0.0])
        choice = torch.randint(12, shape, generator=torch.Generator().manual_seed(seed + 1))
        return torch.where(choice < 6, odd[choice % 6], scores)
    return scores
