"""The split of ε between index draws and noise."""

from __future__ import annotations

import pytest

from pomona.privacy import best_split, splits

pytest.importorskip("dp_accounting")


def test_best_split_depends_on_the_number_of_kept_coordinates():
    setting = {"clip": 1.0, "epsilon": 4.0, "delta": 1e-5, "rows": 1000, "batch_size": 200, "steps": 10}
    few = splits([20], [1], spread=0.5, shares=(0.01, 0.5), **setting)
    assert [split.share for split in few] == [0.0, 0.01, 0.5]
    assert [split.sigma for split in few] == sorted(split.sigma for split in few)
    assert [split.lost for split in few] == sorted((split.lost for split in few), reverse=True)
    assert [split.pruning for split in few] == sorted((split.pruning for split in few), reverse=True)
    best = best_split([20], [1], spread=0.5, shares=(0.01, 0.5), **setting)
    assert best.error == min(split.error for split in few)
    assert best.share > 0.01  # one of twenty: a draw can find it, and the authors' 1 % is too little
    many = best_split([100_000], [10_000], spread=0.01, shares=(0.01, 0.5), **setting)
    assert many.share == 0.0  # ten thousand: every share only adds noise
    assert many.lost == pytest.approx(0.9)
    largest = splits([20], [1], shares=(), **setting)[0]
    assert largest.pruning == pytest.approx(0.95)  # random-k of a gradient of norm 1
