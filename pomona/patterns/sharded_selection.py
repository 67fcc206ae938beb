"""Selection among scores whose rows lie on several ranks: no rank sees the scores of another, and all agree.

Ranks share counts (`counting_selection`). Only where a unit, such as a tile of several rows, lies on two ranks, or a
layer is divided along its columns, are the scores of that one layer exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from ..errors import PomonaError
from ..masking import count_pruned, matrix_shape
from ..sharding import dtensor_module, is_sharded, local_part, place_like, sharding_mesh, whole, wrap_part
from .balanced import NM, Balanced, scale_pruned_to_block, select_per_block
from .base import Pattern
from .counting_selection import Ranks, select_by_counting
from .score_reader import rank_scores
from .units import UnitPattern


def select_masks(
    pattern: Pattern,
    scores: Sequence[Tensor],
    sparsity: float,
    floors: Sequence[int] | None = None,
    magnitudes: bool = False,
    within: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return the masks of `pattern.select_ranked`, placed like the scores."""
    floors = floors or [0] * len(scores)
    if not any(map(is_sharded, scores)):
        return pattern.select_ranked(scores, sparsity, floors, magnitudes, within)
    scores = rank_scores(scores, magnitudes, within)
    mesh = sharding_mesh(scores)
    if any(score.device_mesh != mesh for score in scores):  # type: ignore[attr-defined]
        raise PomonaError("the layers lie on several device meshes, whose ranks share no counts: use one mesh for all.")
    rows = RowShards.of(scores)
    by_rows = [rows.place(score) for score in scores]
    masks = rows.select(pattern, by_rows, sparsity, floors)
    return [place_like(mask, score) for mask, score in zip(masks, scores, strict=True)]


