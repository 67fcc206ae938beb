"""Sparse momentum."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..core.method import Masks, Method, Targets, Time, check_every, method
from ..core.targets import DENSE
from ..errors import PomonaError, require
from ..schedules import Constant, Schedule
from ..scores import random_scores
from . import _drop_grow as evolve


@method("sparse_momentum", paper="Dettmers & Zettlemoyer, 2019", weights="hard")
@dataclass(frozen=True, kw_only=True)
class SparseMomentum(Method):
    """Each epoch every layer drops its smallest weights, and layers with more momentum grow more of them back.

    Momentum covers the pruned weights too, and says where to grow. The authors' counts may miss the target
    and are adjusted later; here the total is exact at every update.
    """

    dense: ClassVar[frozenset[str]] = DENSE - {"classifier"}
    remembers: ClassVar[bool] = True

    rate: float = 0.5  # the part of a layer that is dropped at first; it falls to `floor` along a cosine
    floor: float = 0.005
    every: int | None = None  # steps between updates; None is an epoch
    seed: int = 0
    allocation: str = "uniform"
    schedule: Schedule = field(default=Constant(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.floor <= self.rate < 1, f"0 ≤ floor ≤ rate < 1 is needed, got {self.floor} and {self.rate}.")
        require(
            self.pattern.sparsity is None,
            f"{self.pattern} fixes every layer's sparsity, and sparse_momentum moves weights between layers.",
        )
        evolve.refuse_filters(self.pattern, self.name)
        check_every(self.every)

    def due(self, time: Time) -> bool:
        return 0 < time.step < time.total and time.each(self.every)

    def start(self, targets: Targets, sparsity: float) -> Masks:
        masks = self.select(random_scores(targets.latent, self.seed), sparsity)
        targets.memory["kept"] = sum(int(m.sum()) for m in masks.values())
        return masks

    def update(self, targets: Targets, sparsity: float) -> Masks:
        momentum = {name: m.abs() for name, m in targets.momentum.items()}
        for name in targets.latent:
            if name not in momentum:
                raise PomonaError(f"{name} has no momentum: use SGD(momentum=0.9) or Adam, or exclude=['{name}'].")
        means = {n: float(momentum[n][m].mean()) if bool(m.any()) else 0.0 for n, m in targets.masks.items()}
        total = sum(means.values()) or 1.0
        shares = {name: mean / total for name, mean in means.items()}
        quanta = evolve.quanta(self.pattern, targets.masks)
        kept = {
            name: evolve.drop(self.pattern, targets.latent[name].abs(), mask, self.dropped(mask, shares[name], targets))
            for name, mask in targets.masks.items()
        }
        active = {name: int(mask.sum()) for name, mask in kept.items()}
        room = {name: mask.numel() - active[name] for name, mask in kept.items()}
        # A layer grows into 99 % of its free entries at most, where the others can take the rest.
        cap = {name: evolve.part(0.99, free) for name, free in room.items()}
        missing = targets.memory["kept"] - sum(active.values())
        room = cap if sum(cap.values()) >= missing else room
        growth = evolve.share_out(missing, shares, room, quanta, active, evenly=True)
        return {n: evolve.grow(self.pattern, momentum[n], mask, active[n] + growth[n]) for n, mask in kept.items()}

    def dropped(self, mask: Tensor, share: float, targets: Targets) -> int:
        """⌈p · active⌉, where a nearly dense layer that still grows drops no more than its zeros."""
        time = targets.time
        rate = self.floor + (self.rate - self.floor) * (1 + math.cos(math.pi * time.step / time.total)) / 2
        active = int(mask.sum())
        sparsity = 1 - active / mask.numel()
        if sparsity < 0.2 and share > 1 / len(targets.masks):
            rate = min(sparsity, rate)
        return math.ceil(rate * active - 1e-9)
