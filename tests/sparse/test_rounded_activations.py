"""Products of quantised weights with activations rounded to 8 bits: bit for bit those of integers, on any processor."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import balanced_weight
from torch import Tensor, nn

import pomona as pm
from pomona.sparse import QuantizedBalancedTensor, load, save
from pomona.sparse.cpu import backend
from pomona.sparse.layers import build_packed_layer
from pomona.sparse.ops import balanced_quantized, quantized_product
from pomona.sparse.ops.quantized_product import reference_quantized
from pomona.sparse.quantized import VALUE_TYPES, unpack_codes

pytestmark = pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
SETS = backend.supported_integer_sets() if backend.load_library() is not None else []
HAS_INTEGERS = "avx512vnni" in SETS
needs_integers = pytest.mark.skipif(not HAS_INTEGERS, reason="the processor has no AVX-512 VBMI and VNNI")
BLOCKS = [1, 2, 7, 16, 25, 32, 33, 40, 64]


def pack(weight: Tensor, block: int, values: str = "int8", group: int | None = None) -> QuantizedBalancedTensor:
    return QuantizedBalancedTensor.from_dense(weight, block, values, group, activations="int8")


def multiply(packed: QuantizedBalancedTensor, x: Tensor, bias: Tensor | None = None, relu: bool = False,
             transposed: bool = False) -> Tensor:  # fmt: skip
    """Return the product of vectors in rows by the operator, computed transposed if asked."""
    y = balanced_quantized(x.T.contiguous() if transposed else x, *packed.parts, bias, *packed.sizes, relu, transposed)
    return y.T if transposed else y


def multiply_by_integers(packed: QuantizedBalancedTensor, x: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """Return the product of a weight with one scale in a row by 64-bit integers, scaled in float32."""
    rows, columns = packed.matrix
    parts = unpack_codes(packed.values).double(), packed.indices, rows, columns, packed.block
    codes = super(QuantizedBalancedTensor, QuantizedBalancedTensor).unpack(*parts).long()
    largest = x.abs().amax(1, keepdim=True)
    factor = torch.where(largest > 0, 127.0 / largest, 0)
    sums = (x * factor).round().long() @ codes.T
    y = sums.float() * packed.scales[:, 0].flatten()[:rows] * (largest / 127) + bias
    return y.relu() if relu else y


def random_vectors(n: int, columns: int, seed: int) -> Tensor:
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(seed))


@needs_integers
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("values", VALUE_TYPES)
@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 70),
    st.integers(1, 300),
    st.sampled_from(BLOCKS),
    st.integers(1, 40),
    st.integers(1, 140),
    st.booleans(),
)
def test_the_kernel_agrees_with_integers_bit_for_bit(
    values: str, transposed: bool, rows: int, columns: int, block: int, kept: int, n: int, relu: bool
) -> None:
    packed = pack(balanced_weight(rows, columns, block=block, kept=min(kept, block)), block, values, group=columns)
    x, bias = random_vectors(n, columns, 1), random_vectors(1, rows, 2)[0]
    x[n // 2] = 0
    assert torch.equal(multiply(packed, x, bias, relu, transposed), multiply_by_integers(packed, x, bias, relu))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("values", VALUE_TYPES)
@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 70),
    st.integers(1, 150),
    st.sampled_from([*BLOCKS, 65, 100, 300]),
    st.integers(1, 40),
    st.sampled_from([None, 1, 32, 70]),
    st.integers(1, 40),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_the_operator_agrees_with_its_definition(
    values: str, transposed: bool, rows: int, columns: int, block: int, kept: int, group: int | None, n: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    packed = pack(balanced_weight(rows, columns, block=block, kept=min(kept, block)), block, values, group)
    x, bias = random_vectors(n, columns, 1).to(dtype), random_vectors(1, rows, 2)[0]
    y = multiply(packed, x, bias, False, transposed)
    expected = reference_quantized(x, *packed.parts, bias, *packed.sizes)
    assert y.dtype == expected.dtype == dtype
    size = float(x.double().abs().amax()) * float(packed.dense().double().abs().sum(1).amax())
    eps = max(torch.finfo(dtype).eps, 2**-23)
    assert (y.double() - expected.double()).abs().max() <= size / 32767 + 4 * eps * (
        size + float(y.double().abs().max())
    )
    exact = x.double() @ packed.dense().double().T + bias.double()
    assert (expected.double() - exact).abs().max() <= size * 0.51 / 127 + 4 * eps * (size + float(exact.abs().max()))


def test_a_case_worked_out_by_hand() -> None:
    """x = (127, 60.4, −2.6) becomes (127, 60, −3), so that the row (2, 0, −127) gives 254 + 381; half of x, half."""
    packed = pack(torch.tensor([[2.0, 0, -127.0]]), 3)
    x = torch.tensor([[127, 60.4, -2.6], [63.5, 30.2, -1.3]])
    assert packed.linear(x).tolist() == [[635.0], [317.5]]
    assert packed.linear(x, torch.tensor([-400.0]), relu=True).tolist() == [[235.0], [0.0]]


@pytest.mark.parametrize("name", SETS)
def test_other_instruction_sets_multiply_rounded_floats(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = pack(balanced_weight(70, 200, block=32, kept=3), 32), random_vectors(9, 200, 3)
    load_kernel = backend.load_kernel
    monkeypatch.setattr(backend, "load_kernel", lambda kernel, _: load_kernel(kernel, name))
    sizes = packed.sizes[:4]
    direct = backend.multiply_quantized(x, *packed.parts, None, *sizes, False, False, input_bits=8)
    assert (direct is not None) == (name == "avx512vnni")
    expected = reference_quantized(x, *packed.parts, None, *packed.sizes)
    assert torch.allclose(multiply(packed, x), expected, atol=1e-4)


def test_a_device_without_integers_multiplies_rounded_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = pack(balanced_weight(70, 200, block=32, kept=3), 32), random_vectors(9, 200, 3)
    expected = reference_quantized(x, *packed.parts, None, *packed.sizes)
    monkeypatch.setattr(quantized_product, "INTEGER_BACKENDS", {})
    assert torch.allclose(multiply(packed, x), expected, atol=1e-3)
    monkeypatch.setattr(quantized_product, "BACKENDS", {})
    assert torch.allclose(multiply(packed, x), expected, atol=1e-4)


@needs_integers
@pytest.mark.parametrize("values", VALUE_TYPES)
def test_a_vector_has_the_same_bits_alone_and_among_others(values: str) -> None:
    packed, x = pack(balanced_weight(100, 512, block=32, kept=4), 32, values), random_vectors(300, 512, 1)
    alone = torch.cat([multiply(packed, row.unsqueeze(0)) for row in x])
    for n, transposed in itertools.product((1, 2, 3, 7, 8, 9, 65, 300), (False, True)):
        assert torch.equal(multiply(packed, x[:n], transposed=transposed), alone[:n])


@needs_integers
def test_several_threads_give_the_same_bits() -> None:
    packed, x = pack(balanced_weight(600, 512, block=32, kept=4), 32), random_vectors(200, 512, 1)
    one = multiply(packed, x)
    torch.set_num_threads(2)
    try:
        assert torch.equal(multiply(packed, x), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("factor", [1e-45, 1e-38, 1e-32, 1e-29, 1e30])
def test_the_smallest_and_largest_inputs(factor: float) -> None:
    packed = pack(balanced_weight(40, 96, block=32, kept=3), 32)
    x = random_vectors(5, 96, 1) * factor
    x[3] = 0
    y = multiply(packed, x)
    assert not y[3].any()
    exact = x.double() @ packed.dense().double().T
    sizes = x.double().abs().amax(1, keepdim=True) * packed.dense().double().abs().sum(1)
    assert ((y.double() - exact).abs() <= sizes * 0.51 / 127 + 96 * 2.0**-149).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinities_and_nans_are_those_of_the_dense_product(value: float, transposed: bool) -> None:
    packed, x = pack(balanced_weight(40, 70, block=32, kept=3), 32), random_vectors(3, 70, 1)
    x[1, 5] = value
    y, expected = multiply(packed, x, None, False, transposed), x @ packed.dense().T
    assert torch.equal(y[1].isnan(), expected[1].isnan())
    assert torch.equal(y[1][~y[1].isnan()], expected[1][~y[1].isnan()])
    assert torch.allclose(y[[0, 2]], expected[[0, 2]], atol=0.2)


# ---- tensors, layers and files


def test_the_choice_is_kept_by_layers_and_files(tmp_path: Path) -> None:
    layer = nn.Linear(64, 40)
    layer.weight.data = balanced_weight(40, 64, block=32, kept=3)
    packed = pack(layer.weight.detach(), 32)
    assert "int8 activations" in repr(packed)
    model, x = nn.Sequential(build_packed_layer(layer, {"weight": packed})), random_vectors(20, 64, 1)
    expected = reference_quantized(x, *packed.parts, layer.bias.detach(), *packed.sizes)
    assert torch.allclose(model(x), expected, atol=1e-4)
    exact = build_packed_layer(layer, {"weight": QuantizedBalancedTensor.from_dense(layer.weight.detach(), 32)})
    assert not torch.allclose(model(x), exact(x), atol=1e-4)
    again = load(save(model, tmp_path / "model.safetensors"), nn.Sequential(nn.Linear(64, 40)))
    assert torch.equal(again(x), model(x))


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(
        pm.PomonaError, match="activations are left as they are, None, or rounded to 'int8', got 'int4'"
    ):
        QuantizedBalancedTensor.from_dense(torch.ones(2, 4), 4, activations="int4")
    packed = pack(torch.ones(2, 4), 4)
    with pytest.raises(pm.PomonaError, match=r"rounded to 8 bits, or not at all \(0\), got 4"):
        balanced_quantized(torch.ones(1, 4), *packed.parts, None, *packed.sizes[:4], 4)


def test_the_operator_passes_torchs_opcheck() -> None:
    packed = pack(balanced_weight(40, 64, block=32, kept=2), 32)
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (random_vectors(3, 64, 1), *packed.parts, torch.randn(40), *packed.sizes, True)
    torch.library.opcheck(torch.ops.pomona.balanced_quantized, arguments, test_utils=quick)


def test_a_gradient_ignores_the_rounding() -> None:
    packed, x = pack(balanced_weight(40, 64, block=32, kept=2), 32), random_vectors(3, 64, 1).requires_grad_()
    packed.linear(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, packed.dense().sum(0).expand(3, 64), atol=1e-4)
