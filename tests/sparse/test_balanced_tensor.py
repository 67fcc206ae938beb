"""The packed format and the operator: a hand-worked matrix, and any matrix against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import balanced_weight, close
from torch import Tensor

import pomona as pm
from pomona.sparse import BalancedTensor
from pomona.sparse import cpu as native
from pomona.sparse.format import DTYPES, index_bits, pack, unpack
from pomona.sparse.ops import balanced, reference

LEVELS = native.levels() if native.library() is not None else []


def test_by_hand() -> None:
    weight = torch.tensor([[0, 5.0, 0, 7, 1, 0, 2, 0], [3, 0, 4, 0, 0, 0, 0, 9]])
    packed = BalancedTensor.from_dense(weight, 4)
    assert packed.values.shape == (1, 2, 2, 32)
    assert packed.values[0, :, :, 0].tolist() == [[5, 7], [1, 2]]  # block, slot
    assert packed.values[0, :, :, 1].tolist() == [[3, 4], [9, 0]]  # filled up with a zero
    assert packed.index()[0, :, :, 0].tolist() == [[1, 3], [0, 2]]
    assert packed.index()[0, :, :, 1].tolist() == [[0, 2], [3, 0]]
    assert packed.indices[0, :, 0, 0].tolist() == [1 + (3 << 5), 0 + (2 << 5)]
    assert packed.nbytes == 2 * 2 * 32 * 4 + 2 * 32 * 2
    assert packed.linear(torch.ones(8)).tolist() == [15, 16]
    assert packed.linear(-torch.ones(1, 8), torch.tensor([20.0, 1]), relu=True).tolist() == [[5, 0]]


def test_ninety_per_cent_takes_eleven_per_cent_of_the_bytes() -> None:
    weight = balanced_weight(64, 64, block=32, kept=3)
    assert BalancedTensor.from_dense(weight, 32).nbytes == 64 * 2 * (3 * 4 + 2)
    assert BalancedTensor.from_dense(weight.half(), 32).nbytes == 64 * 2 * 8


@pytest.mark.parametrize("block", [1, 2, 31, 32, 33, 256, 257, 65536])
def test_words_hold_every_index(block: int) -> None:
    bits = index_bits(block)
    assert block <= 1 << bits
    index = torch.tensor([0, block - 1, block // 2, block // 3, block - 1]).view(1, 1, 5, 1).expand(2, 3, 5, 32)
    words = pack(index, block)
    assert words.shape == (2, 3, -(-5 // (16 // bits)), 32)
    assert torch.equal(unpack(words, 5, block), index)


SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 150))


@settings(deadline=None, max_examples=80)
@given(SHAPES, st.integers(1, 160), st.integers(1, 200), st.sampled_from(DTYPES), st.integers(0, 99))
def test_the_round_trip_is_exact(shape: tuple[int, int], block: int, kept: int, dtype: torch.dtype, seed: int) -> None:
    weight = balanced_weight(*shape, block=block, kept=min(kept, block), seed=seed, dtype=dtype)
    packed = BalancedTensor.from_dense(weight, block).verify()
    assert torch.equal(packed.dense(), weight)
    assert packed.dtype == dtype
    assert packed.kept <= block


def test_every_bit_of_a_value_survives() -> None:
    weight = torch.tensor([[torch.inf, 0, -torch.inf, 0], [1e-45, 0, 0, -3e38]])
    weight[0, 1] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
    again = BalancedTensor.from_dense(weight, 4).dense()
    assert torch.equal(again.view(torch.int32), weight.view(torch.int32))


def test_zeros_with_a_sign_are_zeros() -> None:
    weight = balanced_weight(32, 32, block=32, kept=3)
    masked = weight * -1.0  # the zeros are now −0.0
    assert BalancedTensor.from_dense(masked, 32).kept == 3
    assert torch.equal(BalancedTensor.from_dense(masked, 32).dense(), masked)


def test_a_convolution_is_packed_as_a_matrix() -> None:
    weight = balanced_weight(40, 6, 3, 3, block=18, kept=2)
    packed = BalancedTensor.from_dense(weight, 18)
    assert packed.matrix == (40, 54)
    assert torch.equal(packed.dense(), weight)


# ---- the product


def draw(n: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
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
    st.sampled_from(["rows", "turned", "strided", "sliced"]),
    st.integers(0, 99),
)
def test_any_product_is_that_of_float64(
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
    x, bias = draw(n, columns, seed + 1, kind), draw(1, rows, seed + 2, dtype)[0]
    exact = x.double() @ weight.double().T + bias.double()
    exact = exact.relu() if relu else exact
    if layout == "strided":
        x = x.T.contiguous().T
    if layout == "sliced":
        x = torch.stack([x, x + 1], -1)[..., 0]
    turned = layout == "turned"
    given = x.T.contiguous() if turned else x
    y = balanced(given, packed.values, packed.indices, bias, rows, columns, block, relu, turned)
    assert y.dtype == kind
    assert close(y.T if turned else y, exact)


@pytest.mark.parametrize(("level", "turned"), itertools.product(LEVELS, [False, True]))
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
def test_every_level_of_the_kernels(
    level: str, turned: bool, rows: int, columns: int, block: int, kept: int, n: int, dtype: torch.dtype, relu: bool
) -> None:
    weight = balanced_weight(rows, columns, block=block, kept=min(kept, block), dtype=dtype)
    packed = BalancedTensor.from_dense(weight, block)
    x, bias = draw(n, columns, 1, torch.float32), draw(1, rows, 2, torch.float32)[0]
    exact = x.double() @ weight.double().T + bias
    given = x.T.contiguous() if turned else x
    y = native.product(given, packed.values, packed.indices, bias, rows, columns, block, relu, turned, level)
    assert y is not None
    assert close(y.T if turned else y, exact.relu() if relu else exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_half_value_is_read_right(level: str, dtype: torch.dtype) -> None:
    """All 65536 patterns of 16 bits, one in a row, times one; NaNs stay NaNs."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).to(dtype)
    values = values[values != 0].view(-1, 1)
    packed = BalancedTensor.from_dense(values, 1)
    for turned, x in ((False, torch.ones(1, 1)), (True, torch.ones(1, 70))):
        y = native.product(x, packed.values, packed.indices, None, len(values), 1, 1, False, turned, level)
        assert y is not None
        y = y if turned else y.T
        assert all(torch.equal(column.nan_to_num(0.5), values[:, 0].float().nan_to_num(0.5)) for column in y.unbind(1))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("place", ["weight", "input"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinities_and_nans_go_where_the_dense_product_has_them(place: str, value: float, turned: bool) -> None:
    weight = balanced_weight(40, 70, block=32, kept=3)
    x = draw(3, 70, 1, torch.float32)
    if place == "weight":
        weight[3, int(weight[3].nonzero()[0])] = value
        weight[39, int(weight[39].nonzero()[-1])] = value
    else:
        x[1, 5] = value
    packed = BalancedTensor.from_dense(weight, 32)
    given = x.T.contiguous() if turned else x
    y = balanced(given, packed.values, packed.indices, None, 40, 70, 32, False, turned)
    assert close(y.T if turned else y, x.double() @ weight.double().T)
    for level in LEVELS:
        found = native.product(given, packed.values, packed.indices, None, 40, 70, 32, False, turned, level)
        assert (found is None) == (place == "input")


def test_what_lies_behind_a_short_last_block_is_never_read() -> None:
    """Rows of 5 in blocks of 4, cut from a wider input that is NaN there."""
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
    assert close(y, weight.double().view(5, 12) @ views.double().reshape(12, 70))


def test_without_native_kernels_pytorch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = BalancedTensor.from_dense(balanced_weight(40, 64, block=32, kept=2), 32)
    x = draw(3, 64, 1, torch.float32)
    usual = packed.linear(x)
    monkeypatch.setattr(native, "kernel", lambda *_: None)
    assert close(packed.linear(x), usual.double())


def test_several_threads_give_the_same() -> None:
    packed = BalancedTensor.from_dense(balanced_weight(600, 512, block=32, kept=4), 32)
    x = draw(90, 512, 1, torch.float32)
    for inputs, turned in ((x, False), (x.T.contiguous(), True)):
        one = balanced(inputs, packed.values, packed.indices, None, 600, 512, 32, False, turned)
        torch.set_num_threads(2)
        try:
            two = balanced(inputs, packed.values, packed.indices, None, 600, 512, 32, False, turned)
        finally:
            torch.set_num_threads(1)
        assert torch.equal(one, two)


def test_the_operator_passes_torchs_own_checks() -> None:
    packed = BalancedTensor.from_dense(balanced_weight(40, 64, block=32, kept=2), 32)
    arguments = (draw(3, 64, 1, torch.float32), packed.values, packed.indices, torch.randn(40), 40, 64, 32, True)
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.pomona.balanced, arguments, test_utils=quick)
    turned = (draw(64, 3, 1, torch.float32), packed.values, packed.indices, None, 40, 64, 32, False, True)
    torch.library.opcheck(torch.ops.pomona.balanced, turned, test_utils=quick)


def test_the_reference_is_the_dense_product() -> None:
    weight = balanced_weight(20, 30, block=10, kept=3)
    packed = BalancedTensor.from_dense(weight, 10)
    x, bias = draw(4, 30, 1, torch.float32), torch.randn(20)
    assert torch.equal(
        reference(x, packed.values, packed.indices, bias, 20, 30, 10, True), (x @ weight.T + bias).relu()
    )


# ---- errors


@pytest.mark.parametrize(
    ("weight", "block", "message"),
    [
        (torch.ones(2, 4, dtype=torch.float64), 2, "only float32, float16, bfloat16 can be packed, got torch.float64"),
        (torch.ones(4), 2, r"a matrix is packed, got shape \(4,\)"),
        (torch.ones(2, 0), 2, r"got shape \(2, 0\)"),
        (torch.ones(2, 4), 0, "1 to 65536 columns wide, got 0"),
        (torch.ones(2, 4), 65537, "got 65537"),
    ],
)
def test_what_cannot_be_packed_says_why(weight: Tensor, block: int, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        BalancedTensor.from_dense(weight, block)


def test_tensors_that_do_not_fit_are_refused() -> None:
    packed = BalancedTensor.from_dense(balanced_weight(40, 64, block=32, kept=2), 32)
    values, indices = packed.values, packed.indices
    bad = [
        (values[:1], indices, (40, 64), 32),
        (values, indices[..., :16], (40, 64), 32),
        (values.double(), indices, (40, 64), 32),
        (values, indices.int(), (40, 64), 32),
        (values, indices, (40, 65), 32),
        (values, indices, (65, 64), 32),
        (values, indices, (40, 64), 0),
        (values.transpose(0, 1), indices, (40, 64), 32),
        (values[0], indices, (40, 64), 32),
    ]
    for v, i, shape, block in bad:
        with pytest.raises(pm.PomonaError):
            BalancedTensor(v, i, torch.Size(shape), block)
        with pytest.raises(pm.PomonaError):
            balanced(torch.ones(1, shape[1]), v, i, None, *shape, block)
    with pytest.raises(pm.PomonaError, match="does not fit a packed matrix of 40×64"):
        balanced(torch.ones(1, 63), values, indices, None, 40, 64, 32)
    with pytest.raises(pm.PomonaError, match="the bias has shape"):
        balanced(torch.ones(1, 64), values, indices, torch.ones(41), 40, 64, 32)


def test_contents_that_no_weight_has_are_refused() -> None:
    weight = balanced_weight(40, 60, block=30, kept=2)
    weight[:, 59] = 0
    good = BalancedTensor.from_dense(weight, 30)

    def changed(values: Tensor, index: Tensor) -> BalancedTensor:
        return BalancedTensor(values, pack(index, 30), torch.Size((40, 59)), 30)

    assert changed(good.values, good.index()).verify()
    index = good.index().clone()
    index[0, 0, 0, 0] = 31
    with pytest.raises(pm.PomonaError, match="outside its block of 30"):
        changed(good.values, index).verify()
    index = good.index().clone()
    index[0, 0, 0, 0] = index[0, 0, 1, 0]
    with pytest.raises(pm.PomonaError, match="the same index"):
        changed(good.values, index).verify()
    index = good.index().clone()
    index[0, 1, 0, 0] = 29
    with pytest.raises(pm.PomonaError, match="outside the matrix"):
        changed(good.values, index).verify()
    values = good.values.clone()
    values[1, 0, 0, 31] = 1  # row 63 of 40
    with pytest.raises(pm.PomonaError, match="outside the matrix"):
        changed(values, good.index()).verify()


def test_any_index_stays_inside_the_memory() -> None:
    """Indices that nobody verified: the result means nothing, but is computed from zeros and x alone."""
    for block in (7, 32, 40, 100, 300):
        packed = BalancedTensor.from_dense(balanced_weight(40, 450, block=block, kept=3), block)
        wild = torch.full_like(packed.indices, -1)  # every bit set
        for level in LEVELS:
            for turned in (False, True):
                x = torch.ones(450, 70) if turned else torch.ones(70, 450)
                y = native.product(x, packed.values, wild, None, 40, 450, block, False, turned, level)
                assert y is not None
                assert y.isfinite().all()
