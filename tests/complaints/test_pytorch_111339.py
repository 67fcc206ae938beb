"""https://github.com/pytorch/pytorch/issues/111339: no speedup with semi-structured sparsity, and more memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from complaint_models import count_bytes, prune_at_once
from torch import Tensor, nn

import pomona as pm


def prune_two_of_four() -> nn.Module:
    """Return a linear layer of which two weights of every four are zero."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(256, 256, bias=False))
    prune_at_once(layer, pm.OneShot(pattern=pm.NM(2, 4), include=["0.weight"]))
    return layer


def test_one_vector_needs_less_memory_than_the_dense_layer() -> None:
    """With an input of one row, the 2:4 layer took more memory than the dense one, because the input was padded."""
    dense, x = prune_two_of_four(), torch.randn(1, 256)
    packed = pm.compress(dense, x, policy="all", patience=0.0)
    # Half of the values, each with six bits of index (16 of 32: five bits, three in a word of sixteen).
    assert count_bytes(packed) <= count_bytes(dense) * (1 / 2 + 1 / 2 * 6 / 32)
    with torch.no_grad():
        assert torch.allclose(packed(x), dense(x), atol=1e-5)
        assert packed(x).shape == (1, 256)


def test_the_decision_is_made_for_the_given_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that gains with many rows may not gain with one: it is timed with as many as the user has."""
    rows: list[int] = []

    def invent_times(calls: Sequence[Callable[[], Tensor]], *_: object, **__: object) -> list[float]:
        """Return times in which the packed layer, the second of two, is faster where there is more than one row."""
        rows.append(len(calls[0]()))
        return [1.0] * len(calls) if len(calls) > 2 else [1.0, 0.5 if rows[-1] > 1 else 2.0]

    monkeypatch.setattr(sys.modules["pomona.sparse.compress"], "median_seconds", invent_times)
    reports = [pm.compress(prune_two_of_four(), torch.randn(count, 256)).compression for count in (1, 64)]
    assert set(rows) == {1, 64}
    assert [report.layers[0].packed for report in reports] == [False, True]
