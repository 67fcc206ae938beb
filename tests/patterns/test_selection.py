"""Selection against a slow reference: plain Python sorting by (score, position)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import DEVICE, INTERPRETED, TRITON, interpret, needed
from torch import Tensor

from pomona.errors import PomonaError
from pomona.patterns import selection
from pomona.patterns.selection import select_largest, select_largest_per_row

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")]
kernel = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(
        not TRITON or (DEVICE == "cpu" and not INTERPRETED),
        reason="needs Triton, and a CUDA device or its interpreter",
    ),
]

# Few values, so that ties are the rule, with every special one among them.
floats = st.sampled_from([-INF, -2.0, -0.5, -1e-40, -0.0, 0.0, 1e-40, 0.5, 2.0, 1e30, INF, NAN, -NAN])


def before(value: float, position: int) -> tuple[bool, float, int]:
    """A sort key: NaN first, then the largest, then the earliest."""
    lost = math.isnan(value)
    return (not lost, 0.0 if lost else -value, position)


def reference(values: list[float], keep: int) -> list[bool]:
    order = sorted(range(len(values)), key=lambda i: before(values[i], i))
    kept = set(order[:keep])
    return [i in kept for i in range(len(values))]


def flat(masks: list[Tensor]) -> list[bool]:
    return [kept for mask in masks for kept in mask.flatten().tolist()]


def awkward(kind: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "ties":
        return scores.round()
    if kind == "equal":
        return torch.full(shape, -0.25)
    if kind == "mostly zero":
        return torch.where(scores > 1, scores, 0.0)
    if kind == "special":
        odd = torch.tensor([NAN, -NAN, INF, -INF, -0.0, 0.0])
        choice = torch.randint(12, shape, generator=torch.Generator().manual_seed(seed + 1))
        return torch.where(choice < 6, odd[choice % 6], scores)
    return scores


KINDS = ["normal", "ties", "equal", "mostly zero", "special"]


# --- over all tensors ---


def test_hand_worked() -> None:
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
def test_against_the_reference(data: st.DataObject, dtype: torch.dtype) -> None:
    parts = data.draw(st.lists(st.lists(floats, max_size=12), min_size=1, max_size=4))
    scores = [torch.tensor(part, dtype=torch.float64).to(dtype) for part in parts]
    values = [value for score in scores for value in score.tolist()]
    keep = data.draw(st.integers(0, len(values)))
    masks = select_largest(scores, keep)
    assert all(mask.dtype == torch.bool for mask in masks)
    assert flat(masks) == reference(values, keep)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_any_float_and_any_chunk(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(width=32), min_size=1, max_size=200))
    keep = data.draw(st.integers(0, len(values)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "CHUNK", data.draw(st.sampled_from([1, 3, 64])))
        assert flat(select_largest([torch.tensor(values)], keep)) == reference(values, keep)


@pytest.mark.parametrize("kind", KINDS)
def test_large(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "CHUNK", 4096)
    scores = [awkward(kind, (50, 111)), awkward(kind, (7,), 1), awkward(kind, (20_000,), 2)]
    values = torch.cat([score.flatten() for score in scores]).tolist()
    for keep in (1, 255, len(values) // 2, len(values) - 1):
        assert flat(select_largest(scores, keep)) == reference(values, keep)


@pytest.mark.parametrize("miss", [-INF, -0.5, 0.25, INF, NAN])
def test_a_missed_guess_is_found_out(miss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_likely_threshold", lambda *_: np.float32(miss))
    scores = awkward("special", (500,))
    assert flat(select_largest([scores], 200)) == reference(scores.tolist(), 200)


def test_the_guess_is_seldom_missed() -> None:
    scores = awkward("normal", (30_000,)).numpy()
    for keep in (3, 300, 3000, 15_000, 29_990):
        guess = selection._likely_threshold([scores], [scores], keep)
        assert guess == np.sort(scores)[-keep]


def test_mixed_dtypes_compare_in_the_widest() -> None:
    close = 1 + 1e-12  # more than 1 in float64 alone
    scores = [torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([close], dtype=torch.float64)]
    assert flat(select_largest([*scores, torch.tensor([1.0])], 1)) == [False, True, False]


def test_not_contiguous_and_needing_a_gradient() -> None:
    scores = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    view = scores.t()[::2]
    (mask,) = select_largest([view], 9)
    assert mask.shape == view.shape
    assert mask.flatten().tolist() == reference(view.flatten().tolist(), 9)


def test_scores_are_left_alone() -> None:
    scores = awkward("special", (64, 4))
    bits = scores.view(torch.int32).clone()
    select_largest([scores], 100)
    select_largest_per_row(scores, 2)
    assert torch.equal(scores.view(torch.int32), bits)


def test_empty_and_scalar_tensors() -> None:
    assert select_largest([], 0) == []
    masks = select_largest([torch.empty(0, 3), torch.tensor(1.0), torch.tensor([2.0, 3.0]), torch.empty(0)], 2)
    assert [mask.shape for mask in masks] == [(0, 3), (), (2,), (0,)]
    assert flat(masks) == [False, True, True]


@pytest.mark.parametrize("keep", [-1, 5])
def test_count_out_of_range(keep: int) -> None:
    with pytest.raises(PomonaError, match=rf"cannot keep {keep} of 4 entries: ask for 0 to 4"):
        select_largest([torch.ones(4)], keep)
    with pytest.raises(PomonaError, match=rf"cannot keep {keep} of 4 columns: ask for 0 to 4"):
        select_largest_per_row(torch.ones(2, 4), keep)


def test_what_is_not_a_score() -> None:
    with pytest.raises(PomonaError, match=r"torch\.int64"):
        select_largest([torch.arange(4)], 2)
    with pytest.raises(PomonaError, match="3 dimensions"):
        select_largest_per_row(torch.ones(2, 2, 2), 1)
    with pytest.raises(PomonaError, match="cpu and meta"):
        select_largest([torch.ones(2), torch.ones(2, device="meta")], 1)


# --- row by row ---


def test_rows_hand_worked() -> None:
    scores = torch.tensor([[1.0, 4.0, 2.0, 3.0], [0.0, -0.0, 0.0, 0.0], [NAN, 1.0, INF, -NAN]])
    assert select_largest_per_row(scores, 2).int().tolist() == [[0, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 1]]


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(DTYPES), st.integers(1, 20), st.integers(0, 5))
def test_rows_against_the_reference(data: st.DataObject, dtype: torch.dtype, columns: int, rows: int) -> None:
    row = st.lists(floats, min_size=columns, max_size=columns)
    values = data.draw(st.lists(row, min_size=rows, max_size=rows))
    scores = torch.tensor(values, dtype=torch.float64).to(dtype).reshape(rows, columns)
    keep = data.draw(st.integers(0, columns))
    expected = [reference(row, keep) for row in scores.tolist()]
    assert select_largest_per_row(scores, keep).tolist() == expected
    if rows and keep:
        assert selection._keep_by_topk(selection._keys(scores), keep).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [4, 32, 300])
def test_many_rows(kind: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "CHUNK", 1024)
    scores = awkward(kind, (columns, 77)).t()  # not contiguous
    for keep in (1, columns // 2, columns - 1):
        assert select_largest_per_row(scores, keep).tolist() == [reference(row, keep) for row in scores.tolist()]


def test_rows_or_columns_that_are_not_there() -> None:
    assert select_largest_per_row(torch.empty(0, 4), 2).shape == (0, 4)
    assert select_largest_per_row(torch.empty(3, 0), 0).shape == (3, 0)


# --- the Triton kernels, on a device or in Triton's interpreter ---


class TestKernel:
    pytestmark = kernel

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("sizes", [(5, 1), (2048,), (12_000, 0, 900)])
    def test_kernel_over_all(self, kind: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        from pomona.patterns import selection_triton

        monkeypatch.setattr(selection_triton, "PROGRAMS", 2)  # several blocks a program
        scores = [awkward(kind, (size,), seed) for seed, size in enumerate(sizes)]
        total = sum(sizes)
        for keep in (total // 3, total - 1):
            mask = selection_triton.select_largest([score.to(DEVICE) for score in scores], keep)
            assert mask.tolist() == flat(select_largest(scores, keep))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_kernel_on_narrow_floats(self, dtype: torch.dtype) -> None:
        from pomona.patterns import selection_triton

        scores = awkward("special", (3000,)).to(dtype)
        mask = selection_triton.select_largest([scores.to(DEVICE)], 1700)
        assert mask.tolist() == flat(select_largest([scores], 1700))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", [(70, 4), (300, 9), (65, 32), (3, 1000)])
    def test_kernel_per_row(self, kind: str, shape: tuple[int, int]) -> None:
        from pomona.patterns import selection_triton

        scores = awkward(kind, shape)
        for keep in (1, shape[1] // 2):
            mask = selection_triton.select_largest_per_row(scores.to(DEVICE), keep)
            assert torch.equal(mask.cpu(), select_largest_per_row(scores, keep))


@needed
def test_the_kernels_in_the_interpreter() -> None:
    interpret(__file__, "TestKernel")


# --- on CUDA ---


class TestCuda:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_same_masks_as_on_cpu(self, kind: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        for size in (1, 2, 2047, 2048, 2049, 270_001, 3_000_000):
            scores = [awkward(kind, (size,)).to(dtype), awkward(kind, (3, 5)).to(dtype)]
            for keep in (0, 1, int(torch.randint(size, (), generator=generator)), size + 14, size + 15):
                masks = select_largest([score.cuda() for score in scores], keep)
                expected = select_largest(scores, keep)
                assert all(torch.equal(a.cpu(), b) for a, b in zip(masks, expected, strict=True))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(50_000, 4), (1001, 33), (64, 4096), (3, 5000)])
    def test_same_rows_as_on_cpu(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        for kind in KINDS:
            scores = awkward(kind, shape).to(dtype)
            for keep in (0, 1, shape[1] // 2, shape[1]):
                assert torch.equal(
                    select_largest_per_row(scores.cuda(), keep).cpu(), select_largest_per_row(scores, keep)
                )

    def test_plain_torch_gives_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selection, "_triton", lambda: None)
        for kind in KINDS:
            scores = awkward(kind, (10_000,))
            assert torch.equal(select_largest([scores.cuda()], 999)[0].cpu(), select_largest([scores], 999)[0])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_host_never_waits(self, dtype: torch.dtype) -> None:
        scores = [torch.randn(1000, 64, device="cuda").to(dtype), torch.randn(77, device="cuda").to(dtype)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            select_largest(scores, 5000)
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
