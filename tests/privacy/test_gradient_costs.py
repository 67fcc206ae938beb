"""Where sums of outer products cost less than gradients of examples."""

from __future__ import annotations

import pytest
import torch

from pomona.privacy.gradient_costs import GPU, are_products_cheaper, count_gradients, count_products, device_costs
from pomona.privacy.product_sums import ProductShape


@pytest.mark.parametrize(
    ("rows", "shape", "is_convolution", "expected"),
    [
        (32, (1, 512, 3072), False, True),  # the first layer of an MLP
        (32, (1, 32, 512), False, False),  # so small that further calls cost more
        (1, (1, 512, 3072), False, False),  # a single gradient is the sum
        (32, (8, 768, 768), False, True),
        (32, (128, 768, 768), False, False),  # long sequences, whose Gram matrices are large
        (32, (1024, 64, 144), True, False),  # the first layers of a convolutional network
        (32, (16, 512, 4608), True, True),  # and its last ones
        (0, (1, 512, 3072), False, False),
        (32, (0, 512, 3072), False, False),
        (32, (2000, 4096, 4096), False, False),
    ],
)
def test_choice_by_shape(rows, shape, is_convolution, expected):
    arguments = rows, ProductShape(*shape), torch.float32, torch.device("cpu")
    assert are_products_cheaper(*arguments, is_convolution=is_convolution) is expected


def test_devices_without_measured_costs_keep_gradients():
    arguments = 32, ProductShape(1, 512, 3072), torch.float32
    assert are_products_cheaper(*arguments, torch.device("cpu"))
    assert not are_products_cheaper(*arguments, torch.device("cuda"))


def test_costs_grow_with_rows_and_gpus_without_float64_have_none(monkeypatch):
    shape = ProductShape(1, 512, 3072)
    for count in (count_gradients, count_products):
        given = (torch.float32,) if count is count_gradients else ()
        assert count(GPU, 64, shape, *given) > count(GPU, 32, shape, *given)
    for capability, expected in (((9, 0), GPU), ((8, 0), GPU), ((8, 6), None), ((12, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert device_costs(torch.device("cuda")) is expected
