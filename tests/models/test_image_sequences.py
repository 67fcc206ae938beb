"""Networks that read an image as a sequence: their parameters, their MACs, and what they read."""

from __future__ import annotations

import pytest
import torch

import pomona as pm


def test_the_lstm_reads_the_rows_in_order():
    torch.manual_seed(0)
    model = pm.models.build("digits_lstm", hidden=5)
    image = torch.randn(1, 1, 8, 8)
    state = None
    for row in image[0, 0]:
        _, state = model.lstm(row[None, None], state)
    torch.testing.assert_close(model(image), model.linear(state[0][-1]))


def test_parameters_and_macs_of_the_lstm():
    model = pm.models.build("digits_lstm", hidden=5)
    summary = pm.summary(model, (1, 8, 8))
    assert summary.params == 4 * 5 * (8 + 5 + 2) + 5 * 10 + 10
    assert summary.macs == 8 * 4 * 5 * (8 + 5) + 5 * 10


def test_parameters_of_the_transformer():
    model = pm.models.build("digits_transformer", width=12, heads=3, layers=2)
    block = 2 * 2 * 12 + 12 * 36 + 36 + 12 * 12 + 12 + 12 * 48 + 48 + 48 * 12 + 12
    outside = 4 * 12 + 12 + 16 * 12 + 2 * 12 + 12 * 10 + 10  # patches, positions, the last norm, the classifier
    summary = pm.summary(model, (1, 8, 8))
    assert summary.params == 2 * block + outside
    products = 2 * 2 * 16 * 16 * 12  # of queries with keys, and with values, at 16 patches in 2 layers
    assert summary.macs == 16 * (4 * 12 + 2 * (3 + 1 + 4 + 4) * 12 * 12) + 12 * 10 + products
    assert model(torch.randn(3, 1, 8, 8)).shape == (3, 10)


def test_the_transformer_depends_on_patches_by_their_position_only():
    torch.manual_seed(0)
    model = pm.models.build("digits_transformer").eval()
    image = torch.randn(1, 1, 8, 8)
    moved = image.roll(2, 3)  # by one patch
    assert not torch.allclose(model(image), model(moved), atol=1e-4)
    torch.nn.init.zeros_(model.position)
    torch.testing.assert_close(model(image), model(moved))


@pytest.mark.parametrize(("options", "message"), [({"patch": 3}, "patch=3 does not divide"), ({"heads": 5}, "heads=5")])
def test_sizes_that_do_not_fit_are_refused(options: dict[str, int], message: str):
    with pytest.raises(pm.PomonaError, match=message):
        pm.models.build("digits_transformer", **options)
