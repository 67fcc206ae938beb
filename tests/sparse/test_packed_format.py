"""The packed format: a matrix worked out by hand, round trips of any matrix, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import balanced_weight
from torch import Tensor

import pomona as pm
from pomona.sparse import BalancedTensor
from pomona.sparse.format import DTYPES, index_bits, pack_indices, unpack_indices
from pomona.sparse.ops import balanced


def test_a_matrix_packed_by_hand() -> None:
    weight = torch.tensor([[0, 5.0, 0, 7, 1, 0, 2, 0], [3, 0, 4, 0, 0, 0, 0, 9]])
    packed = BalancedTensor.from_dense(weight, 4)
    assert packed.values.shape == (1, 2, 2, 32)
    assert packed.values[0, :, :, 0].tolist() == [[5, 7], [1, 2]]  # block, slot
    assert packed.values[0, :, :, 1].tolist() == [[3, 4], [9, 0]]  # padded with a zero
    assert packed.index()[0, :, :, 0].tolist() == [[1, 3], [0, 2]]
    assert packed.index()[0, :, :, 1].tolist() == [[0, 2], [3, 0]]
    assert packed.indices[0, :, 0, 0].tolist() == [1 + (3 << 5), 0 + (2 << 5)]
    assert packed.nbytes == 2 * 2 * 32 * 4 + 2 * 32 * 2
    assert packed.linear(torch.ones(8)).tolist() == [15, 16]
    assert packed.linear(-torch.ones(1, 8), torch.tensor([20.0, 1]), relu=True).tolist() == [[5, 0]]


def test_ninety_percent_sparsity_takes_eleven_percent_of_the_bytes() -> None:
    weight = balanced_weight(64, 64, block=32, kept=3)
    assert BalancedTensor.from_dense(weight, 32).nbytes == 64 * 2 * (3 * 4 + 2)
    assert BalancedTensor.from_dense(weight.half(), 32).nbytes == 64 * 2 * 8


@pytest.mark.parametrize("block", [1, 2, 31, 32, 33, 256, 257, 65536])
def test_words_hold_every_index(block: int) -> None:
    bits = index_bits(block)
    assert block <= 1 << bits
    index = torch.tensor([0, block - 1, block // 2, block // 3, block - 1]).view(1, 1, 5, 1).expand(2, 3, 5, 32)
    words = pack_indices(index, block)
    assert words.shape == (2, 3, -(-5 // (16 // bits)), 32)
    assert torch.equal(unpack_indices(words, 5, block), index)


SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 150))


@settings(deadline=None, max_examples=80)
@given(SHAPES, st.integers(1, 160), st.integers(1, 200), st.sampled_from(DTYPES), st.integers(0, 99))
def test_the_round_trip_is_exact(shape: tuple[int, int], block: int, kept: int, dtype: torch.dtype, seed: int) -> None:
    weight = balanced_weight(*shape, block=block, kept=min(kept, block), seed=seed, dtype=dtype)
    packed = BalancedTensor.from_dense(weight, block).verify()
    assert torch.equal(packed.dense(), weight)
    assert packed.dtype == dtype
    assert packed.kept <= block


def test_every_bit_of_a_value_is_preserved() -> None:
    weight = torch.tensor([[torch.inf, 0, -torch.inf, 0], [1e-45, 0, 0, -3e38]])
    weight[0, 1] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
    again = BalancedTensor.from_dense(weight, 4).dense()
    assert torch.equal(again.view(torch.int32), weight.view(torch.int32))


def test_negative_zeros_are_zeros() -> None:
    weight = balanced_weight(32, 32, block=32, kept=3)
    masked = weight * -1.0  # the zeros are now −0.0
    assert BalancedTensor.from_dense(masked, 32).kept == 3
    assert torch.equal(BalancedTensor.from_dense(masked, 32).dense(), masked)


def test_a_convolution_is_packed_as_a_matrix() -> None:
    weight = balanced_weight(40, 6, 3, 3, block=18, kept=2)
    packed = BalancedTensor.from_dense(weight, 18)
    assert packed.matrix == (40, 54)
    assert torch.equal(packed.dense(), weight)


# ---- errors


@pytest.mark.parametrize(
    ("weight", "block", "message"),
    [
        (torch.ones(2, 4, dtype=torch.float64), 2, "only float32, float16, bfloat16 can be packed, got torch.float64"),
        (torch.ones(4), 2, r"only a matrix can be packed, got shape \(4,\)"),
        (torch.ones(2, 0), 2, r"got shape \(2, 0\)"),
        (torch.ones(2, 4), 0, "1 to 65536 columns wide, got 0"),
        (torch.ones(2, 4), 65537, "got 65537"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused(weight: Tensor, block: int, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        BalancedTensor.from_dense(weight, block)


def test_tensors_of_the_wrong_shape_or_dtype_are_refused() -> None:
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


def test_invalid_contents_are_refused() -> None:
    weight = balanced_weight(40, 60, block=30, kept=2)
    weight[:, 59] = 0
    good = BalancedTensor.from_dense(weight, 30)

    def with_contents(values: Tensor, index: Tensor) -> BalancedTensor:
        return BalancedTensor(values, pack_indices(index, 30), torch.Size((40, 59)), 30)

    assert with_contents(good.values, good.index()).verify()
    index = good.index().clone()
    index[0, 0, 0, 0] = 31
    with pytest.raises(pm.PomonaError, match="outside its block of 30"):
        with_contents(good.values, index).verify()
    index = good.index().clone()
    index[0, 0, 0, 0] = index[0, 0, 1, 0]
    with pytest.raises(pm.PomonaError, match="the same index"):
        with_contents(good.values, index).verify()
    index = good.index().clone()
    index[0, 1, 0, 0] = 29
    with pytest.raises(pm.PomonaError, match="outside the matrix"):
        with_contents(good.values, index).verify()
    values = good.values.clone()
    values[1, 0, 0, 31] = 1  # row 63 of 40
    with pytest.raises(pm.PomonaError, match="outside the matrix"):
        with_contents(values, good.index()).verify()
