"""The operators of the formats that only GPUs have kernels for: products on a CPU, torch's tools, layers and files."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from pomona.sparse.ops import bitmap_product, gap_product
from pomona.sparse.packed_tensor import DTYPES, PackedTensor

pytestmark = pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
FORMATS: list[type[Any]] = [pm.GapTensor, pm.BitmapTensor]
MODULES = {"gaps": gap_product, "bitmap": bitmap_product}


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 150)),
    st.floats(0, 1),
    st.integers(0, 20),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.sampled_from(FORMATS),
)
def test_any_product_matches_float64(
    shape: tuple[int, int], sparsity: float, n: int, dtype: torch.dtype, relu: bool, transposed: bool, kind: type[Any]
) -> None:
    rows, columns = shape
    weight = unstructured_weight(rows, columns, sparsity).to(dtype)
    packed = kind.from_dense(weight)
    x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    y = packed.product(x.T.contiguous() if transposed else x, *packed.parts, bias, *packed.sizes, relu, transposed)
    assert is_close(y.T if transposed else y, exact.relu() if relu else exact)


@pytest.mark.parametrize(("kind", "name"), [(pm.GapTensor, "gaps"), (pm.BitmapTensor, "bitmaps")])
def test_a_cpu_has_no_kernel_and_says_so(kind: type[Any], name: str) -> None:
    packed = kind.from_dense(unstructured_weight(40, 64, 0.8))
    gap_product.warn_about_dense_product.cache_clear()
    with pytest.warns(UserWarning, match=f"multiplied as dense ones for {name} on a CPU"):
        packed.linear(torch.ones(1, 64))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_operator_passes_torchs_opcheck(kind: type[Any]) -> None:
    packed = kind.from_dense(unstructured_weight(40, 64, 0.8))
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = torch.randn(3, 64), *packed.parts, torch.randn(40), *packed.sizes, True
    torch.library.opcheck(getattr(torch.ops.pomona, packed.format_name), arguments, test_utils=quick)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("relu", [False, True])
def test_the_product_is_differentiable(relu: bool, kind: type[Any]) -> None:
    weight = unstructured_weight(32, 64, 0.8)
    packed = kind.from_dense(weight)
    x, bias = torch.randn(5, 64, requires_grad=True), torch.randn(32, requires_grad=True)
    upstream = torch.randn(5, 32)
    dense = torch.nn.functional.linear(x, weight, bias)
    expected = torch.autograd.grad(dense.relu() if relu else dense, (x, bias), upstream)
    found = torch.autograd.grad(packed.linear(x, bias, relu), (x, bias), upstream)
    torch.testing.assert_close(found, expected)


def make_dense_backend(kind: type[PackedTensor]) -> Callable[..., Tensor]:
    """Return the product of a format's operator by the dense matrix, in place of a GPU's kernel."""

    def multiply(x: Tensor, *arguments: Any) -> Tensor:
        parts, rest = arguments[: len(kind.part_names)], arguments[len(kind.part_names) :]
        bias, *sizes, relu, transposed = rest
        weight, columns = kind.unpack(*parts, *sizes), sizes[1]
        y = weight @ x.reshape(columns, -1) if transposed else x.reshape(-1, columns) @ weight.T
        y = y if bias is None else y + (bias.unsqueeze(1) if transposed else bias)
        return y.relu() if relu else y

    return multiply


@pytest.mark.parametrize("kind", FORMATS)
class TestModels:
    @pytest.fixture
    def net(self, monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> nn.Module:
        """A network whose layers can be packed in a format, as if this were a GPU."""
        monkeypatch.setitem(MODULES[kind.format_name].BACKENDS, "cpu", make_dense_backend(kind))
        torch.manual_seed(0)
        return prune_unstructured(nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 7)), 0.8)

    def test_compress_packs_and_reports_the_format(self, net: nn.Module, kind: type[Any]) -> None:
        name = kind.format_name
        packed = pm.compress(net, policy="all", formats=[name], patience=0.0)
        assert {one for m in packed.modules() if isinstance(m, PackedLayer) for one in m.formats.values()} == {name}
        assert [layer.format for layer in packed.compression.layers] == [name, name]
        x = torch.randn(4, 30)
        assert agree(packed(x), net(x))
        assert has_same_state(pm.decompress(packed), net)
        assert agree(copy.deepcopy(packed)(x), net(x))

    def test_files(self, net: nn.Module, kind: type[Any], tmp_path: Path) -> None:
        packed = pm.compress(net, policy="all", formats=[kind.format_name], patience=0.0)
        again = load(save(packed, tmp_path / "net.safetensors"), copy.deepcopy(net))
        assert isinstance(again[0], PackedLinear)
        x = torch.randn(2, 30)
        assert torch.equal(again(x), packed(x))
        assert has_same_state(again, packed)

    def test_torch_export(self, net: nn.Module, kind: type[Any]) -> None:
        packed = pm.compress(net, policy="all", formats=[kind.format_name], patience=0.0)
        x = torch.randn(2, 30)
        exported = torch.export.export(packed, (x,))
        assert f"pomona.{kind.format_name}" in exported.graph_module.code
        assert agree(exported.module()(x), net(x))


def test_formats_for_any_mask_depend_on_the_device_and_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"weight": unstructured_weight(10, 30, 0.8)}
    names = ["unstructured", "gaps", "bitmap"]
    assert list(any_mask.pack_any_mask(weights, names, None)) == ["unstructured"]
    for kind in FORMATS:
        monkeypatch.setitem(MODULES[kind.format_name].BACKENDS, "cpu", make_dense_backend(kind))
    found = any_mask.pack_any_mask(weights, names, torch.float16)
    assert list(found) == names
    assert {packed["weight"].dtype for packed in found.values()} == {torch.float16}
    wide = {"weight": torch.zeros(2, 65_537)}
    assert list(any_mask.pack_any_mask(wide, names, None)) == ["unstructured", "bitmap"]
