"""Selection against a slow reference: plain Python sorting by (score, position)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from score_cases import INF, NAN, SCORE_KINDS, make_scores
from torch import Tensor
from triton_interpreter import DEVICE

from pomona.errors import PomonaError
from pomona.patterns import score_reader, selection
from pomona.patterns.selection import select_largest, select_largest_per_row

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")]
# Few values, so that ties are the rule, with every special one among them.
floats = st.sampled_from([-INF, -2.0, -0.5, -1e-40, -0.0, 0.0, 1e-40, 0.5, 2.0, 1e30, INF, NAN, -NAN])


def sort_key(value: float, position: int) -> tuple[bool, float, int]:
    """Return a sort key: NaN first, then the largest, then the earliest."""
    is_nan = math.isnan(value)
    return (not is_nan, 0.0 if is_nan else -value, position)


def reference_mask(values: list[float], keep: int) -> list[bool]:
    """Return the mask of the `keep` largest values, found by sorting."""
    order = sorted(range(len(values)), key=lambda i: sort_key(values[i], i))
    kept = set(order[:keep])
    return [i in kept for i in range(len(values))]


def flatten_masks(masks: list[Tensor]) -> list[bool]:
    """Return the entries of all masks in one list."""
    return [kept for mask in masks for kept in mask.flatten().tolist()]


def reference_mask_with_floors(parts: list[list[float]], keep: int, floors: list[int]) -> list[bool]:
    """Return the mask that first keeps the floor of each part without −inf, and then the largest values of all."""
    masks = [reference_mask(part, floor) for part, floor in zip(parts, floors, strict=True)]
    values = [value for part in parts for value in part]
    first = [kept and value > -INF for kept, value in zip([k for mask in masks for k in mask], values, strict=True)]
    order = sorted(range(len(values)), key=lambda i: (not first[i], *sort_key(values[i], i)))
    return [i in set(order[:keep]) for i in range(len(values))]


# --- selection over all tensors ---


def test_masks_worked_out_by_hand() -> None:
    masks = select_largest([torch.tensor([[3.0, -1.0], [2.0, 5.0]]), torch.tensor([4.0, 2.0])], 4)
    assert masks[0].tolist() == [[True, False], [True, True]]  # the earlier of the two 2s
    assert masks[1].tolist() == [True, False]


def test_zeros_of_both_signs_tie() -> None:
    assert select_largest([torch.tensor([-1.0, -0.0, 0.0, -0.0])], 2)[0].tolist() == [False, True, True, False]


def test_nan_is_the_largest_whatever_its_sign() -> None:
    scores = torch.tensor([INF, -NAN, 1.0, NAN, -INF])
    assert select_largest([scores], 1)[0].tolist() == [False, True, False, False, False]
    assert select_largest([scores], 2)[0].tolist() == [False, True, False, True, False]
    assert select_largest([scores], 3)[0].tolist() == [True, True, False, True, False]


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(DTYPES))
def test_matches_sorting(data: st.DataObject, dtype: torch.dtype) -> None:
    parts = data.draw(st.lists(st.lists(floats, max_size=12), min_size=1, max_size=4))
    scores = [torch.tensor(part, dtype=torch.float64).to(dtype) for part in parts]
    values = [value for score in scores for value in score.tolist()]
    keep = data.draw(st.integers(0, len(values)))
    masks = select_largest(scores, keep)
    assert all(mask.dtype == torch.bool for mask in masks)
    assert flatten_masks(masks) == reference_mask(values, keep)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_any_float_and_any_chunk_size(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(width=32), min_size=1, max_size=200))
    keep = data.draw(st.integers(0, len(values)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(score_reader.CHUNK, "cpu", data.draw(st.sampled_from([1, 3, 64])))
        assert flatten_masks(select_largest([torch.tensor(values)], keep)) == reference_mask(values, keep)


@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_large_scores(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(score_reader.CHUNK, "cpu", 4096)
    scores = [make_scores(kind, (50, 111)), make_scores(kind, (7,), 1), make_scores(kind, (20_000,), 2)]
    values = torch.cat([score.flatten() for score in scores]).tolist()
    for keep in (1, 255, len(values) // 2, len(values) - 1):
        assert flatten_masks(select_largest(scores, keep)) == reference_mask(values, keep)


@pytest.mark.parametrize("wrong", [-INF, -0.5, 0.25, INF, NAN])
def test_a_wrong_estimate_is_detected(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_estimate_threshold", lambda *_: np.float32(wrong))
    scores = make_scores("special", (500,))
    assert flatten_masks(select_largest([scores], 200)) == reference_mask(scores.tolist(), 200)


def test_the_estimate_is_right() -> None:
    scores = make_scores("normal", (30_000,))
    values = scores.numpy()
    for keep in (3, 300, 3000, 15_000, 29_990):
        readers = [score_reader.ScoreReader(scores)]
        estimate = selection._estimate_threshold(readers, lambda: iter([(values, values)]), keep, torch.float32)
        assert estimate == np.sort(values)[-keep]


@settings(deadline=None, max_examples=100)
@given(st.data(), st.sampled_from(DTYPES))
def test_magnitudes_within_masks_are_ranked_without_a_copy(data: st.DataObject, dtype: torch.dtype) -> None:
    parts = data.draw(st.lists(st.lists(floats, min_size=1, max_size=12), min_size=1, max_size=4))
    scores = [torch.tensor(part, dtype=torch.float64).to(dtype) for part in parts]
    within = [torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(p), max_size=len(p)))) for p in parts]
    keep = data.draw(st.integers(0, sum(map(len, parts))))
    floors = [data.draw(st.integers(0, len(part))) for part in parts] if data.draw(st.booleans()) else None
    ranked = [s.abs().masked_fill(~m, -INF) for s, m in zip(scores, within, strict=True)]
    expected = reference_mask(selection.raise_floor_scores(ranked, floors).tolist(), keep)
    assert flatten_masks(select_largest(scores, keep, floors, magnitudes=True, within=within)) == expected


def test_mixed_dtypes_are_compared_in_the_widest() -> None:
    close = 1 + 1e-12  # more than 1 in float64 alone
    scores = [torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([close], dtype=torch.float64)]
    assert flatten_masks(select_largest([*scores, torch.tensor([1.0])], 1)) == [False, True, False]


def test_non_contiguous_scores_that_require_a_gradient() -> None:
    scores = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    view = scores.t()[::2]
    (mask,) = select_largest([view], 9)
    assert mask.shape == view.shape
    assert mask.flatten().tolist() == reference_mask(view.flatten().tolist(), 9)


def test_scores_are_not_modified() -> None:
    scores = make_scores("special", (64, 4))
    bits = scores.view(torch.int32).clone()
    select_largest([scores], 100)
    select_largest_per_row(scores, 2)
    assert torch.equal(scores.view(torch.int32), bits)


def test_floors_worked_out_by_hand() -> None:
    low, high = torch.tensor([1.0, 3.0, 2.0]), torch.tensor([6.0, 4.0, 7.0, 5.0])
    assert [mask.int().tolist() for mask in select_largest([low, high], 3)] == [[0, 0, 0], [1, 0, 1, 1]]
    assert [mask.int().tolist() for mask in select_largest([low, high], 3, [0, 1])] == [[0, 0, 0], [1, 0, 1, 1]]
    assert [mask.int().tolist() for mask in select_largest([low, high], 3, [1, 1])] == [[0, 1, 0], [1, 0, 1, 0]]
    assert [mask.int().tolist() for mask in select_largest([low, high], 3, [3, 0])] == [[1, 1, 1], [0, 0, 0, 0]]
    low = torch.tensor([-INF, 3.0, -INF])  # pruned weights stay pruned, whatever the floor
    assert [mask.int().tolist() for mask in select_largest([low, high], 3, [3, 0])] == [[0, 1, 0], [1, 0, 1, 0]]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_floors_match_sorting(data: st.DataObject) -> None:
    values = st.sampled_from([-INF, -2.0, -0.5, -0.0, 0.0, 0.5, 2.0, 1e30])
    parts = data.draw(st.lists(st.lists(values, max_size=12), min_size=1, max_size=4))
    keep = data.draw(st.integers(0, sum(map(len, parts))))
    floors = [data.draw(st.integers(0, min(len(part), keep // len(parts)))) for part in parts]
    masks = select_largest([torch.tensor(part) for part in parts], keep, floors)
    assert flatten_masks(masks) == reference_mask_with_floors(parts, keep, floors)


def test_empty_and_scalar_tensors() -> None:
    assert select_largest([], 0) == []
    masks = select_largest([torch.empty(0, 3), torch.tensor(1.0), torch.tensor([2.0, 3.0]), torch.empty(0)], 2)
    assert [mask.shape for mask in masks] == [(0, 3), (), (2,), (0,)]
    assert flatten_masks(masks) == [False, True, True]


@pytest.mark.parametrize("keep", [-1, 5])
def test_count_out_of_range(keep: int) -> None:
    with pytest.raises(PomonaError, match=rf"cannot keep {keep} of 4 entries: ask for 0 to 4"):
        select_largest([torch.ones(4)], keep)
    with pytest.raises(PomonaError, match=rf"cannot keep {keep} of 4 columns: ask for 0 to 4"):
        select_largest_per_row(torch.ones(2, 4), keep)


def test_invalid_scores_are_refused() -> None:
    with pytest.raises(PomonaError, match=r"torch\.int64"):
        select_largest([torch.arange(4)], 2)
    with pytest.raises(PomonaError, match="3 dimensions"):
        select_largest_per_row(torch.ones(2, 2, 2), 1)
    with pytest.raises(PomonaError, match="cpu and meta"):
        select_largest([torch.ones(2), torch.ones(2, device="meta")], 1)


# --- selection in each row ---


def test_rows_worked_out_by_hand() -> None:
    scores = torch.tensor([[1.0, 4.0, 2.0, 3.0], [0.0, -0.0, 0.0, 0.0], [NAN, 1.0, INF, -NAN]])
    assert select_largest_per_row(scores, 2).int().tolist() == [[0, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 1]]


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(DTYPES), st.integers(1, 20), st.integers(0, 5))
def test_rows_match_sorting(data: st.DataObject, dtype: torch.dtype, columns: int, rows: int) -> None:
    row = st.lists(floats, min_size=columns, max_size=columns)
    values = data.draw(st.lists(row, min_size=rows, max_size=rows))
    scores = torch.tensor(values, dtype=torch.float64).to(dtype).reshape(rows, columns)
    keep = data.draw(st.integers(0, columns))
    expected = [reference_mask(row, keep) for row in scores.tolist()]
    assert select_largest_per_row(scores, keep).tolist() == expected
    if rows and keep:
        assert selection._select_by_topk(selection.keys_of(scores), keep).tolist() == expected


@pytest.mark.parametrize("kind", SCORE_KINDS)
@pytest.mark.parametrize("columns", [4, 32, 300])
def test_many_rows(kind: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(score_reader.CHUNK, "cpu", 1024)
    scores = make_scores(kind, (columns, 77)).t()  # not contiguous
    for keep in (1, columns // 2, columns - 1):
        assert select_largest_per_row(scores, keep).tolist() == [reference_mask(row, keep) for row in scores.tolist()]


def test_empty_rows_or_columns() -> None:
    assert select_largest_per_row(torch.empty(0, 4), 2).shape == (0, 4)
    assert select_largest_per_row(torch.empty(3, 0), 0).shape == (3, 0)


# --- on CUDA ---


class TestCuda:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", SCORE_KINDS)
    def test_same_masks_as_on_cpu(self, kind: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        for size in (1, 2, 2047, 2048, 2049, 270_001, 3_000_000):
            scores = [make_scores(kind, (size,)).to(dtype), make_scores(kind, (3, 5)).to(dtype)]
            for keep in (0, 1, int(torch.randint(size, (), generator=generator)), size + 14, size + 15):
                masks = select_largest([score.cuda() for score in scores], keep)
                expected = select_largest(scores, keep)
                assert all(torch.equal(a.cpu(), b) for a, b in zip(masks, expected, strict=True))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(50_000, 4), (1001, 33), (64, 4096), (3, 5000)])
    def test_same_rows_as_on_cpu(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        for kind in SCORE_KINDS:
            scores = make_scores(kind, shape).to(dtype)
            for keep in (0, 1, shape[1] // 2, shape[1]):
                assert torch.equal(
                    select_largest_per_row(scores.cuda(), keep).cpu(), select_largest_per_row(scores, keep)
                )

    def test_plain_torch_selects_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selection, "_import_kernels", lambda: None)
        for kind in SCORE_KINDS:
            scores = make_scores(kind, (10_000,))
            assert torch.equal(select_largest([scores.cuda()], 999)[0].cpu(), select_largest([scores], 999)[0])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_same_floors_as_on_cpu(self, dtype: torch.dtype) -> None:
        scores = [torch.rand(n).to(dtype) * 10**k for k, n in enumerate((3, 2049, 70_000, 50))]
        for keep, floors in ((500, [3, 7, 200, 1]), (500, [1, 1, 0, 1]), (4000, [3, 2000, 1, 50])):
            masks = select_largest([score.cuda() for score in scores], keep, floors)
            expected = select_largest(scores, keep, floors)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(masks, expected, strict=True))

    def test_floors_in_a_cuda_graph(self) -> None:
        scores = [torch.randn(3000, device="cuda"), torch.randn(500, device="cuda") / 1e6]
        select_largest(scores, 100, [5, 9])  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            masks = select_largest(scores, 100, [5, 9])
        scores[0].normal_()
        graph.replay()
        expected = select_largest([score.cpu() for score in scores], 100, [5, 9])
        assert all(torch.equal(a.cpu(), b) for a, b in zip(masks, expected, strict=True))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_host_never_waits(self, dtype: torch.dtype) -> None:
        scores = [torch.randn(1000, 64, device="cuda").to(dtype), torch.randn(77, device="cuda").to(dtype)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            select_largest(scores, 5000)
            select_largest(scores, 5000, [100, 77])
            select_largest_per_row(scores[0], 7)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_in_a_cuda_graph(self) -> None:
        scores = torch.randn(100_000, device="cuda")
        select_largest([scores], 1000)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (mask,) = select_largest([scores], 1000)
        scores.normal_()
        graph.replay()
        assert torch.equal(mask.cpu(), select_largest([scores.cpu()], 1000)[0])


def test_a_floor_leaves_nan_above_infinity() -> None:
    scores = torch.tensor([-INF, INF, NAN])
    assert flatten_masks(select_largest([scores], 1, [1])) == [False, False, True]
    assert selection.raise_floor_scores([scores], [2])[:2].tolist() == [-INF, INF]
    assert selection.raise_floor_scores([scores], [2])[2].isnan()
