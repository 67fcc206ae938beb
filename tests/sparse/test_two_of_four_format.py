"""The 2:4 format: a matrix worked out by hand, round trips of any matrix, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import two_of_four_weight
from torch import Tensor

import pomona as pm
from pomona.sparse import TwoOfFourTensor
from pomona.sparse.ops import two_of_four
from pomona.sparse.packed_tensor import DTYPES
from pomona.sparse.two_of_four import is_two_of_four
from pomona.sparse.weight_encodings.two_of_four import encode


def test_a_matrix_packed_by_hand() -> None:
    weight = torch.tensor([[0, 5.0, 0, 7, 1, 2], [3, 0, 0, 4, 0, 0]])
    packed = TwoOfFourTensor.from_dense(weight).verify()
    assert packed.values.shape == (1, 1, 8, 32)
    assert packed.values[0, 0, :, :2].T.tolist() == [[5, 7, 1, 2, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0, 0, 0]]
    # The places 1 3 · 0 1 · 0 1 · 0 1, and 0 3 · 0 1 · 0 1 · 0 1, two bits each from the lowest.
    assert packed.places[0, 0, :2].tolist() == [0x444D, 0x444C]
    assert packed.nbytes == 32 * (8 * 4 + 2)
    assert packed.linear(torch.tensor([1.0, 10, 100, 1000, 2, 3])).tolist() == [7058, 4003]
    assert packed.linear(-torch.ones(1, 6), torch.tensor([16.0, 1]), relu=True).tolist() == [[1, 0]]


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 70), st.integers(1, 150), st.sampled_from(DTYPES), st.integers(0, 99))
def test_the_round_trip_is_exact(rows: int, columns: int, dtype: torch.dtype, seed: int) -> None:
    weight = two_of_four_weight(rows, columns, seed).to(dtype)
    packed = TwoOfFourTensor.from_dense(weight).verify()
    assert torch.equal(packed.dense(), weight)
    assert packed.dtype == dtype
    assert torch.equal(TwoOfFourTensor.from_parts(packed.parts, packed.metadata).dense(), weight)


def test_the_places_are_those_of_the_encoding_for_files() -> None:
    weight = two_of_four_weight(32, 16)
    encoded = encode(weight)
    assert encoded is not None
    words = encoded["places"].view(32, 2).int()
    packed = TwoOfFourTensor.from_dense(weight)
    assert torch.equal(packed.places[0, 0].int() & 0xFFFF, words[:, 0] | words[:, 1] << 8)
    assert torch.equal(packed.values[0, 0].T.reshape(-1, 2), encoded["values"])


def test_every_bit_of_a_value_is_preserved() -> None:
    weight = torch.tensor([[torch.inf, 0, -torch.inf, 0, 1e-45, 0, 0, -3e38]])
    weight[0, 4] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
    again = TwoOfFourTensor.from_dense(weight).dense()
    assert torch.equal(again.view(torch.int32), weight.view(torch.int32))


def test_other_dtypes_and_convolutions() -> None:
    packed = TwoOfFourTensor.from_dense(torch.tensor([[1e-30, 0, 2.0], [0, -1e-30, 0]])).to(torch.float16)
    assert packed.verify().dense().tolist() == [[0, 0, 2], [0, 0, 0]]
    weight = two_of_four_weight(40, 54).view(40, 6, 3, 3)
    packed = TwoOfFourTensor.from_dense(weight)
    assert packed.matrix == (40, 54)
    assert torch.equal(packed.dense(), weight)
    assert TwoOfFourTensor.from_dense(torch.zeros(0, 8)).verify().dense().shape == (0, 8)


def test_the_structure_is_found() -> None:
    weight = two_of_four_weight(9, 30)
    assert is_two_of_four(weight)
    assert is_two_of_four(torch.zeros(0, 4))
    assert is_two_of_four(torch.ones(3, 2))
    weight[8, 26:29] = 1.0
    assert not is_two_of_four(weight)


# ---- errors


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(2, 4, dtype=torch.float64), "only float32, float16, bfloat16 can be packed, got torch.float64"),
        (torch.ones(4), r"only a matrix can be packed, got shape \(4,\)"),
        (torch.ones(2, 0), r"got shape \(2, 0\)"),
        (torch.tensor([[0, 1.0, 1, 1]]), "at most two nonzeros of every four along a row: use another format"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        TwoOfFourTensor.from_dense(weight)


def test_tensors_of_the_wrong_shape_or_dtype_are_refused() -> None:
    values, places = TwoOfFourTensor.from_dense(two_of_four_weight(40, 64)).parts
    bad = [
        ((values[:-1], places), (40, 64)),
        ((values[:, :, :7].contiguous(), places), (40, 64)),
        ((values.double(), places), (40, 64)),
        ((values, places.int()), (40, 64)),
        ((values, places[:, :3].contiguous()), (40, 64)),
        ((values, places), (65, 64)),
        ((values, places), (40, 65)),
        ((values, places), (40, 0)),
        ((values, places.transpose(1, 2).contiguous().transpose(1, 2)), (40, 64)),
    ]
    for parts, shape in bad:
        with pytest.raises(pm.PomonaError):
            TwoOfFourTensor(*parts, torch.Size(shape))
        with pytest.raises(pm.PomonaError):
            two_of_four(torch.ones(1, shape[1]), *parts, None, *shape)
    with pytest.raises(pm.PomonaError, match="does not fit a packed matrix of 40×64"):
        two_of_four(torch.ones(1, 63), values, places, None, 40, 64)
    with pytest.raises(pm.PomonaError, match="the bias has shape"):
        two_of_four(torch.ones(1, 64), values, places, torch.ones(41), 40, 64)


@pytest.mark.parametrize(
    ("part", "place", "value", "message"),
    [
        (1, (0, 0, 0), 0, "the two places of a 2:4 group do not increase"),
        (1, (0, 0, 0), 0b1101_0100_0100_0001 - (1 << 16), "do not increase"),
        (0, (1, 0, 0, 31), 1.0, "a value is outside the matrix of 40×60"),
        (0, (0, 3, 7, 0), torch.nan, "a value is outside the matrix of 40×60"),
    ],
)
def test_invalid_contents_are_refused(part: int, place: tuple[int, ...], value: float, message: str) -> None:
    good = TwoOfFourTensor.from_dense(two_of_four_weight(40, 60))
    assert good.verify() is good
    parts = [tensor.clone() for tensor in good.parts]
    parts[part][place] = value
    with pytest.raises(pm.PomonaError, match=message):
        TwoOfFourTensor.from_parts(parts, good.metadata).verify()
