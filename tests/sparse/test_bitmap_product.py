"""The operator `gaps`: products on a CPU and on an emulated GPU, torch's tools, layers and files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import agree, has_same_state, is_close, prune_unstructured, unstructured_weight
from torch import Tensor, nn

import pomona as pm
from pomona.sparse import any_mask, load, save
from pomona.sparse.layers import PackedLayer, PackedLinear
from pomona.sparse.ops import bitmap, bitmap_product
from pomona.sparse.packed_tensor import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 150)),
    st.floats(0, 1),
    st.integers(0, 20),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
)
def test_any_product_matches_float64(
    shape: tuple[int, int], sparsity: float, n: int, dtype: torch.dtype, relu: bool, transposed: bool
) -> None:
    rows, columns = shape
    weight = unstructured_weight(rows, columns, sparsity).to(dtype)
    packed = pm.BitmapTensor.from_dense(weight)
    x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    y = bitmap(x.T.contiguous() if transposed else x, *packed.parts, bias, *packed.sizes, relu, transposed)
    assert is_close(y.T if transposed else y, exact.relu() if relu else exact)


def test_a_cpu_has_no_kernel_and_says_so() -> None:
    packed = pm.BitmapTensor.from_dense(unstructured_weight(40, 64, 0.8))
    bitmap_product.warn_about_dense_product.cache_clear()
    with pytest.warns(UserWarning, match="multiplied as dense ones for bitmaps on a CPU"):
        packed.linear(torch.ones(1, 64))


def test_the_operator_passes_torchs_opcheck() -> None:
    packed = pm.BitmapTensor.from_dense(unstructured_weight(40, 64, 0.8))
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.pomona.bitmap,
        (torch.randn(3, 64), *packed.parts, torch.randn(40), *packed.sizes, True),
        test_utils=quick,
    )


@pytest.mark.parametrize("relu", [False, True])
def test_the_product_is_differentiable(relu: bool) -> None:
    weight = unstructured_weight(32, 64, 0.8)
    packed = pm.BitmapTensor.from_dense(weight)
    x, bias = torch.randn(5, 64, requires_grad=True), torch.randn(32, requires_grad=True)
    upstream = torch.randn(5, 32)
    dense = torch.nn.functional.linear(x, weight, bias)
    expected = torch.autograd.grad(dense.relu() if relu else dense, (x, bias), upstream)
    found = torch.autograd.grad(packed.linear(x, bias, relu), (x, bias), upstream)
    torch.testing.assert_close(found, expected)


def multiply_as_dense(x: Tensor, *arguments: Any) -> Tensor:
    """Return the product of the operator by the dense matrix, in place of a GPU's kernel."""
    *parts, bias, rows, columns, most, relu, transposed = arguments
    weight = pm.BitmapTensor.unpack(*parts, rows, columns, most)
    y = weight @ x.reshape(columns, -1) if transposed else x.reshape(-1, columns) @ weight.T
    y = y if bias is None else y + (bias.unsqueeze(1) if transposed else bias)
    return y.relu() if relu else y


class TestModels:
    @pytest.fixture
    def net(self, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
        """A network whose layers can be packed with bitmaps, as if this were a GPU."""
        monkeypatch.setitem(bitmap_product.BACKENDS, "cpu", multiply_as_dense)
        torch.manual_seed(0)
        return prune_unstructured(nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 7)), 0.8)

    def test_compress_packs_and_reports_bitmaps(self, net: nn.Module) -> None:
        packed = pm.compress(net, policy="all", formats=["bitmap"], patience=0.0)
        kinds = {kind for m in packed.modules() if isinstance(m, PackedLayer) for kind in m.formats.values()}
        assert kinds == {"bitmap"}
        assert [layer.format for layer in packed.compression.layers] == ["bitmap", "bitmap"]
        x = torch.randn(4, 30)
        assert agree(packed(x), net(x))
        assert has_same_state(pm.decompress(packed), net)
        assert agree(copy.deepcopy(packed)(x), net(x))

    def test_files(self, net: nn.Module, tmp_path: Path) -> None:
        packed = pm.compress(net, policy="all", formats=["bitmap"], patience=0.0)
        again = load(save(packed, tmp_path / "net.safetensors"), copy.deepcopy(net))
        assert isinstance(again[0], PackedLinear)
        x = torch.randn(2, 30)
        assert torch.equal(again(x), packed(x))
        assert has_same_state(again, packed)

    def test_torch_export(self, net: nn.Module) -> None:
        packed = pm.compress(net, policy="all", formats=["bitmap"], patience=0.0)
        x = torch.randn(2, 30)
        exported = torch.export.export(packed, (x,))
        assert "pomona.bitmap" in exported.graph_module.code
        assert agree(exported.module()(x), net(x))


def test_only_half_types_are_packed_with_bitmaps_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"weight": unstructured_weight(10, 30, 0.8)}
    assert not any_mask.pack_any_mask(weights, ["bitmap"], None)
    monkeypatch.setitem(bitmap_product.BACKENDS, "cpu", multiply_as_dense)
    found = any_mask.pack_any_mask(weights, ["bitmap"], torch.float16)
    assert found["bitmap"]["weight"].dtype == torch.float16
