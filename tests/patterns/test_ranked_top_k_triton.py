"""The Triton kernels that select over ranks against the selection of one process, on a device or in the interpreter.

The ranks are threads, of which one runs at a time.
"""

from __future__ import annotations

import threading

import pytest
import torch
from score_cases import SCORE_KINDS, make_scores
from torch import Tensor
from triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_interpreter, run_in_interpreter

from pomona.patterns.counting_selection import Ranks
from pomona.patterns.selection import select_largest

kernel = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(
        not HAS_TRITON or (DEVICE == "cpu" and not INTERPRETED),
        reason="needs Triton, and a CUDA device or its interpreter",
    ),
]


class TurnTakingRanks:
    """Ranks that are threads; a rank runs until it waits for the counts of the others."""

    def __init__(self, count: int) -> None:
        self.barrier, self.running = threading.Barrier(count), threading.Lock()
        self.places: list[Tensor] = [torch.empty(0)] * count

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        """Return the values of all ranks."""
        self.places[rank] = value
        self.running.release()
        self.barrier.wait(60)
        values = list(self.places)
        self.barrier.wait(60)
        self.running.acquire()
        return values

    def of(self, rank: int) -> Ranks:
        """Return how this rank adds counts."""
        return Ranks(
            sum_all=lambda count: torch.stack(self.exchange(rank, count)).sum(0).to(count.dtype),
            sum_lower=lambda count: torch.stack(self.exchange(rank, count))[:rank].sum(0).to(count.dtype),
        )


def select_over_ranks(parts: list[list[Tensor]], keep: list[int], together: bool) -> list[Tensor]:
    """Return the flat mask of each rank's parts."""
    from pomona.patterns.ranked_top_k_triton import RankedTopK

    ranks, masks = TurnTakingRanks(len(parts)), [torch.empty(0)] * len(parts)

    def run(rank: int) -> None:
        with ranks.running:
            scores = torch.cat(parts[rank]).to(DEVICE)
            sizes = [len(part) for part in parts[rank]]
            top_k = RankedTopK(sizes, scores.device, ranks.of(rank), together)
            mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
            for share in (0.5, 1):  # the state of the first selection is not that of the second
                top_k.set_counts([int(share * k) for k in keep])
                top_k.select(scores, mask)
            masks[rank] = mask.cpu()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return masks


class TestKernel:
    pytestmark = kernel

    @pytest.mark.parametrize("kind", SCORE_KINDS)
    @pytest.mark.parametrize("world", [1, 2, 3])
    @pytest.mark.parametrize("together", [True, False])
    def test_masks_are_those_of_one_process(self, kind: str, world: int, together: bool) -> None:
        sizes = [7, 5000, 2048, 300]
        scores = [make_scores(kind, (size,), seed) for seed, size in enumerate(sizes)]
        if together:
            keep = [sum(sizes) // 3]
            expected = select_largest(scores, keep[0])
        else:
            keep = [0, 4999, 100, 300]
            expected = [select_largest([score], k)[0] for score, k in zip(scores, keep, strict=True)]
        cut = [score.tensor_split(world) for score in scores]
        masks = select_over_ranks([[part[rank] for part in cut] for rank in range(world)], keep, together)
        by_rank = [mask.split([len(part[rank]) for part in cut]) for rank, mask in enumerate(masks)]
        for number, mask in enumerate(expected):
            assert torch.equal(torch.cat([parts[number] for parts in by_rank]), mask)


@needs_interpreter
def test_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "TestKernel")
