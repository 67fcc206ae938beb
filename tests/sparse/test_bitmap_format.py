"""The format of bitmaps: a matrix worked out by hand, round trips of any matrix, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import unstructured_weight
from torch import Tensor

import pomona as pm
from pomona.sparse import bitmap as bitmap_format
from pomona.sparse.bitmap import BitmapTensor
from pomona.sparse.ops import bitmap
from pomona.sparse.packed_tensor import DTYPES

SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 200))


def test_a_matrix_packed_by_hand() -> None:
    weight = torch.zeros(66, 70)
    weight[0, 0], weight[0, 3], weight[0, 4] = 1, 2, 5  # j = 0 and 3 of s = 0, and s = 1
    weight[1, 1] = 3  # h = 1
    weight[8, 0] = 4  # lane 4
    weight[2, 16] = 6  # tile 1, lane 1
    weight[65, 69] = 7  # the second slab and step: g = 0, h = 1, t = 0, s = 1, j = 1
    packed = BitmapTensor.from_dense(weight).verify()
    assert packed.values.tolist() == [1, 2, 4, 5, 3, 6, 7, 0]
    assert packed.starts.tolist() == [0, 6, 6, 6, 7]
    assert packed.most == 6
    words = packed.words
    assert words.shape == (2, 2, 32, 4)
    assert words[0, 0, 0].tolist() == [1 | 1 << 3 | 1 << 8 | 1 << 5, 0, 0, 0]
    assert words[0, 0, 4].tolist() == [1, 0, 0, 0]
    assert words[0, 0, 1].tolist() == [0, 1, 0, 0]
    assert words[1, 1, 0].tolist() == [1 << (8 + 4 + 1), 0, 0, 0]
    assert int(words.count_nonzero()) == 4
    assert torch.equal(packed.dense(), weight)


def test_bytes() -> None:
    torch.manual_seed(0)
    for sparsity, most in ((0.5, 2.27), (0.9, 3.3)):
        weight = (torch.randn(256, 2048) * (torch.rand(256, 2048) >= sparsity)).half()
        assert BitmapTensor.from_dense(weight).nbytes < most * int(weight.count_nonzero())


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.floats(0, 1), st.sampled_from(DTYPES), st.integers(0, 99))
def test_the_round_trip_is_exact(shape: tuple[int, int], sparsity: float, dtype: torch.dtype, seed: int) -> None:
    weight = unstructured_weight(*shape, sparsity, seed=seed).to(dtype)
    packed = BitmapTensor.from_dense(weight).verify()
    assert torch.equal(packed.dense(), weight)
    assert packed.dtype == dtype
    again = BitmapTensor.from_parts(packed.parts, packed.metadata)
    assert torch.equal(again.dense(), weight)


def test_a_matrix_is_packed_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = unstructured_weight(300, 90, 0.7)
    whole = BitmapTensor.from_dense(weight)
    monkeypatch.setattr(bitmap_format, "SLABS_AT_ONCE", 1)
    assert all(torch.equal(a, b) for a, b in zip(BitmapTensor.from_dense(weight).parts, whole.parts, strict=True))


def test_every_bit_of_a_value_is_preserved() -> None:
    weight = torch.tensor([[torch.inf, 0, -torch.inf, 0], [1e-45, 0, 0, -3e38]])
    weight[0, 1] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
    again = BitmapTensor.from_dense(weight).dense()
    assert torch.equal(again.view(torch.int32), weight.view(torch.int32))


def test_values_that_become_zero_in_another_dtype_are_zeros() -> None:
    packed = BitmapTensor.from_dense(torch.tensor([[1e-30, 0, 2.0], [0, -1e-30, 0]])).to(torch.float16)
    assert packed.dtype == torch.float16
    assert packed.verify().dense().tolist() == [[0, 0, 2], [0, 0, 0]]


def test_a_convolution_is_packed_as_a_matrix() -> None:
    weight = unstructured_weight(40, 54, 0.8).view(40, 6, 3, 3)
    packed = BitmapTensor.from_dense(weight)
    assert packed.matrix == (40, 54)
    assert torch.equal(packed.dense(), weight)


def test_no_rows_and_no_survivors() -> None:
    assert BitmapTensor.from_dense(torch.zeros(0, 8)).verify().dense().shape == (0, 8)
    assert not BitmapTensor.from_dense(torch.zeros(20, 8)).verify().dense().any()


# ---- errors


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(2, 4, dtype=torch.float64), "only float32, float16, bfloat16 can be packed"),
        (torch.ones(4), r"only a matrix can be packed, got shape \(4,\)"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        BitmapTensor.from_dense(weight)


def test_tensors_of_the_wrong_shape_or_dtype_are_refused() -> None:
    packed = BitmapTensor.from_dense(unstructured_weight(100, 80, 0.8))
    values, words, starts = packed.parts
    most = packed.most
    bad = [
        ((values[:-1], words, starts), (100, 80), most),
        ((values.view(-1, 8), words, starts), (100, 80), most),
        ((values.double(), words, starts), (100, 80), most),
        ((values, words.long(), starts), (100, 80), most),
        ((values, words[:, :1].contiguous(), starts), (100, 80), most),
        ((values, words, starts.long()), (100, 80), most),
        ((values, words, starts[:-1]), (100, 80), most),
        ((values, words, starts), (200, 80), most),
        ((values, words, starts), (100, 280), most),
        ((values, words, starts), (100, 80), -1),
        ((values, words, starts), (100, 80), 4097),
        ((values, words.transpose(0, 1).contiguous().transpose(0, 1), starts), (100, 80), most),
    ]
    for parts, shape, number in bad:
        with pytest.raises(pm.PomonaError):
            BitmapTensor(*parts, torch.Size(shape), number)
        with pytest.raises(pm.PomonaError):
            bitmap(torch.ones(1, shape[1]), *parts, None, *shape, number)


def with_one(tensor: Tensor, place: tuple[int, ...], value: int) -> Tensor:
    """Return a copy of a tensor with another value in one place."""
    changed = tensor.clone()
    changed[place] = value
    return changed


def test_invalid_contents_are_refused() -> None:
    weight = torch.zeros(40, 60)
    weight[:, :8] = 1
    good = BitmapTensor.from_dense(weight)
    values, words, starts = good.parts
    assert good.verify() is good
    moved = with_one(with_one(words, (0, 0, 0, 0), int(words[0, 0, 0, 0]) ^ 1), (0, 0, 20, 0), 1)  # row 40
    cases = [
        ("do not match the bits", {"starts": with_one(starts, (1,), 7)}),
        ("do not match the bits", {"starts": with_one(starts, (0,), 1)}),
        ("do not match the bits", {"words": with_one(words, (0, 0, 0, 0), 0)}),
        ("there are 328", {"values": torch.cat([values, values[:8]])}),
        ("there are 312", {"values": values[:-8]}),
        ("outside the matrix", {"words": moved}),
    ]
    for message, changes in cases:
        parts = [changes.get(name, part) for name, part in zip(good.part_names, good.parts, strict=True)]
        with pytest.raises(pm.PomonaError, match=message):
            BitmapTensor.from_parts(parts, good.metadata).verify()
    with pytest.raises(pm.PomonaError, match="a step has 320 values and not 9"):
        BitmapTensor.from_parts(good.parts, good.metadata | {"most": 9}).verify()
