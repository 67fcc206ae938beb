"""Convolutions and LSTMs for `vmap` against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from private_training import make_data, make_network
from torch import nn

from pomona.privacy.batchable_ops import BatchableOps, PatchConvolution, extract_patches, recurrent_layers
from pomona.privacy.per_example_gradients import compute_per_example_gradients


def test_patch_convolution_has_the_same_gradients(monkeypatch):
    model, (x, y) = make_network(), make_data()
    model.insert(1, nn.Conv2d(6, 6, 3, padding=2, dilation=2).double())
    parameters = dict(model.named_parameters())
    expected, _ = compute_per_example_gradients(model, F.cross_entropy, parameters, x, y)
    calls = []

    class AlwaysBatchableOps(BatchableOps):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") == "conv2d":
                calls.append(1)
                inputs, weight, bias, *shape, _ = args
                return PatchConvolution.apply(inputs, weight, *shape) + bias[:, None, None]
            return super().__torch_function__(func, types, args, kwargs)

    monkeypatch.setattr("pomona.privacy.per_example_gradients.BatchableOps", AlwaysBatchableOps)
    ours, _ = compute_per_example_gradients(model, F.cross_entropy, parameters, x, y)
    assert len(calls) == 2
    assert all(torch.allclose(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("shape", [(1, 0, 1), ((2,), (1,), (2,)), ((3, 2), (0, 2), (1, 3)), ((2, 3), (2, 1), (2, 1))])
def test_patches_are_those_of_unfold(kernel, shape):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, 9, 8).double(), torch.randn(4, 2, *kernel).double().requires_grad_()
    out = F.conv2d(x, weight, None, *shape)
    patches = extract_patches(x, kernel, out.shape[2:], *shape).flatten(3).flatten(1, 2)
    stride, padding, dilation = (value if isinstance(value, int) else (value * 2)[:2] for value in shape)
    assert torch.equal(patches, F.unfold(x, kernel, dilation, padding, stride))
    one, other = (
        torch.autograd.grad(y.square().sum(), weight)[0] for y in (PatchConvolution.apply(x, weight, *shape), out)
    )
    assert torch.allclose(one, other)


@pytest.mark.parametrize(
    ("layers", "bidirectional", "bias", "batch_first"),
    [(1, False, True, True), (2, True, True, False), (2, False, False, True)],
)
def test_lstm_equals_torch(layers, bidirectional, bias, batch_first):
    torch.manual_seed(0)
    reference = nn.LSTM(3, 4, layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional).double()
    x, state = (
        torch.randn(5, 6, 3).double(),
        torch.randn(2, layers * (1 + bidirectional), 5 if batch_first else 6, 4).double(),
    )
    out, (h, c) = reference(x, tuple(state))
    ours = recurrent_layers(
        "lstm", x, tuple(state), list(reference._flat_weights), bias, layers, 0.0, True, bidirectional, batch_first
    )
    for one, other in zip(ours, (out, h, c), strict=True):
        assert torch.allclose(one, other)
