"""The operator `balanced_quantized`: any product against float64, on every instruction set of the processor."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import balanced_weight
from torch import Tensor

import pomona as pm
from pomona.sparse import QuantizedBalancedTensor
from pomona.sparse.cpu import backend
from pomona.sparse.ops import balanced_quantized
from pomona.sparse.ops.quantized_product import reference_quantized
from pomona.sparse.quantized import VALUE_TYPES

INSTRUCTION_SETS = backend.supported_integer_sets() if backend.load_library() is not None else []
WAYS = list(itertools.product(INSTRUCTION_SETS, [False, True]))
BLOCKS = [1, 2, 7, 16, 25, 32, 33, 40, 64, 65, 100, 300]
INPUT_LEVELS = 32767  # to which the integer kernel rounds inputs


def multiply(packed: QuantizedBalancedTensor, x: Tensor, bias: Tensor | None = None, relu: bool = False,
             transposed: bool = False, instruction_set: str | None = None,
             input_bits: int = 0) -> Tensor | None:  # fmt: skip
    """Return the product of vectors in rows by the kernels, computed transposed if asked."""
    given, sizes = x.T.contiguous() if transposed else x, packed.sizes[:4]
    y = backend.multiply_quantized(given, *packed.parts, bias, *sizes, relu, transposed, instruction_set, input_bits)
    return y.T if transposed and y is not None else y


def is_rounded_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor, relu: bool = False) -> bool:
    """Return whether y is the product with inputs that were rounded by half of a level at most, and float32's error."""
    exact = x.double() @ weight.double().T + bias.double()
    exact = exact.relu() if relu else exact
    largest, eps = x.double().abs().amax(1, keepdim=True), max(torch.finfo(x.dtype).eps, 2**-23)
    sizes = largest * weight.double().abs().sum(1)
    return bool(((y.double() - exact).abs() <= sizes * (0.51 / INPUT_LEVELS) + 4 * eps * (sizes + exact.abs())).all())


def random_vectors(n: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("instruction_set", "transposed"), WAYS)
@pytest.mark.parametrize("values", VALUE_TYPES)
@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 70),
    st.integers(1, 150),
    st.sampled_from(BLOCKS),
    st.integers(1, 40),
    st.sampled_from([None, 1, 32, 70]),
    st.integers(1, 140),
    st.booleans(),
)
def test_every_instruction_set(
    instruction_set: str,
    transposed: bool,
    values: str,
    rows: int,
    columns: int,
    block: int,
    kept: int,
    group: int | None,
    n: int,
    relu: bool,
) -> None:
    weight = balanced_weight(rows, columns, block=block, kept=min(kept, block))
    packed = QuantizedBalancedTensor.from_dense(weight, block, values, group)
    x, bias = random_vectors(n, columns, 1), random_vectors(1, rows, 2)[0]
    y = multiply(packed, x, bias, relu, transposed, instruction_set)
    assert y is not None
    assert is_rounded_product(y, x, packed.dense(), bias, relu)


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 60),
    st.integers(1, 100),
    st.sampled_from(BLOCKS),
    st.integers(0, 70),
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from(["rows", "transposed", "strided", "sliced"]),
    st.sampled_from(list(VALUE_TYPES)),
)
@pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
def test_any_input_of_the_operator(
    rows: int, columns: int, block: int, n: int, dtype: torch.dtype, layout: str, values: str
) -> None:
    packed = QuantizedBalancedTensor.from_dense(
        balanced_weight(rows, columns, block=block, kept=min(3, block)), block, values
    )
    x, bias = random_vectors(n, columns, 1, dtype), random_vectors(1, rows, 2)[0]
    inputs = x
    if layout == "strided":
        inputs = x.T.contiguous().T
    if layout == "sliced":
        inputs = torch.stack([x, x + 1], -1)[..., 0]
    transposed = layout == "transposed"
    y = balanced_quantized(
        x.T.contiguous() if transposed else inputs, *packed.parts, bias, *packed.sizes, False, transposed
    )
    assert y.dtype == dtype
    y = y.T if transposed else y
    assert y.shape == (n, rows)
    assert is_rounded_product(y, x, packed.dense(), bias)
    expected = reference_quantized(x, *packed.parts, bias, *packed.sizes)
    assert is_rounded_product(expected, x, packed.dense(), bias)


