"""The unstructured format: a matrix worked out by hand, round trips of any matrix, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import is_close, unstructured_weight
from torch import Tensor

import pomona as pm
from pomona.sparse import UnstructuredTensor
from pomona.sparse.cpu import backend
from pomona.sparse.ops import unstructured
from pomona.sparse.packed_tensor import DTYPES

SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 150))


def test_a_matrix_packed_by_hand() -> None:
    weight = torch.tensor([[0, 5.0, 0], [3, 0, 4], [0, 0, 0]])
    packed = UnstructuredTensor.from_dense(weight).verify()
    assert packed.values.shape == packed.indices.shape == (2, 16)  # as many steps as the longest row has survivors
    assert packed.lanes[0].tolist() == [1, 0, 2, *[-1] * 13]  # the longest row first
    assert packed.values[:, :3].tolist() == [[3, 5, 0], [4, 0, 0]]  # step, lane
    assert packed.indices[packed.values != 0].tolist() == [0, 1, 2]
    assert packed.starts.tolist() == [0, 2]
    assert packed.nbytes == 2 * 16 * (4 + 2) + 2 * 8 + 16 * 4
    assert packed.linear(torch.tensor([1.0, 10, 100])).tolist() == [50, 403, 0]
    assert packed.linear(-torch.ones(1, 3), torch.tensor([9.0, 1, 2]), relu=True).tolist() == [[4, 0, 2]]


def test_rows_of_unequal_length_take_little_padding() -> None:
    weight = unstructured_weight(2048, 256, 0.9, seed=1)
    counts = (weight != 0).sum(1)
    assert counts.max() > 3 * counts.median()
    packed = UnstructuredTensor.from_dense(weight)
    assert packed.values.numel() < 1.1 * int(counts.sum()), packed.values.numel() / int(counts.sum())


@settings(deadline=None, max_examples=80)
@given(SHAPES, st.floats(0, 1), st.sampled_from(DTYPES), st.integers(0, 99))
def test_the_round_trip_is_exact(shape: tuple[int, int], sparsity: float, dtype: torch.dtype, seed: int) -> None:
    weight = unstructured_weight(*shape, sparsity, seed=seed).to(dtype)
    packed = UnstructuredTensor.from_dense(weight).verify()
    assert torch.equal(packed.dense(), weight)
    assert packed.dtype == dtype
    again = UnstructuredTensor.from_parts(packed.parts, packed.metadata)
    assert torch.equal(again.dense(), weight)


@pytest.mark.parametrize("columns", [65_535, 65_536, 65_537, 150_000])
def test_matrices_wider_than_an_index_have_bands(columns: int) -> None:
    weight = torch.zeros(3, columns)
    weight[0, -1], weight[1, 0], weight[1, 65_534], weight[2, columns // 2] = 1.0, 2.0, 3.0, 4.0
    packed = UnstructuredTensor.from_dense(weight).verify()
    assert len(packed.lanes) == -(-columns // 65_536)
    assert torch.equal(packed.dense(), weight)
    x = torch.arange(columns) % 97 + 1.0
    for n in (1, 2, 5, 40):
        assert torch.equal(packed.linear(x.expand(n, -1)), (x @ weight.T).expand(n, -1))


def find_windows(packed: UnstructuredTensor) -> Tensor:
    """Return which steps read 64 neighbouring columns, from a multiple of 16 on."""
    columns = packed.indices.int() & 0xFFFF
    first = columns.amin(1, keepdim=True) // 16 * 16
    return (columns < first + 64).all(1)


@pytest.mark.skipif(backend.load_library() is None, reason="the C library orders survivors")
def test_most_steps_read_neighbouring_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = unstructured_weight(512, 4096, 0.9)
    ordered = UnstructuredTensor.from_dense(weight).verify()
    monkeypatch.setattr("pomona.sparse.unstructured.order_unstructured", lambda *parts: None)
    by_column = UnstructuredTensor.from_dense(weight)
    assert ordered.values.shape == by_column.values.shape  # no step is added
    assert torch.equal(ordered.dense(), weight)
    assert find_windows(by_column).double().mean() < 0.2
    assert find_windows(ordered).double().mean() > 0.6


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 6000), st.floats(0.3, 1), st.sampled_from(DTYPES), st.integers(0, 99))
def test_survivors_in_any_order_give_the_same_product(
    rows: int, columns: int, sparsity: float, dtype: torch.dtype, seed: int
) -> None:
    weight = unstructured_weight(rows, columns, sparsity, seed).to(dtype)
    packed = UnstructuredTensor.from_dense(weight).verify()
    assert torch.equal(packed.dense(), weight)
    slices = range(len(packed.lanes))
    shuffled = [torch.randperm(int(packed.starts[i + 1] - packed.starts[i])) + packed.starts[i] for i in slices]
    order = torch.cat(shuffled)
    other = UnstructuredTensor(
        packed.values[order], packed.indices[order], packed.starts, packed.lanes, packed.shape
    ).verify()
    for n in (1, 2, 7):
        x = torch.randn(n, columns)
        exact = x.double() @ weight.double().T
        assert is_close(packed.linear(x), exact)
        assert is_close(other.linear(x), exact)


def test_a_convolution_keeps_the_order_of_columns() -> None:
    packed = UnstructuredTensor.from_dense(unstructured_weight(32, 90, 0.5).view(32, 10, 3, 3))
    columns = torch.where(packed.values != 0, packed.indices.int(), 1 << 16)
    for i in range(len(packed.lanes)):
        assert bool((columns[packed.starts[i] : packed.starts[i + 1]].diff(dim=0) >= 0).all())


def test_every_bit_of_a_value_is_preserved() -> None:
    weight = torch.tensor([[torch.inf, 0, -torch.inf, 0], [1e-45, 0, 0, -3e38]])
    weight[0, 1] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
    again = UnstructuredTensor.from_dense(weight).dense()
    assert torch.equal(again.view(torch.int32), weight.view(torch.int32))


def test_values_that_become_zero_in_another_dtype_are_zeros() -> None:
    packed = UnstructuredTensor.from_dense(torch.tensor([[1e-30, 0, 2.0], [0, -1e-30, 0]])).to(torch.float16)
    assert packed.dtype == torch.float16
    assert packed.verify().dense().tolist() == [[0, 0, 2], [0, 0, 0]]


def test_a_convolution_is_packed_as_a_matrix() -> None:
    weight = unstructured_weight(40, 54, 0.8).view(40, 6, 3, 3)
    packed = UnstructuredTensor.from_dense(weight)
    assert packed.matrix == (40, 54)
    assert torch.equal(packed.dense(), weight)


# ---- errors


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(2, 4, dtype=torch.float64), "only float32, float16, bfloat16 can be packed, got torch.float64"),
        (torch.ones(4), r"only a matrix can be packed, got shape \(4,\)"),
        (torch.ones(2, 0), r"got shape \(2, 0\)"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        UnstructuredTensor.from_dense(weight)


def test_tensors_of_the_wrong_shape_or_dtype_are_refused() -> None:
    values, indices, starts, lanes = UnstructuredTensor.from_dense(unstructured_weight(40, 64, 0.8)).parts
    bad = [
        ((values[:-1], indices, starts, lanes), (40, 64)),
        ((values[:, :8], indices[:, :8], starts, lanes), (40, 64)),
        ((values.double(), indices, starts, lanes), (40, 64)),
        ((values, indices.int(), starts, lanes), (40, 64)),
        ((values, indices, starts.int(), lanes), (40, 64)),
        ((values, indices, starts, lanes.long()), (40, 64)),
        ((values, indices, starts[:-1], lanes), (40, 64)),
        ((values, indices, starts, lanes[:-1]), (40, 64)),
        ((values, indices, starts, lanes), (49, 64)),
        ((values, indices, starts, lanes), (40, 65_537)),
        ((values, indices, starts, lanes), (40, 0)),
        ((values.T.contiguous().T, indices, starts, lanes), (40, 64)),
        ((values, indices, starts, lanes.view(-1)), (40, 64)),
    ]
    for parts, shape in bad:
        with pytest.raises(pm.PomonaError):
            UnstructuredTensor(*parts, torch.Size(shape))
        with pytest.raises(pm.PomonaError):
            unstructured(torch.ones(1, shape[1]), *parts, None, *shape)
    with pytest.raises(pm.PomonaError, match="does not fit a packed matrix of 40×64"):
        unstructured(torch.ones(1, 63), values, indices, starts, lanes, None, 40, 64)
    with pytest.raises(pm.PomonaError, match="the bias has shape"):
        unstructured(torch.ones(1, 64), values, indices, starts, lanes, torch.ones(41), 40, 64)


def with_one(tensor: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    """Return a copy of a tensor with another value in one place."""
    changed = tensor.clone()
    changed[place] = value
    return changed


def test_invalid_contents_are_refused() -> None:
    good = UnstructuredTensor.from_dense(unstructured_weight(40, 60, 0.2))  # no row is empty
    values, indices, starts, lanes = good.parts
    assert good.verify() is good
    first = int(lanes[0, 1])
    cases = [
        ("outside the 60 columns", {"indices": with_one(indices, (0, 0), 60)}),
        ("outside the 60 columns", {"indices": with_one(indices, (0, 0), -1)}),
        ("the same place", {"indices": with_one(indices, (0, 0), int(indices[1, 0]))}),
        ("do not lead from 0", {"starts": with_one(starts, (0,), 1)}),
        ("do not lead from 0", {"starts": with_one(starts, (-1,), len(values) + 1)}),
        ("do not lead from 0", {"starts": with_one(starts, (1,), -5)}),
        ("are not the 40 rows", {"lanes": with_one(lanes, (0, 0), first)}),
        ("are not the 40 rows", {"lanes": with_one(lanes, (0, 0), 40)}),
        ("are not the 40 rows", {"lanes": with_one(lanes, (0, 0), -2)}),
        ("outside the matrix", {"values": with_one(values, (len(values) - 1, 15), 1.0)}),
    ]
    for message, changes in cases:
        parts = [changes.get(name, part) for name, part in zip(good.part_names, good.parts, strict=True)]
        with pytest.raises(pm.PomonaError, match=message):
            UnstructuredTensor.from_parts(parts, good.metadata).verify()
