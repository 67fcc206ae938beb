"""The format of gaps: a matrix worked out by hand, round trips of any matrix, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import unstructured_weight
from torch import Tensor

import pomona as pm
from pomona.sparse import gaps as gap_format
from pomona.sparse.gaps import GAP_BITS, GapTensor, pack_codes, unpack_codes
from pomona.sparse.ops import gaps
from pomona.sparse.packed_tensor import DTYPES

SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 300))


def test_a_matrix_packed_by_hand() -> None:
    weight = torch.tensor([[0, 5.0, 0, 0, 0, 0, 0, 0, 6], [3, 0, 4, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]])
    packed = GapTensor.from_dense(weight, 2).verify()
    assert packed.gap_bits == 2
    assert packed.lanes[0].tolist() == [0, 1, 2, *[-1] * 29]  # the longest row first
    assert packed.starts.tolist() == [0, 1]  # one part
    assert packed.owners.tolist() == [0]
    assert packed.values[0, 0, 0, 0].tolist() == [5, 0, 6, *[0] * 5]  # six columns are skipped by a zero and a gap of 2
    assert packed.values[0, 0, 0, 1].tolist() == [3, 4, *[0] * 6]
    codes = unpack_codes(packed.gaps)[0, 0]  # slot, lane
    assert codes[:3, 0].tolist() == [1, 3, 2]
    assert codes[:2, 1].tolist() == [0, 1]
    assert packed.firsts[0, :3].tolist() == [0, 0, 9]  # an empty row starts past the last column
    assert torch.equal(packed.dense(), weight)


def test_a_row_starts_in_a_part_where_it_ended_in_the_one_before() -> None:
    weight = torch.zeros(2, 1000)
    weight[0, 100:140] = torch.arange(1.0, 41)
    packed = GapTensor.from_dense(weight, 8).verify()
    assert len(packed.values) == 2  # 40 values of a row in parts of 32
    assert packed.firsts[:, :2].tolist() == [[0, 1000], [132, 1000]]
    assert packed.values[0, :, :, 0].flatten().tolist() == list(range(1, 33))
    assert packed.values[1, 0, 0, 0].tolist() == list(range(33, 41))


def test_a_row_starts_in_a_part_among_zeros_that_bridge_a_gap() -> None:
    weight = torch.zeros(1, 400)
    weight[0, 0], weight[0, 399] = 1.0, 2.0
    packed = GapTensor.from_dense(weight, 2).verify()
    assert len(packed.values) == 4  # the gap of 398 columns takes 99 zeros of four columns each, and one of two
    assert packed.firsts[:, 0].tolist() == [0, 1 + 31 * 4, 1 + 63 * 4, 1 + 95 * 4]


@pytest.mark.parametrize(("sparsity", "bits", "largest"), [(0.5, 2, 2.55), (0.7, 4, 2.75), (0.9, 6, 3.1)])
def test_the_bits_of_a_gap_take_the_fewest_bytes(sparsity: float, bits: int, largest: float) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(64, 4096) * (torch.rand(64, 4096) >= sparsity)).half()
    packed = GapTensor.from_dense(weight)
    assert packed.gap_bits == bits
    assert packed.nbytes < largest * int(weight.count_nonzero())
    assert packed.nbytes <= min(GapTensor.from_dense(weight, other).nbytes for other in GAP_BITS)


@settings(deadline=None, max_examples=80)
@given(SHAPES, st.floats(0, 1), st.sampled_from(DTYPES), st.sampled_from([None, *GAP_BITS]), st.integers(0, 99))
def test_the_round_trip_is_exact(
    shape: tuple[int, int], sparsity: float, dtype: torch.dtype, bits: int | None, seed: int
) -> None:
    weight = unstructured_weight(*shape, sparsity, seed=seed).to(dtype)
    packed = GapTensor.from_dense(weight, bits).verify()
    assert torch.equal(packed.dense(), weight)
    assert packed.dtype == dtype
    again = GapTensor.from_parts(packed.parts, packed.metadata)
    assert torch.equal(again.dense(), weight)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(GAP_BITS), st.integers(0, 5), st.integers(0, 99))
def test_codes_of_any_bits_are_restored(bits: int, chunks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (chunks, 16, 32), generator=generator)
    packed = pack_codes(codes.to(torch.uint8), bits)
    assert packed.shape == (chunks, bits // 2, 32)
    assert torch.equal(unpack_codes(packed), codes)


def test_a_matrix_is_packed_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = unstructured_weight(50, 90, 0.7)
    whole = GapTensor.from_dense(weight)
    monkeypatch.setattr(gap_format, "PACKED_AT_ONCE", 700)  # seven rows
    assert all(torch.equal(a, b) for a, b in zip(GapTensor.from_dense(weight).parts, whole.parts, strict=True))


@pytest.mark.parametrize("bits", GAP_BITS)
def test_the_widest_matrices(bits: int) -> None:
    weight = torch.zeros(3, 65_536)
    weight[0, -1], weight[1, 0], weight[1, 65_534], weight[2, 40_000] = 1.0, 2.0, 3.0, 4.0
    assert torch.equal(GapTensor.from_dense(weight, bits).verify().dense(), weight)


def test_every_bit_of_a_value_is_preserved() -> None:
    weight = torch.tensor([[torch.inf, 0, -torch.inf, 0], [1e-45, 0, 0, -3e38]])
    weight[0, 1] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
    again = GapTensor.from_dense(weight).dense()
    assert torch.equal(again.view(torch.int32), weight.view(torch.int32))


def test_values_that_become_zero_in_another_dtype_are_zeros() -> None:
    packed = GapTensor.from_dense(torch.tensor([[1e-30, 0, 2.0], [0, -1e-30, 0]])).to(torch.float16)
    assert packed.dtype == torch.float16
    assert packed.verify().dense().tolist() == [[0, 0, 2], [0, 0, 0]]


def test_a_convolution_is_packed_as_a_matrix() -> None:
    weight = unstructured_weight(40, 54, 0.8).view(40, 6, 3, 3)
    packed = GapTensor.from_dense(weight)
    assert packed.matrix == (40, 54)
    assert torch.equal(packed.dense(), weight)


def test_no_rows_and_no_survivors() -> None:
    assert GapTensor.from_dense(torch.zeros(0, 8)).verify().dense().shape == (0, 8)
    assert not GapTensor.from_dense(torch.zeros(20, 8)).verify().dense().any()


# ---- errors


@pytest.mark.parametrize(
    ("weight", "bits", "message"),
    [
        (torch.ones(2, 4, dtype=torch.float64), None, "only float32, float16, bfloat16 can be packed"),
        (torch.ones(4), None, r"only a matrix can be packed, got shape \(4,\)"),
        (torch.ones(1, 65_537), None, "at most 65,536 columns can be packed with gaps, got 65,537"),
        (torch.ones(1, 6), 3, "gaps have 2, 4, 6 or 8 bits, got 3"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused(weight: Tensor, bits: int | None, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        GapTensor.from_dense(weight, bits)


def test_tensors_of_the_wrong_shape_or_dtype_are_refused() -> None:
    values, words, firsts, starts, owners, lanes = GapTensor.from_dense(unstructured_weight(40, 64, 0.8)).parts
    bad = [
        ((values[:-1], words, firsts, starts, owners, lanes), (40, 64)),
        ((values, words[:, :, :1].repeat(1, 1, 5, 1), firsts, starts, owners, lanes), (40, 64)),
        ((values.double(), words, firsts, starts, owners, lanes), (40, 64)),
        ((values, words.long(), firsts, starts, owners, lanes), (40, 64)),
        ((values, words, firsts.int(), starts, owners, lanes), (40, 64)),
        ((values, words, firsts[:-1], starts, owners, lanes), (40, 64)),
        ((values, words, firsts, starts.long(), owners, lanes), (40, 64)),
        ((values, words, firsts, starts[:-1], owners, lanes), (40, 64)),
        ((values, words, firsts, starts, owners, lanes.view(-1)), (40, 64)),
        ((values, words, firsts, starts, owners[:-1], lanes), (40, 64)),
        ((values, words, firsts, starts, owners, lanes), (65, 64)),
        ((values, words, firsts, starts, owners, lanes), (40, 65_537)),
        ((values.transpose(1, 2).contiguous().transpose(1, 2), words, firsts, starts, owners, lanes), (40, 64)),
    ]
    for parts, shape in bad:
        with pytest.raises(pm.PomonaError):
            GapTensor(*parts, torch.Size(shape))
        with pytest.raises(pm.PomonaError):
            gaps(torch.ones(1, shape[1]), *parts, None, *shape)


def with_one(tensor: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    """Return a copy of a tensor with another value in one place."""
    changed = tensor.clone()
    changed[place] = value
    return changed


def test_invalid_contents_are_refused() -> None:
    good = GapTensor.from_dense(unstructured_weight(40, 60, 0.2), 2)  # no row is empty
    values, _, firsts, starts, owners, lanes = good.parts
    assert good.verify() is good
    cases = [
        ("outside the 60 columns", {"firsts": with_one(firsts, (0, 0), 59)}),
        ("outside the 60 columns", {"firsts": with_one(firsts, (0, 0), -1)}),
        ("the same place", {"firsts": with_one(firsts, (1, 0), 0)}),
        ("the owners", {"owners": with_one(owners, (0,), 1)}),
        ("do not lead from 0", {"starts": with_one(starts, (0,), 1)}),
        ("do not lead from 0", {"starts": with_one(starts, (-1,), len(values) + 1)}),
        ("do not lead from 0", {"starts": with_one(starts, (1,), -5)}),
        ("are not the 40 rows", {"lanes": with_one(lanes, (0, 0), int(lanes[0, 1]))}),
        ("are not the 40 rows", {"lanes": with_one(lanes, (0, 0), 40)}),
        ("outside the matrix", {"values": with_one(values, (len(values) - 1, 0, 0, 31, 0), 1.0)}),
    ]
    for message, changes in cases:
        parts = [changes.get(name, part) for name, part in zip(good.part_names, good.parts, strict=True)]
        with pytest.raises(pm.PomonaError, match=message):
            GapTensor.from_parts(parts, good.metadata).verify()
