"""Rule for embeddings of tokens: the rows of given tokens, or all rows where the tokens are not given."""

from __future__ import annotations

import torch
from torch import Tensor

from ..intervals import EPS, Interval, PairBounds
from ..steps import Step, Value, Weight
from .registry import Rule, register


def embedding_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the rows of tokens whose bounds are one number, and the hull of all rows for the others.

    The gap of a row is the difference of the two rows, so it is known for given tokens, and small for any token where
    the tables are close.
    """
    table, tokens = step.args[0], inputs[0].dense
    known = (tokens.low == tokens.high).unsqueeze(-1)
    index = tokens.low.long().clamp(0, len(table.dense) - 1)

    def rows(matrix: Tensor, margin: Tensor | float = 0.0) -> Interval:
        low, high = matrix - margin, matrix + margin
        return Interval(
            torch.where(known, torch.nn.functional.embedding(index, low), low.amin(0)),
            torch.where(known, torch.nn.functional.embedding(index, high), high.amax(0)),
        )

    difference = table.dense - table.pruned
    return PairBounds(rows(table.dense), rows(table.pruned), rows(difference, EPS * difference.abs()))


def looks_up_rows(step: Step) -> bool:
    """Return whether a step reads rows of a constant table."""
    return isinstance(step.args[0], Weight) and isinstance(step.args[1], Value)


register(Rule(embedding_bounds), "embedding", when=looks_up_rows)
