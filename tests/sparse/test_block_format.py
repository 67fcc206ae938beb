"""The format of dense blocks: a matrix worked out by hand, round trips, the shape of blocks, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import block_weight, unstructured_weight
from torch import Tensor

import pomona as pm
from pomona.sparse import BlockTensor
from pomona.sparse.block_shape import find_block_shape
from pomona.sparse.ops import blocks
from pomona.sparse.packed_tensor import DTYPES

SIDES = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 33])


def test_a_matrix_packed_by_hand() -> None:
    weight = torch.tensor([[0, 0, 0, 5.0, 6], [0, 0, 0, 7, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 2, 3, 0, 8]])
    packed = BlockTensor.from_dense(weight, 2, 3).verify()
    assert packed.values.tolist() == [[[5, 6, 0], [7, 0, 0]], [[1, 2, 3], [0, 0, 0]], [[0, 8, 0], [0, 0, 0]]]
    assert packed.block_columns.tolist() == [1, 0, 1]
    assert packed.starts.tolist() == [0, 1, 1, 3]
    assert packed.nbytes == 4 * (3 * 6 + 3 + 4)
    assert packed.linear(torch.tensor([1.0, 10, 100, 1000, 2])).tolist() == [5012, 7000, 0, 0, 337]
    assert packed.linear(-torch.ones(1, 5), torch.ones(5) * 8, relu=True).tolist() == [[0, 1, 8, 8, 0]]
    assert repr(packed) == "BlockTensor(5×5, 3 blocks of 2×3, torch.float32, 100 bytes)"


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 70), st.integers(1, 120), SIDES, SIDES, st.floats(0, 1), st.sampled_from(DTYPES), st.integers(0, 99)
)
def test_the_round_trip_is_exact(
    rows: int, columns: int, height: int, width: int, sparsity: float, dtype: torch.dtype, seed: int
) -> None:
    weight = block_weight(rows, columns, height, width, sparsity, seed).to(dtype)
    packed = BlockTensor.from_dense(weight, height, width).verify()
    assert torch.equal(packed.dense(), weight)
    assert torch.equal(BlockTensor.from_parts(packed.parts, packed.metadata).dense(), weight)
    other = BlockTensor.from_dense(weight, 3, 4).verify()  # of any mask
    assert torch.equal(other.dense(), weight)


def test_every_bit_of_a_value_is_preserved() -> None:
    weight = torch.tensor([[torch.inf, 0, -torch.inf, 0], [1e-45, 0, 0, -3e38]])
    weight[0, 1] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
    again = BlockTensor.from_dense(weight, 1, 2).dense()
    assert torch.equal(again.view(torch.int32), weight.view(torch.int32))


def test_other_dtypes_and_convolutions() -> None:
    packed = BlockTensor.from_dense(torch.tensor([[1e-30, 0, 2.0], [0, -1e-30, 0]]), 1, 2).to(torch.float16)
    assert packed.verify().dense().tolist() == [[0, 0, 2], [0, 0, 0]]
    weight = block_weight(40, 54, 4, 9, 0.7).view(40, 6, 3, 3)
    packed = BlockTensor.from_dense(weight, 4, 9)
    assert packed.matrix == (40, 54)
    assert torch.equal(packed.dense(), weight)
    assert BlockTensor.from_dense(torch.zeros(0, 8), 2, 2).verify().dense().shape == (0, 8)
    assert len(BlockTensor.from_dense(torch.zeros(9, 8), 2, 2).verify().values) == 0


# ---- the shape of the blocks in a mask


@pytest.mark.parametrize("shape", [(4, 4), (8, 8), (16, 16), (1, 16), (16, 1), (1, 9), (2, 4), (32, 32), (1, 4)])
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_the_shape_of_blocks_is_found(shape: tuple[int, int], sparsity: float) -> None:
    weight = block_weight(288, 576, *shape, sparsity)
    assert find_block_shape(weight) == shape


def test_a_few_zeros_in_blocks_and_empty_first_rows_do_not_hide_the_shape() -> None:
    weight = block_weight(512, 512, 8, 8, 0.8)
    weight *= torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) > 0.02
    assert find_block_shape(weight) == (8, 8)
    weight[:200] = 0
    assert find_block_shape(weight) == (8, 8)
    assert find_block_shape(weight.half()) == (8, 8)
    assert find_block_shape(weight.view(512, 128, 2, 2)) == (8, 8)


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.9, 0.99])
def test_masks_without_blocks_have_no_shape(sparsity: float) -> None:
    assert find_block_shape(unstructured_weight(300, 500, sparsity)) is None


def test_dense_matrices_and_masks_of_two_kinds_have_no_shape() -> None:
    assert find_block_shape(torch.ones(64, 64)) is None  # nothing is pruned
    assert find_block_shape(torch.ones(1, 1)) is None
    mixed = torch.cat([block_weight(256, 256, 8, 8, 0.8), unstructured_weight(256, 256, 0.8)])
    assert find_block_shape(mixed) is None  # the rows that are looked at first have blocks, others not


# ---- errors


@pytest.mark.parametrize(
    ("weight", "shape", "message"),
    [
        (torch.ones(2, 4, dtype=torch.float64), (1, 1), "only float32, float16, bfloat16 can be packed"),
        (torch.ones(4), (1, 1), r"only a matrix can be packed, got shape \(4,\)"),
        (torch.ones(2, 0), (1, 1), r"got shape \(2, 0\)"),
        (torch.ones(2, 4), (0, 1), "a block has 1 to 4096 rows and columns, got 0×1"),
        (torch.ones(2, 4), (1, 4097), "got 1×4097"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused(weight: Tensor, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        BlockTensor.from_dense(weight, *shape)


def test_tensors_of_the_wrong_shape_or_dtype_are_refused() -> None:
    values, columns, starts = BlockTensor.from_dense(block_weight(40, 64, 4, 8, 0.5), 4, 8).parts
    bad = [
        ((values[:-1], columns, starts), (40, 64)),
        ((values.flatten(1), columns, starts), (40, 64)),
        ((values.double(), columns, starts), (40, 64)),
        ((values, columns.long(), starts), (40, 64)),
        ((values, columns, starts.long()), (40, 64)),
        ((values, columns, starts[:-1]), (40, 64)),
        ((values[:, :0], columns, starts), (40, 64)),
        ((values, columns, starts), (41, 64)),
        ((values, columns, starts), (40, 0)),
        ((values.transpose(1, 2), columns, starts), (40, 64)),
    ]
    for parts, shape in bad:
        with pytest.raises(pm.PomonaError):
            BlockTensor(*parts, torch.Size(shape))
        with pytest.raises(pm.PomonaError):
            blocks(torch.ones(1, shape[1]), *parts, None, *shape)
    with pytest.raises(pm.PomonaError, match="does not fit a packed matrix of 40×64"):
        blocks(torch.ones(1, 63), values, columns, starts, None, 40, 64)
    with pytest.raises(pm.PomonaError, match="the bias has shape"):
        blocks(torch.ones(1, 64), values, columns, starts, torch.ones(41), 40, 64)


def test_invalid_contents_are_refused() -> None:
    good = BlockTensor.from_dense(block_weight(39, 62, 4, 8, 0.0), 4, 8)  # every block is there
    assert good.verify() is good
    count = len(good.values)
    cases = [
        ("block_columns", (0,), 8, "a block is outside the 8 block columns"),
        ("block_columns", (0,), -1, "a block is outside the 8 block columns"),
        ("block_columns", (1,), 0, "do not increase in their columns"),
        ("block_columns", (1,), 3, "do not increase in their columns"),
        ("starts", (0,), 1, "do not lead from 0"),
        ("starts", (-1,), count + 1, "do not lead from 0"),
        ("starts", (1,), -5, "do not lead from 0"),
        ("starts", (1,), 9, "do not increase in their columns"),
        ("values", (7, 0, 7), 1.0, "a value is outside the matrix"),
        ("values", (count - 1, 3, 0), torch.nan, "a value is outside the matrix"),
    ]
    for name, place, value, message in cases:
        parts = {part: tensor.clone() for part, tensor in zip(good.part_names, good.parts, strict=True)}
        parts[name][place] = value
        with pytest.raises(pm.PomonaError, match=message):
            BlockTensor.from_parts(list(parts.values()), good.metadata).verify()
