"""The operator `balanced`: any product against float64, on every instruction set of the processor."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import balanced_weight, is_close
from torch import Tensor

from pomona.sparse import BalancedTensor
from pomona.sparse.cpu import backend
from pomona.sparse.format import DTYPES
from pomona.sparse.ops import balanced
from pomona.sparse.ops.product import reference_product

INSTRUCTION_SETS = backend.supported_instruction_sets() if backend.load_library() is not None else []
SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 150))


def random_vectors(n: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None, max_examples=120)
@given(
    SHAPES,
    st.sampled_from([1, 2, 5, 16, 25, 32, 33, 47, 64, 100, 128, 150, 256, 300]),
    st.integers(1, 40),
    st.integers(0, 70),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.float64, *DTYPES]),
    st.booleans(),
    st.sampled_from(["rows", "transposed", "strided", "sliced"]),
    st.integers(0, 99),
)
def test_any_product_matches_float64(
    shape: tuple[int, int],
    block: int,
    kept: int,
    n: int,
    dtype: torch.dtype,
    kind: torch.dtype,
    relu: bool,
    layout: str,
    seed: int,
) -> None:
    rows, columns = shape
    weight = balanced_weight(rows, columns, block=block, kept=min(kept, block), seed=seed, dtype=dtype)
    packed = BalancedTensor.from_dense(weight, block)
    x, bias = random_vectors(n, columns, seed + 1, kind), random_vectors(1, rows, seed + 2, dtype)[0]
    exact = x.double() @ weight.double().T + bias.double()
    exact = exact.relu() if relu else exact
    if layout == "strided":
        x = x.T.contiguous().T
    if layout == "sliced":
        x = torch.stack([x, x + 1], -1)[..., 0]
    transposed = layout == "transposed"
    given = x.T.contiguous() if transposed else x
    y = balanced(given, packed.values, packed.indices, bias, rows, columns, block, relu, transposed)
    assert y.dtype == kind
    assert is_close(y.T if transposed else y, exact)


@pytest.mark.parametrize(("instruction_set", "transposed"), itertools.product(INSTRUCTION_SETS, [False, True]))
@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 70),
    st.integers(1, 150),
    st.sampled_from([1, 7, 25, 32, 40, 64, 100, 128, 200, 256, 300]),
    st.integers(1, 40),
    st.integers(1, 140),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_every_instruction_set(
    instruction_set: str,
    transposed: bool,
    rows: int,
    columns: int,
    block: int,
    kept: int,
    n: int,
    dtype: torch.dtype,
    relu: bool,
) -> None:
    weight = balanced_weight(rows, columns, block=block, kept=min(kept, block), dtype=dtype)
    packed = BalancedTensor.from_dense(weight, block)
    x, bias = random_vectors(n, columns, 1, torch.float32), random_vectors(1, rows, 2, torch.float32)[0]
    exact = x.double() @ weight.double().T + bias
    given = x.T.contiguous() if transposed else x
    y = backend.multiply_packed(
        given, packed.values, packed.indices, bias, rows, columns, block, relu, transposed, instruction_set
    )
    assert y is not None
    assert is_close(y.T if transposed else y, exact.relu() if relu else exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_half_precision_value_is_converted_exactly(instruction_set: str, dtype: torch.dtype) -> None:
    """All 65536 patterns of 16 bits, one in each row, are multiplied by one; NaNs stay NaNs."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).to(dtype)
    values = values[values != 0].view(-1, 1)
    packed = BalancedTensor.from_dense(values, 1)
    for transposed, x in ((False, torch.ones(1, 1)), (True, torch.ones(1, 70))):
        y = backend.multiply_packed(
            x, packed.values, packed.indices, None, len(values), 1, 1, False, transposed, instruction_set
        )
        assert y is not None
        y = y if transposed else y.T
        assert all(torch.equal(column.nan_to_num(0.5), values[:, 0].float().nan_to_num(0.5)) for column in y.unbind(1))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("place", ["weight", "input"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinities_and_nans_are_those_of_the_dense_product(place: str, value: float, transposed: bool) -> None:
    weight = balanced_weight(40, 70, block=32, kept=3)
    x = random_vectors(3, 70, 1, torch.float32)
    if place == "weight":
        weight[3, int(weight[3].nonzero()[0])] = value
        weight[39, int(weight[39].nonzero()[-1])] = value
    else:
        x[1, 5] = value
    packed = BalancedTensor.from_dense(weight, 32)
    given = x.T.contiguous() if transposed else x
    y = balanced(given, packed.values, packed.indices, None, 40, 70, 32, False, transposed)
    assert is_close(y.T if transposed else y, x.double() @ weight.double().T)
    for instruction_set in INSTRUCTION_SETS:
        found = backend.multiply_packed(
            given, packed.values, packed.indices, None, 40, 70, 32, False, transposed, instruction_set
        )
        assert (found is None) == (place == "input")


def test_memory_past_a_short_last_block_is_not_read() -> None:
    """Rows of 5 columns in blocks of 4 are a slice of a wider input, which is NaN past the slice."""
    weight = torch.ones(33, 5)
    packed = BalancedTensor.from_dense(weight, 4)
    wide = torch.full((70, 9), torch.nan)
    wide[:, :5] = 2.0
    assert (balanced(wide[:, :5], packed.values, packed.indices, None, 33, 5, 4) == 10).all()
    assert (balanced(wide.T[:5], packed.values, packed.indices, None, 33, 5, 4, False, True) == 10).all()


def test_a_zero_row_a_zero_matrix_and_no_vectors() -> None:
    weight = balanced_weight(40, 64, block=32, kept=2)
    weight[7] = 0
    assert BalancedTensor.from_dense(weight, 32).linear(torch.ones(1, 64))[0, 7] == 0
    nothing = BalancedTensor.from_dense(torch.zeros(3, 8), 4)
    assert nothing.kept == 1
    assert nothing.linear(torch.ones(2, 8), torch.tensor([1.0, 2, 3])).tolist() == [[1, 2, 3]] * 2
    assert nothing.linear(torch.ones(0, 8)).shape == (0, 3)
    assert nothing.linear(torch.ones(2, 0, 8)).shape == (2, 0, 3)
    assert BalancedTensor.from_dense(torch.zeros(0, 8), 4).linear(torch.ones(2, 8)).shape == (2, 0)


def test_overlapping_views_are_a_convolution() -> None:
    weight = balanced_weight(5, 3, 2, 2, block=6, kept=2)
    packed = BalancedTensor.from_dense(weight, 6)
    image = torch.randn(3, 80)
    views = image.as_strided((3, 2, 2, 70), (80, 4, 1, 1))
    y = balanced(views, packed.values, packed.indices, None, 5, 12, 6, False, True)
    assert is_close(y, weight.double().view(5, 12) @ views.double().reshape(12, 70))


def test_without_kernels_pytorch_computes_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = BalancedTensor.from_dense(balanced_weight(40, 64, block=32, kept=2), 32)
    x = random_vectors(3, 64, 1, torch.float32)
    usual = packed.linear(x)
    monkeypatch.setattr(backend, "load_kernel", lambda *_: None)
    assert is_close(packed.linear(x), usual.double())


def test_several_threads_give_the_same_bits() -> None:
    packed = BalancedTensor.from_dense(balanced_weight(600, 512, block=32, kept=4), 32)
    x = random_vectors(90, 512, 1, torch.float32)
    for inputs, transposed in ((x, False), (x.T.contiguous(), True)):
        one = balanced(inputs, packed.values, packed.indices, None, 600, 512, 32, False, transposed)
        torch.set_num_threads(2)
        try:
            two = balanced(inputs, packed.values, packed.indices, None, 600, 512, 32, False, transposed)
        finally:
            torch.set_num_threads(1)
        assert torch.equal(one, two)


def test_the_operator_passes_torchs_opcheck() -> None:
    packed = BalancedTensor.from_dense(balanced_weight(40, 64, block=32, kept=2), 32)
    arguments = (
        random_vectors(3, 64, 1, torch.float32),
        packed.values,
        packed.indices,
        torch.randn(40),
        40,
        64,
        32,
        True,
    )
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.pomona.balanced, arguments, test_utils=quick)
    transposed = (random_vectors(64, 3, 1, torch.float32), packed.values, packed.indices, None, 40, 64, 32, False, True)
    torch.library.opcheck(torch.ops.pomona.balanced, transposed, test_utils=quick)


def test_the_reference_is_the_dense_product() -> None:
    weight = balanced_weight(20, 30, block=10, kept=3)
    packed = BalancedTensor.from_dense(weight, 10)
    x, bias = random_vectors(4, 30, 1, torch.float32), torch.randn(20)
    assert torch.equal(
        reference_product(x, packed.values, packed.indices, bias, 20, 30, 10, True), (x @ weight.T + bias).relu()
    )


def test_any_index_stays_inside_the_memory() -> None:
    """With indices that are not verified, the result is meaningless but computed from zeros and x alone."""
    for block in (7, 32, 40, 100, 300):
        packed = BalancedTensor.from_dense(balanced_weight(40, 450, block=block, kept=3), block)
        invalid = torch.full_like(packed.indices, -1)  # every bit set
        for instruction_set in INSTRUCTION_SETS:
            for transposed in (False, True):
                x = torch.ones(450, 70) if transposed else torch.ones(70, 450)
                y = backend.multiply_packed(
                    x, packed.values, invalid, None, 40, 450, block, False, transposed, instruction_set
                )
                assert y is not None
                assert y.isfinite().all()
