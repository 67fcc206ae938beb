"""Units of all layers in one buffer, such as filters, so that kernels select among them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...allocation import floor_counts, layer_sparsities, parse_allocation
from ...masking import count_pruned
from ...patterns import Pattern, UnitPattern
from ...patterns.counting_selection import Ranks
from ..slot import outputs_first

if TYPE_CHECKING:
    from ..slot import Slot


class UnitSelection:
    """The units of some slots, one entry for each: their scores, and the mask of those that are kept.

    A single weight is a unit where the pattern is elementwise; the mask is then that of the weights.
    """

    def __init__(self, pattern: Pattern, slots: Sequence[Slot], weight_mask: Tensor) -> None:
        self.pattern, self.slots = pattern, slots
        shapes = [slot.target.outputs_first for slot in slots]
        self.unit_sizes = [pattern.unit_size(shape) for shape in shapes]
        self.counts = [shape.numel() // size for shape, size in zip(shapes, self.unit_sizes, strict=True)]
        self.weight = pattern.unit_weight(shapes[0])  # of every unit, in what the sparsity is a fraction of
        whole = not pattern.is_elementwise
        self.mask = torch.empty(sum(self.counts), dtype=torch.bool, device=weight_mask.device) if whole else weight_mask

    @staticmethod
    def can_select(pattern: Pattern, slots: Sequence[Slot]) -> bool:
        """Return whether one threshold selects units: they are ranked by a norm, all count the same, and are whole."""
        weights = {pattern.unit_weight(slot.target.outputs_first) for slot in slots}
        if pattern.is_elementwise:
            return True
        return isinstance(pattern, UnitPattern) and len(weights) == 1 and not any(slot.is_sharded for slot in slots)

    def kept_count(self, sparsity: float, count: int) -> int:
        """Return how many of `count` units are kept, as `select_units` counts them."""
        return count - round(count_pruned(sparsity, count * self.weight) / self.weight)

    def kept_counts(self, allocation: str, sparsity: float) -> tuple[list[int], list[int]]:
        """Return how many units are kept of all slots together or of each, and with a floor how many at least."""
        name, floor = parse_allocation(allocation)
        shapes = [slot.target.outputs_first for slot in self.slots]
        if name != "global":
            shares = layer_sparsities(name, shapes, sparsity, self.pattern)
            return [self.kept_count(share, n) for share, n in zip(shares, self.counts, strict=True)], []
        kept = [self.kept_count(sparsity, sum(self.counts))]
        if floor == 0 or len(shapes) == 1:
            return kept, []
        floors = floor_counts(shapes, sparsity, self.pattern, floor)
        return kept, [count // size for count, size in zip(floors, self.unit_sizes, strict=True)]

    def make_top_k(self, kernels: Any, together: bool, ranks: Ranks | None) -> Any:
        """Return the kernels' selection of the highest scores, of all slots together or of each."""
        if ranks is not None:
            return kernels.RankedTopK([slot.mask.numel() for slot in self.slots], self.mask.device, ranks, together)
        return kernels.SegmentedTopK([sum(self.counts)] if together else self.counts, self.mask.device)

    def norms(self, scores: Sequence[Tensor]) -> Tensor:
        """Return the norms of all units, from the scores of the slots' weights."""
        assert isinstance(self.pattern, UnitPattern)
        norms = []
        for slot, score in zip(self.slots, scores, strict=True):
            view, inner = self.pattern.split_into_units(slot.target.outputs_first)
            by_output = outputs_first(score, slot.target.output_dim)
            norms.append(self.pattern.unit_norms(by_output.reshape(view), inner).flatten())
        return torch.cat(norms)

    def write_masks(self) -> None:
        """Write the mask of the units into the masks of the slots."""
        assert isinstance(self.pattern, UnitPattern)
        for slot, kept in zip(self.slots, self.mask.split(self.counts), strict=True):
            shape = slot.target.outputs_first
            view, inner = self.pattern.split_into_units(shape)
            one_each = [1 if dim in inner else size for dim, size in enumerate(view)]
            outputs_first(slot.mask, slot.target.output_dim).copy_(kept.view(one_each).expand(view).reshape(shape))
