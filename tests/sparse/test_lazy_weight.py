"""The `weight` of a packed layer: nothing is unpacked to read its dtype, and every function of torch takes it."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packing import prune_balanced
from torch import Tensor, nn
from torch.nn import functional as F

from pomona.sparse import BalancedTensor, compress
from pomona.sparse.layers import PackedConv2d, PackedLinear
from pomona.sparse.layers.lazy_weight import LazyWeight

pytestmark = pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")


def make_layers() -> tuple[nn.Linear, PackedLinear]:
    torch.manual_seed(0)
    layer = prune_balanced(nn.Linear(64, 32), 32, 3).requires_grad_(False)
    return layer, compress(layer, policy="all")  # type: ignore[return-value]


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """Return a list to which a weak reference to every unpacked matrix is added."""
    made: list[weakref.ref[Tensor]] = []
    unpack = BalancedTensor.unpack

    def count(*given: Any) -> Tensor:
        made.append(weakref.ref(weight := unpack(*given)))
        return weight

    monkeypatch.setattr(BalancedTensor, "unpack", staticmethod(count))
    return made


class LooksAtWeight(nn.Module):
    """A feed-forward block that converts its input as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = make_layers()[0], prune_balanced(nn.Linear(32, 64), 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wi(x.to(self.wi.weight.device)).relu()
        if isinstance(self.wo.weight, Tensor) and x.dtype != self.wo.weight.dtype and self.wo.weight.shape[1] == 32:
            x = x.to(self.wo.weight.dtype)
        return self.wo(x)


def test_metadata_is_read_without_unpacking(unpacked: list[weakref.ref[Tensor]]) -> None:
    layer, packed = make_layers()
    images = prune_balanced(nn.Conv2d(32, 32, 3), 32, 3)
    convolution = compress(images, policy="all").half()
    assert isinstance(convolution, PackedConv2d)
    unpacked.clear()
    for weight, dense in ((packed.weight, layer.weight), (convolution.weight, images.weight.half())):
        assert (weight.shape, weight.dtype, weight.device) == (dense.shape, dense.dtype, dense.device)
        assert (weight.ndim, weight.dim(), weight.size(1), len(weight)) == (
            dense.ndim,
            dense.dim(),
            *dense.shape[1::-1],
        )
        assert (weight.numel(), weight.nbytes, weight.is_floating_point()) == (dense.numel(), dense.nbytes, True)
        assert not weight.requires_grad
    assert not unpacked
    assert packed.to("meta").weight.is_meta


def test_a_model_that_looks_at_a_dtype_multiplies_packed_weights(unpacked: list[weakref.ref[Tensor]]) -> None:
    model, x = LooksAtWeight().eval(), torch.randn(2, 64)
    packed = compress(model, policy="all")
    unpacked.clear()
    with torch.no_grad():
        torch.testing.assert_close(packed(x), model(x), rtol=1e-4, atol=1e-5)
    assert not unpacked


def test_compiled_and_exported_models_look_at_a_dtype() -> None:
    packed, x = compress(LooksAtWeight().eval(), policy="all"), torch.randn(2, 64)
    with torch.no_grad():
        y = packed(x)
        torch.testing.assert_close(torch.compile(packed, backend="aot_eager", fullgraph=True)(x), y)
        torch.testing.assert_close(torch.export.export(packed, (x,)).module()(x), y)


def test_products_keep_one_matrix_until_the_weights_change(unpacked: list[weakref.ref[Tensor]]) -> None:
    layer, packed = make_layers()
    x = torch.randn(2, 64)
    for product in (F.linear, torch.func.vmap(F.linear, (0, None)), lambda x, weight: (weight @ x.T).T):
        torch.testing.assert_close(product(x, packed.weight), product(x, layer.weight))
    unpacked.clear()
    for _ in range(3):
        torch.testing.assert_close(F.linear(x, packed.weight, packed.bias), layer(x))
    assert not unpacked
    packed.weight_values.mul_(2)
    torch.testing.assert_close(F.linear(x, packed.weight), 2 * F.linear(x, layer.weight))
    given = x.clone().requires_grad_()
    F.linear(given, packed.weight).sum().backward()
    torch.testing.assert_close(given.grad, 2 * layer.weight.sum(0).expand(2, -1))


def test_a_look_at_the_values_keeps_no_memory(unpacked: list[weakref.ref[Tensor]]) -> None:
    layer, packed = make_layers()
    unpacked.clear()
    assert int(packed.weight.count_nonzero()) == int(layer.weight.count_nonzero())
    gc.collect()
    assert [matrix() for matrix in unpacked] == [None]
    weight = packed.weight
    weight.mul_(2)  # a tensor of its own, which stays as it is while it is held
    torch.testing.assert_close(weight, 2 * layer.weight)
    torch.testing.assert_close(F.linear(torch.eye(64), weight), 2 * layer.weight.T)
    assert torch.equal(packed.weight, layer.weight)


def save_and_load(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream)


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w,
        lambda w: w.detach(),
        lambda w: w.T.T,
        lambda w: torch.cat([w[:3], w[3:]]),
        lambda w: torch.from_numpy(w.numpy()),
        lambda w: torch.tensor(w.tolist()),
        lambda w: torch.ops.aten.add(w, 0),
        copy.deepcopy,
        save_and_load,
    ],
)
def test_functions_get_a_plain_tensor(read: Callable[[Any], Tensor]) -> None:
    layer, packed = make_layers()
    weight = packed.weight
    assert isinstance(weight, LazyWeight)
    assert torch.equal(read(weight), layer.weight)
    assert repr(weight) == repr(weight.clone())
    assert type(weight.clone()) is Tensor


def test_a_layer_that_looks_at_its_weight_has_the_same_state() -> None:
    _, packed = make_layers()
    names = list(packed.state_dict())
    assert packed.weight.sum().isfinite()
    assert list(packed.state_dict()) == list(save_and_load(packed.state_dict())) == names
    assert not list(packed.parameters())
