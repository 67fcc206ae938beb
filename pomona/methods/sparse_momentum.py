"""Sparse momentum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..allocation import least_count
from ..core.method import Masks, Targets, TrainingProgress, method, validate_every
from ..core.targets import DENSE
from ..errors import PomonaError, require
from ._bounded_growth import BoundedGrowth
from ._drop_grow import DropGrow, divide_growth, drop_lowest, floor_share, grow_highest, unit_sizes

MAX_GROWTH = 0.99  # of a layer's free entries, as in the authors' code
NEARLY_DENSE = 0.2  # the sparsity below which a growing layer drops no more than its zeros, as in the authors' code


@method("sparse_momentum", paper="Dettmers & Zettlemoyer, 2019", weights="hard")
@dataclass(frozen=True, kw_only=True)
class SparseMomentum(DropGrow, BoundedGrowth):
    """Each epoch every layer drops its smallest weights, and layers with more momentum grow more of them back.

    Momentum covers the pruned weights too, and ranks where to grow. The authors' counts may miss the target
    and are adjusted later; here the total is exact at every update. The bound on the gradients of outputs that have
    almost no weights is not in the paper either; `feedback=None` leaves it out.
    """

    left_dense: ClassVar[frozenset[str]] = DENSE - {"classifier"}
    keeps_pruned_momentum: ClassVar[bool] = True
    memory_keys: ClassVar[tuple[str, ...]] = ("kept",)

    rate: float = 0.5  # the part of a layer that is dropped at first; it falls to `floor` along a cosine
    floor: float = 0.005  # the part of a layer that is still dropped at the end
    every: int | None = None  # steps between updates; None is an epoch
    allocation: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.floor <= self.rate < 1, f"0 ≤ floor ≤ rate < 1 is needed, got {self.floor} and {self.rate}.")
        self.require_free_layers()
        validate_every(self.every)

    def is_update_due(self, progress: TrainingProgress) -> bool:
        return 0 < progress.step < progress.total and progress.is_multiple_of(self.every)

    def initial_masks(self, targets: Targets, sparsity: float) -> Masks:
        masks = super().initial_masks(targets, sparsity)
        targets.memory["kept"] = sum(int(m.count_nonzero()) for m in masks.values())
        return masks

    def update(self, targets: Targets, sparsity: float) -> Masks:
        momentum = {name: m.abs() for name, m in targets.momentum.items()}
        for name in targets.latent:
            if name not in momentum:
                raise PomonaError(f"{name} has no momentum: use SGD(momentum=0.9) or Adam, or exclude=['{name}'].")
        means = {n: float(momentum[n][m].mean()) if bool(m.any()) else 0.0 for n, m in targets.masks.items()}
        total = sum(means.values()) or 1.0
        shares = {name: mean / total for name, mean in means.items()}
        sizes = unit_sizes(self.pattern, targets.masks)
        kept = {
            name: drop_lowest(
                self.pattern, targets.latent[name].abs(), mask, self.count_drops(mask, shares[name], targets)
            )
            for name, mask in targets.masks.items()
        }
        active = {name: int(mask.count_nonzero()) for name, mask in kept.items()}
        room = {name: mask.numel() - active[name] for name, mask in kept.items()}
        # Unless the others cannot take the rest, no layer grows into more than MAX_GROWTH of its free entries.
        cap = {name: floor_share(MAX_GROWTH, free) for name, free in room.items()}
        missing = targets.memory["kept"] - sum(active.values())
        room = cap if sum(cap.values()) >= missing else room
        growth = divide_growth(missing, shares, room, sizes, active, evenly=True)
        return {n: grow_highest(self.pattern, momentum[n], mask, active[n] + growth[n]) for n, mask in kept.items()}

    def count_drops(self, mask: Tensor, share: float, targets: Targets) -> int:
        """Return ⌈p · active⌉, so that one unit stays; a nearly dense layer that grows drops no more than its zeros."""
        progress = targets.progress
        rate = self.floor + (self.rate - self.floor) * (1 + math.cos(math.pi * progress.step / progress.total)) / 2
        active = int(mask.count_nonzero())
        sparsity = 1 - active / mask.numel()
        if sparsity < NEARLY_DENSE and share > 1 / len(targets.masks):
            rate = min(sparsity, rate)
        return max(min(math.ceil(rate * active - 1e-9), active - least_count(mask.shape, self.pattern)), 0)
