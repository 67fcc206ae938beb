"""Packed layers of every kind in `torch.save`, `pickle` and `copy.deepcopy`."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from packing import prune_balanced
from torch import nn

from pomona.sparse import compress, decompress
from pomona.sparse.layers import PackedLayer
from pomona.sparse.network import plan_copy


def save_and_load(model: nn.Module) -> nn.Module:
    """Return a model from a file of `torch.save`."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def make_conv1d() -> nn.Module:
    """Return the `Conv1D` of transformers."""
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(64, 64)  # type: ignore[no-any-return]


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(64, 64), (2, 64)),
    "conv1d of transformers": (make_conv1d, (2, 64)),
    "convolution": (lambda: nn.Conv2d(32, 32, 3), (2, 32, 6, 6)),
    "convolution, channels last": (
        lambda: nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        (2, 32, 6, 6),
    ),
    "lstm": (lambda: nn.LSTM(64, 64, 2), (3, 2, 64)),
}
WAYS = (save_and_load, lambda model: pickle.loads(pickle.dumps(model, 2)), copy.deepcopy)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_a_copy_of_a_packed_layer_is_the_same_layer(kind: str, bits: int | None) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    packed = compress(prune_balanced(make(), 32, 3), policy="all", bits=bits)
    assert isinstance(packed, PackedLayer)
    x = torch.randn(shape)
    for take_copy in WAYS:
        other = take_copy(packed)
        y, expected = other(x), packed(x)
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
        assert repr(other.compression) == repr(packed.compression)
        plain, same = decompress(other), decompress(packed)
        assert str(plain) == str(same)
        for one, parameter in zip(plain.parameters(), same.parameters(), strict=True):
            assert torch.equal(one, parameter)
            assert one.stride() == parameter.stride()


@torch.no_grad()
def test_a_copy_of_a_network_is_the_same_network() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 8)
    model, x = prune_balanced(nn.Sequential(*layers), 4, 1).eval(), torch.randn(2, 4, 6, 6)
    packed = compress(model, x, policy="all", patience=0.01)
    for network in filter(None, (packed, plan_copy(packed, (x,)))):
        for take_copy in WAYS:
            torch.testing.assert_close(take_copy(network)(x), model(x))
