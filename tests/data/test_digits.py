"""The digits of scikit-learn."""

from __future__ import annotations

import pytest
import torch

from pomona.data import load


def test_digits_need_no_file_and_have_a_fixed_split():
    data = load("digits")
    assert (len(data.train), len(data.test), data.classes, data.input_shape) == (1347, 450, 10, (1, 8, 8))
    assert data.train.x.dtype == torch.uint8
    assert data.train.x.max() == 255
    assert all(44 <= n <= 46 for n in data.test.y.bincount())
    rows = {row.tobytes() for row in torch.cat([data.train.x, data.test.x]).numpy()}
    assert len(rows) == 1797
    assert data.test.y[:12].tolist() == [1, 2, 3, 1, 3, 5, 0, 1, 5, 5, 0, 8]
    pixels = data.train.x.double() / 255
    assert data.mean[0] == pytest.approx(pixels.mean().item())
    x, _ = next(data.batches(1347).epoch(0))
    assert abs(x.mean().item()) < 1e-5
    assert x.std().item() == pytest.approx(1, abs=1e-3)
