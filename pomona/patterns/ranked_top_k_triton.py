"""`SegmentedTopK` over the ranks of a distributed training, which exchange counts and never wait for their device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .counting_selection import Ranks
from .radix_select_triton import DIGITS, RADIX, SegmentedTopK


class RankedTopK:
    """Repeated selection of the highest scores of segments, of each of which this rank has a part.

    The parts lie in the order of the ranks, and of equal scores the earlier is kept, as in `select_by_counting`.

    Args:
        sizes: The lengths of this rank's parts, which lie one after another in the flat scores.
        device: The device of the scores and masks.
        ranks: How counts are added over the ranks; all together there are less than 2³¹ scores.
        together: Whether one number of scores is kept of all segments, or a number of each.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, ranks: Ranks, together: bool) -> None:
        self.own = SegmentedTopK(sizes, device)
        self.ranks, self.together, self.segments = ranks, together, len(sizes)

    def set_counts(self, keep: Sequence[int]) -> None:
        """Set how many scores are kept over all ranks: of all segments, or of each."""
        self.own.set_counts(list(keep) * self.segments if self.together else keep)

    def select(self, scores: Tensor, mask: Tensor) -> None:
        """Write the mask of this rank's flat scores into `mask`."""
        self.own.states.zero_()
        for digit in range(DIGITS):
            self.own.count(scores, digit)
            counts = self.own.states[:, digit, :RADIX]
            own_counts = counts.clone()  # at last, those of the ties among them
            counts.copy_(self.ranks.sum_all(own_counts.sum(0, dtype=torch.int32) if self.together else counts.clone()))
        self.own.mark(scores, mask, self._tie_quotas(own_counts))

    def _tie_quotas(self, own_counts: Tensor) -> Tensor:
        """Return how many scores that equal the threshold are kept in this rank's part of each segment.

        `own_counts` are this rank's counts of the last digit.
        """
        state = self.own.states[:, DIGITS - 1]
        counts, remaining = state[:, :RADIX], state[:, RADIX + 1, None]
        above = counts.flip(1).cumsum(1).flip(1) - counts
        found = (above < remaining) & (remaining <= above + counts)
        wanted = (found * (remaining - above)).sum(1)
        ties = (found * own_counts).sum(1)
        before = self.ranks.sum_lower(ties.clone())
        if self.together:
            totals = self.ranks.sum_all(ties.clone())
            before = before + totals.cumsum(0) - totals
        return (wanted - before).clamp(min=0).int()