@dataclass(frozen=True)
class RowShards:
    """The ranks along which the rows of all scores are divided."""

    mesh: Any
    dim: int  # of the mesh

    @classmethod
    def of(cls, scores: Sequence[Any]) -> RowShards:
        """Return the ranks of the first dimension of the mesh along which any of the scores is divided."""
        mesh = sharding_mesh(scores)
        divided = [any(not s.placements[dim].is_replicate() for s in scores) for dim in range(mesh.ndim)]
        return cls(mesh, divided.index(True) if True in divided else 0)

    @property
    def group(self) -> Any:
        """The process group."""
        return self.mesh.get_group(self.dim)

    @property
    def rank(self) -> int:
        """The place of this process among the ranks."""
        return self.mesh.get_local_rank(self.dim)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.size(self.dim)

    @property
    def counts(self) -> Ranks:
        """How counts are added over the ranks."""
        return Ranks(self.sum_all, self.sum_lower)

    def sum_all(self, count: Tensor) -> Tensor:
        """Return the sum of a count over all ranks."""
        distributed.all_reduce(count, group=self.group)
        return count

    def sum_lower(self, count: Tensor) -> Tensor:
        """Return the sum of a count over the ranks before this one."""
        every = [torch.empty_like(count) for _ in range(self.size)]
        distributed.all_gather(every, count, group=self.group)
        return torch.stack(every)[: self.rank].sum(0)

    def place(self, score: Any) -> Any:
        """Return a score whose rows, and nothing else, are divided among the ranks."""
        module = dtensor_module()
        placements = [module.Shard(0) if dim == self.dim else module.Replicate() for dim in range(self.mesh.ndim)]
        return score if list(score.placements) == placements else score.redistribute(self.mesh, placements)

    def divide(self, flat: Tensor) -> Tensor:
        """Return the part of a flat tensor, which all ranks have, that falls to this rank."""
        size = -(-len(flat) // self.size)
        return flat[self.rank * size : (self.rank + 1) * size]

    def join(self, part: Tensor, count: int) -> Tensor:
        """Return the flat tensor of `count` entries whose parts `divide` gives."""
        size = -(-count // self.size)
        padded = torch.zeros(size, dtype=torch.uint8, device=part.device)
        padded[: len(part)] = part
        every = [torch.empty_like(padded) for _ in range(self.size)]
        distributed.all_gather(every, padded, group=self.group)
        return torch.cat(every)[:count].bool()

    def cuts(self, rows: int, height: int) -> bool:
        """Return whether a unit of so many rows lies on two ranks."""
        return self.size > 1 and -(-rows // self.size) % height != 0

    def select(self, pattern: Pattern, scores: Sequence[Any], sparsity: float, floors: Sequence[int]) -> list[Tensor]:
        """Return the masks of scores whose rows are divided among the ranks."""
        if pattern.is_elementwise:
            count = sum(score.numel() for score in scores)
            return self.select_largest(scores, count - count_pruned(sparsity, count), floors)
        if isinstance(pattern, UnitPattern):
            return self.select_units(pattern, scores, sparsity, floors)
        if any(floors):
            alone = [self.select(pattern, [s], 1 - n / s.numel(), [0])[0] for s, n in zip(scores, floors, strict=True)]
            raised = zip(scores, alone, floors, strict=True)
            scores = [s.masked_fill(m & (s > -torch.inf), torch.inf) if n else s for s, m, n in raised]
        if isinstance(pattern, (Balanced, NM)) and all(score.ndim > 1 for score in scores):
            return self.select_blocks(pattern, scores, sparsity)
        if len(scores) == 1:
            return [place_like(pattern.select_masks([whole(scores[0])], sparsity)[0], scores[0])]
        raise PomonaError(
            f"{pattern} ranks the weights of all layers together in a way that is not known here, which would gather "
            "them all: use allocation='uniform'."
        )

    def select_largest(self, scores: Sequence[Any], keep: int, floors: Sequence[int]) -> list[Tensor]:
        """Return the masks of the `keep` largest scores over all layers."""
        parts = one_dtype([local_part(score).contiguous() for score in scores])
        masks = select_by_counting(parts, keep, floors, ranks=self.counts)
        return [wrap_part(mask, score) for mask, score in zip(masks, scores, strict=True)]

    def select_blocks(self, pattern: Balanced | NM, scores: Sequence[Any], sparsity: float) -> list[Tensor]:
        """Return the masks of a pattern that has the same count in every block of a row."""
        if isinstance(pattern, NM):
            width = pattern.m
            pruned = Balanced(block=width).pruned_per_block(min(sparsity, pattern.sparsity), width)
            blocks = [(width, width - pruned)] * len(scores)
        else:
            widths = [pattern.block_width(matrix_shape(score.shape)[1]) for score in scores]
            if len(scores) == 1:
                blocks = [(widths[0], widths[0] - pattern.pruned_per_block(sparsity, widths[0]))]
            else:
                count = sum(score.numel() for score in scores)
                common = self.select_largest(scores, count - count_pruned(sparsity, count), [0] * len(scores))
                kept = self.sum_all(torch.stack([local_part(mask).count_nonzero() for mask in common]))
                pairs = zip(scores, kept, widths, strict=True)
                blocks = [(w, w - int(scale_pruned_to_block(s.numel() - k, s.numel(), w))) for s, k, w in pairs]
        masks = []
        for score, (width, keep) in zip(scores, blocks, strict=True):
            part = local_part(score)
            empty = torch.empty_like(part, dtype=torch.bool)
            masks.append(wrap_part(select_per_block(part, width, keep) if part.numel() else empty, score))
        return masks

    # ---- units

    def select_units(
        self, pattern: UnitPattern, scores: Sequence[Any], sparsity: float, floors: Sequence[int]
    ) -> list[Tensor]:
        """Return the masks of the units of the largest norms."""
        layers = [self.unit_layer(pattern, score) for score in scores]
        norms = one_dtype([layer.norms for layer in layers])
        sizes = [pattern.unit_weight(score.shape) for score in scores]
        weights = sum(
            score.numel() // pattern.unit_size(score.shape) * n for score, n in zip(scores, sizes, strict=True)
        )
        goal = weights - count_pruned(sparsity, weights)
        unit_floors = [n // pattern.unit_size(score.shape) for n, score in zip(floors, scores, strict=True)]
        if len(set(sizes)) == 1:
            count = weights // sizes[0]
            keep = count - round(count_pruned(sparsity, weights) / sizes[0])
            kept = select_by_counting(norms, keep, unit_floors, ranks=self.counts)
        else:
            kept = self.select_nearest(norms, sizes, goal, unit_floors)
        return [wrap_part(layer.expand(mask), s) for layer, mask, s in zip(layers, kept, scores, strict=True)]

    def select_nearest(
        self, norms: Sequence[Tensor], sizes: Sequence[int], goal: int, floors: Sequence[int]
    ) -> list[Tensor]:
        """Return the masks of the first units of the ranking, as many as bring the kept weights nearest to a goal."""
        if any(floors):
            first = select_by_counting(norms, list(floors), ranks=self.counts)
            pairs = zip(norms, first, strict=True)
            norms = [norm.masked_fill(mask & (norm > -torch.inf), torch.inf) for norm, mask in pairs]
        device = norms[0].device
        weight = torch.tensor(list(sizes), device=device)

        def select(count: int) -> tuple[list[Tensor], int]:
            """Return the masks of the first `count` units, and how many weights they have."""
            masks = select_by_counting(norms, count, ranks=self.counts)
            return masks, int((self.sum_all(torch.stack([m.count_nonzero() for m in masks])) * weight).sum())

        low, high = 0, int(self.sum_all(torch.tensor(sum(norm.numel() for norm in norms), device=device)))
        while low < high:  # for the smallest number of units with at least the wanted weights
            middle = (low + high) // 2
            low, high = (low, middle) if select(middle)[1] >= goal else (middle + 1, high)
        masks, kept = select(low)
        if low:
            fewer, less = select(low - 1)
            if abs(less - goal) <= abs(kept - goal):
                return fewer
        return masks

    def unit_layer(self, pattern: UnitPattern, score: Any) -> UnitLayer:
        """Return the norms of the units of a layer that this rank ranks, and how their mask becomes the weights'."""
        part, shape = local_part(score), score.shape
        height = pattern.unit_height(shape)
        if score.ndim > 1 and not self.cuts(shape[0], height):
            view, inner = pattern.split_into_units(part.shape) if part.numel() else ((0,), (0,))
            if not part.numel():
                return UnitLayer(part.new_empty(0), lambda kept: torch.empty_like(part, dtype=torch.bool))
            norms = pattern.unit_norms(part.reshape(view), inner)
            return UnitLayer(
                norms.reshape(-1),
                lambda kept: kept.view(norms.shape).expand(view).reshape(part.shape).contiguous(),
            )
        view, inner = pattern.split_into_units(shape)
        norms = pattern.unit_norms(whole(score).reshape(view), inner)

        def expand(kept: Tensor) -> Tensor:
            every = self.join(kept, norms.numel()).view(norms.shape).expand(view).reshape(shape).contiguous()
            return local_part(place_like(every, score)).contiguous()

        return UnitLayer(self.divide(norms.reshape(-1)), expand)


@dataclass(frozen=True)
class UnitLayer:
    """Units of a layer: the norms of those that a rank ranks, and the mask of its weights from that of its units."""

    norms: Tensor
    expand: Callable[[Tensor], Tensor]


def one_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in a dtype that holds the values of all."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return [t.to(wide) for t in tensors]