@pytest.mark.parametrize(("instruction_set", "transposed"), WAYS)
@pytest.mark.parametrize(("values", "largest"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("block", [8, 32, 64, 100])
def test_products_of_integers_are_exact(
    values: str, largest: int, block: int, instruction_set: str, transposed: bool
) -> None:
    """Codes and inputs that use their levels in full: sums below 2²⁴ have no rounding error in int64 or float32."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-largest, largest + 1, (40, 200), generator=generator)
    weight = weight * (balanced_weight(40, 200, block=block, kept=2, seed=1) != 0)
    weight[:, 0] = largest
    packed = QuantizedBalancedTensor.from_dense(weight.float(), block, values)
    assert torch.equal(packed.dense(), weight.float())
    x = torch.zeros(70, 200, dtype=torch.int64)
    x[:, :30] = torch.randint(-1000, 1001, (70, 30), generator=generator)
    x[:, 7] = torch.tensor([INPUT_LEVELS, -INPUT_LEVELS]).repeat(35)
    y = multiply(packed, x.float(), transposed=transposed, instruction_set=instruction_set)
    assert y is not None
    assert torch.equal(y.long(), x @ weight.T)


@pytest.mark.parametrize(("instruction_set", "transposed"), WAYS)
@pytest.mark.parametrize("values", VALUE_TYPES)
def test_a_case_worked_out_by_hand(values: str, instruction_set: str, transposed: bool) -> None:
    """Rows (7, 0, 0, −7) and (0, 3.5, 7, 0) times (1, 2, 0, 4): −21 and 7; with the bias 0.5 and a ReLU, 0 and 7.5."""
    packed = QuantizedBalancedTensor.from_dense(torch.tensor([[7.0, 0, 0, -7], [0, 3.5, 7, 0]]) / 7, 4, values, group=2)
    x = torch.tensor([[1.0, 2, 0, 4]])
    rounded = packed.dense()
    assert (rounded - torch.tensor([[1.0, 0, 0, -1], [0, 0.5, 1, 0]])).abs().max() <= 0.5 / 7 + 1e-6
    for relu in (False, True):
        y = multiply(packed, x, torch.tensor([0.5, 0.5]), relu, transposed, instruction_set)
        expected = (x @ rounded.T + 0.5).relu() if relu else x @ rounded.T + 0.5
        assert y is not None
        assert torch.allclose(y, expected, atol=1e-3)


@pytest.mark.parametrize(("instruction_set", "transposed"), WAYS)
@pytest.mark.parametrize("factor", [1e-45, 1e-38, 1e-32, 1e-29, 1e30])
def test_the_smallest_and_largest_inputs(factor: float, instruction_set: str, transposed: bool) -> None:
    packed = QuantizedBalancedTensor.from_dense(balanced_weight(40, 96, block=32, kept=3), 32)
    x = random_vectors(5, 96, 1) * factor
    x[3] = 0
    y = multiply(packed, x, None, False, transposed, instruction_set)
    assert y is not None
    assert not y[3].any()
    tiny = 96 * 2.0**-149  # a product below the smallest subnormal number is lost
    exact = x.double() @ packed.dense().double().T
    sizes = x.double().abs().amax(1, keepdim=True) * packed.dense().double().abs().sum(1)
    assert ((y.double() - exact).abs() <= sizes / INPUT_LEVELS + tiny).all()


@pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinities_and_nans_are_those_of_the_dense_product(value: float, transposed: bool) -> None:
    packed = QuantizedBalancedTensor.from_dense(balanced_weight(40, 70, block=32, kept=3), 32)
    x = random_vectors(3, 70, 1)
    x[1, 5] = value
    x[2] = 1e-36
    given = x.T.contiguous() if transposed else x
    y = balanced_quantized(given, *packed.parts, None, *packed.sizes, False, transposed)
    y = y.T if transposed else y
    assert torch.allclose(y, x @ packed.dense().T, atol=1e-5, equal_nan=True)
    for instruction_set in INSTRUCTION_SETS:
        assert multiply(packed, x, None, False, transposed, instruction_set) is None


@pytest.mark.parametrize(("instruction_set", "transposed"), WAYS)
def test_the_activation_keeps_the_nans_of_a_bias(instruction_set: str, transposed: bool) -> None:
    packed = QuantizedBalancedTensor.from_dense(balanced_weight(40, 64, block=32, kept=3), 32)
    bias = torch.zeros(40)
    bias[3], bias[17], bias[39] = torch.nan, torch.inf, -torch.inf
    for n in (1, 5, 70):
        y = multiply(packed, torch.zeros(n, 64), bias, True, transposed, instruction_set)
        assert y is not None
        assert torch.equal(y.nan_to_num(7.0, 8.0, 9.0), bias.relu().nan_to_num(7.0, 8.0, 9.0).expand(n, 40))


@pytest.mark.parametrize("values", VALUE_TYPES)
def test_memory_past_a_short_last_block_is_not_read(values: str) -> None:
    """Rows of 5 columns in blocks of 4 are a slice of a wider input, which is NaN past the slice."""
    packed = QuantizedBalancedTensor.from_dense(torch.ones(33, 5), 4, values)
    wide = torch.full((70, 9), torch.nan)
    wide[:, :5] = 2.0
    expected = torch.full((70, 33), 10.0)
    assert torch.allclose(balanced_quantized(wide[:, :5], *packed.parts, None, *packed.sizes), expected)
    assert torch.allclose(balanced_quantized(wide.T[:5], *packed.parts, None, *packed.sizes, False, True), expected.T)


@pytest.mark.parametrize("values", VALUE_TYPES)
def test_any_index_stays_inside_the_memory(values: str) -> None:
    """With indices that are not verified, the result is meaningless but computed from zeros and x alone."""
    for block, instruction_set, transposed in itertools.product((7, 32, 40, 100, 300), INSTRUCTION_SETS, (False, True)):
        packed = QuantizedBalancedTensor.from_dense(balanced_weight(40, 450, block=block, kept=3), block, values)
        packed.indices.fill_(-1)  # every bit set
        y = multiply(packed, torch.ones(70, 450), None, False, transposed, instruction_set)
        assert y is not None
        assert y.isfinite().all()


@pytest.mark.parametrize("values", VALUE_TYPES)
@pytest.mark.parametrize(("instruction_set", "transposed"), WAYS)
def test_several_threads_give_the_same_bits(values: str, instruction_set: str, transposed: bool) -> None:
    packed = QuantizedBalancedTensor.from_dense(balanced_weight(600, 512, block=32, kept=4), 32, values)
    for n in (3, 90):
        x = random_vectors(n, 512, 1)
        one = multiply(packed, x, None, False, transposed, instruction_set)
        torch.set_num_threads(2)
        try:
            two = multiply(packed, x, None, False, transposed, instruction_set)
        finally:
            torch.set_num_threads(1)
        assert one is not None
        assert two is not None
        assert torch.equal(one, two)


@pytest.mark.parametrize("values", VALUE_TYPES)
def test_the_largest_codes_and_inputs_do_not_overflow(values: str) -> None:
    """The longest rows that the integer kernel takes, with the largest sums, and longer ones, which floats take."""
    for columns in (60_000, 60_032):
        packed = QuantizedBalancedTensor.from_dense(torch.ones(2, columns), 32, values, group=columns)
        for x in (torch.ones(1, columns), -torch.ones(1, columns)):
            for instruction_set in INSTRUCTION_SETS:
                y = multiply(packed, x, None, False, False, instruction_set)
                assert y is not None
                assert torch.allclose(y, x.sum().expand(1, 2), rtol=1e-5)


def test_the_operator_passes_torchs_opcheck() -> None:
    packed = QuantizedBalancedTensor.from_dense(balanced_weight(40, 64, block=32, kept=2), 32)
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (random_vectors(3, 64, 1), *packed.parts, torch.randn(40), *packed.sizes, True)
    torch.library.opcheck(torch.ops.pomona.balanced_quantized, arguments, test_utils=quick)
    transposed = (random_vectors(64, 3, 1), *packed.parts, None, *packed.sizes, False, True)
    torch.library.opcheck(torch.ops.pomona.balanced_quantized, transposed, test_utils=quick)


@pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
def test_without_kernels_pytorch_computes_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = QuantizedBalancedTensor.from_dense(balanced_weight(40, 64, block=32, kept=2), 32)
    x = random_vectors(3, 64, 1)
    monkeypatch.setattr(backend, "load_kernel", lambda *_: None)
    assert torch.equal(packed.linear(x), x @ packed.dense().T)


def test_operands_that_do_not_fit_are_refused() -> None:
    packed = QuantizedBalancedTensor.from_dense(balanced_weight(40, 64, block=32, kept=2), 32)
    with pytest.raises(pm.PomonaError, match=r"x \(3, 65\) of torch.float32 does not fit"):
        balanced_quantized(torch.ones(3, 65), *packed.parts, None, *packed.sizes)
    with pytest.raises(pm.PomonaError, match="the bias has shape"):
        balanced_quantized(torch.ones(3, 64), *packed.parts, torch.ones(41), *packed.sizes)
    with pytest.raises(pm.PomonaError, match="do not fit"):
        balanced_quantized(torch.ones(3, 64), *packed.parts, None, 40, 64, 32, 3)
