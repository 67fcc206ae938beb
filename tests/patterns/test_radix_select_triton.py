"""The Triton selection kernels against the CPU selection, on a device or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from score_cases import SCORE_KINDS, make_scores
from triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_interpreter, run_in_interpreter

from pomona.patterns.selection import select_largest, select_largest_per_row

kernel = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(
        not HAS_TRITON or (DEVICE == "cpu" and not INTERPRETED),
        reason="needs Triton, and a CUDA device or its interpreter",
    ),
]


def select_per_segment(scores: torch.Tensor, sizes: list[int], keep: list[int]) -> torch.Tensor:
    """Return the flat mask of the largest scores of each segment, selected one by one on the CPU."""
    return torch.cat([select_largest([s], k)[0] for s, k in zip(scores.split(sizes), keep, strict=True)])


class TestKernel:
    pytestmark = kernel

    @pytest.mark.parametrize("kind", SCORE_KINDS)
    @pytest.mark.parametrize("sizes", [(5, 1), (2048,), (12_000, 0, 900)])
    def test_select_largest(self, kind: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        from pomona.patterns import radix_select_triton

        monkeypatch.setattr(radix_select_triton, "MAX_PROGRAMS", 2)  # several blocks a program
        scores = [make_scores(kind, (size,), seed) for seed, size in enumerate(sizes)]
        total = sum(sizes)
        for keep in (total // 3, total - 1):
            mask = radix_select_triton.select_largest([score.to(DEVICE) for score in scores], keep)
            expected = torch.cat([mask.flatten() for mask in select_largest(scores, keep)])
            assert mask.tolist() == expected.tolist()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_select_largest_of_narrow_floats(self, dtype: torch.dtype) -> None:
        from pomona.patterns import radix_select_triton

        scores = make_scores("special", (3000,)).to(dtype)
        mask = radix_select_triton.select_largest([scores.to(DEVICE)], 1700)
        assert torch.equal(mask.cpu(), select_largest([scores], 1700)[0])

    @pytest.mark.parametrize("kind", SCORE_KINDS)
    @pytest.mark.parametrize("shape", [(70, 4), (300, 9), (65, 32), (3, 1000)])
    def test_select_largest_per_row(self, kind: str, shape: tuple[int, int]) -> None:
        from pomona.patterns import radix_select_triton

        scores = make_scores(kind, shape)
        for keep in (1, shape[1] // 2):
            mask = radix_select_triton.select_largest_per_row(scores.to(DEVICE), keep)
            assert torch.equal(mask.cpu(), select_largest_per_row(scores, keep))

    @pytest.mark.parametrize("kind", SCORE_KINDS)
    @pytest.mark.parametrize("sizes", [[5, 1, 7], [2048, 4096, 3], [9000, 17, 2049]])
    def test_segments_with_several_blocks_a_program(
        self, kind: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from pomona.patterns import radix_select_triton

        monkeypatch.setattr(radix_select_triton, "MAX_PROGRAMS", 3)
        device = torch.device(DEVICE)
        top_k = radix_select_triton.SegmentedTopK(sizes, device)
        scores, mask = make_scores(kind, (sum(sizes),)), torch.empty(sum(sizes), dtype=torch.bool, device=device)
        for time, share in enumerate((0.0, 0.3, 0.3, 0.999, 1.0, 0.5)):  # at 0.3 and 0.5 a prediction may hold
            scores = scores * 1.001 if time % 2 else scores.flip(0)
            keep = [round(share * size) for size in sizes]
            top_k.set_counts(keep)
            top_k.select(scores.to(device), mask)
            assert torch.equal(mask.cpu(), select_per_segment(scores, sizes, keep)), f"at time {time}"
        mask = radix_select_triton.select_largest_per_segment(scores.to(device), sizes, keep)
        assert torch.equal(mask.cpu(), select_per_segment(scores, sizes, keep)), "in one call"


@needs_interpreter
def test_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "TestKernel")


class TestSegmentsOnCuda:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("sizes", [[1], [5, 1, 7], [2048, 4096, 3], [100_000, 17, 3_000_000, 2049]])
    @pytest.mark.parametrize("ties", [False, True])
    def test_segments_are_selected_exactly(self, sizes: list[int], ties: bool) -> None:
        from pomona.patterns.radix_select_triton import SegmentedTopK

        generator = torch.Generator().manual_seed(1)
        scores = torch.randn(sum(sizes), generator=generator)
        scores = scores.round() if ties else scores
        top_k = SegmentedTopK(sizes, torch.device("cuda"))
        mask = torch.empty(sum(sizes), dtype=torch.bool, device="cuda")
        for share in (0.0, 0.3, 0.5, 0.999, 1.0):
            keep = [round(share * size) for size in sizes]
            top_k.set_counts(keep)
            top_k.select(scores.cuda(), mask)
            assert torch.equal(mask.cpu(), select_per_segment(scores, sizes, keep))

    @pytest.mark.parametrize("ties", [False, True])
    def test_selection_is_exact_while_scores_drift_and_jump(self, ties: bool) -> None:
        """The predicted prefix of the threshold holds for some segments and not for others."""
        from pomona.patterns.radix_select_triton import SegmentedTopK

        sizes, generator = [100_000, 17, 300_000, 2049], torch.Generator().manual_seed(2)
        top_k = SegmentedTopK(sizes, torch.device("cuda"))
        mask = torch.empty(sum(sizes), dtype=torch.bool, device="cuda")
        scores = torch.randn(sum(sizes), generator=generator)
        for time in range(30):
            now = (scores * 64).round() / 64 if ties else scores
            keep = [round((0.4 + 0.001 * max(time - 20, 0)) * size) for size in sizes]
            top_k.set_counts(keep)
            top_k.select(now.cuda(), mask)
            assert torch.equal(mask.cpu(), select_per_segment(now, sizes, keep)), f"at time {time}"
            drift = 0.002 * torch.randn(sum(sizes), generator=generator)
            scores = scores + drift if time % 9 else -1.7 * scores
