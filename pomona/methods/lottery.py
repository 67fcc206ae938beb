"""The lottery ticket: train, prune, rewind the weights, train again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.attachment import find_targets
from ..core.method import Masks, Method, Targets, TrainingProgress, method
from ..core.pruner import Pruner
from ..core.targets import Target, unwrap
from ..errors import PomonaError, require
from ..registry import spec_to_dict
from ..schedules import Constant, Schedule
from ..sharding import refuse_sharded
from ._mask_holder import MaskHolder
from ._round_store import RoundStore
from .finetune import Finetune

TrainRound = Callable[[nn.Module, Pruner, int], Any]


@method("lottery", paper="Frankle & Carbin, ICLR 2019", weights="hard")
@dataclass(frozen=True, kw_only=True)
class Lottery(Method):
    """Iterative magnitude pruning with rewinding, in rounds of a full training each.

    A round trains to the end, prunes ⌈rate · remaining⌉ of the weights and sets the rest back to their values
    after `rewind` steps of the first round. `retrainings` sets the rate so that this many rounds suffice.
    """

    rate: float = 0.2  # the part of the remaining weights that each round prunes
    retrainings: int | None = None  # rounds after the first training, which then set the rate
    rewind: int = 0  # the step of the first training to whose weights every round goes back
    schedule: Schedule = field(default=Constant(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.rate < 1, f"rate is the part pruned each round, in (0, 1), got {self.rate}.")
        require(
            self.retrainings is None or self.retrainings >= 1,
            f"retrainings counts rounds after the first training and must be ≥ 1, got {self.retrainings}.",
        )
        require(self.rewind >= 0, f"rewind is a step of the first training and must be ≥ 0, got {self.rewind}.")

    def round_sparsities(self, count: int) -> list[float]:
        """Return the sparsity of each training in turn, for `count` weights; the first is dense."""
        goal = round(self.final_sparsity * count)
        rate = self.rate if self.retrainings is None else 1 - (1 - self.final_sparsity) ** (1 / self.retrainings)
        pruned = [0]
        while pruned[-1] < goal:
            pruned.append(min(goal, pruned[-1] + math.ceil(rate * (count - pruned[-1]) - 1e-9)))
        return [n / count for n in pruned]

    def is_update_due(self, progress: TrainingProgress) -> bool:
        """Raise PomonaError: a lottery is trained in rounds and is not attached."""
        raise PomonaError("lottery trains several times: call pm.Lottery(…).rounds(model, train) instead of attach.")

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.restrict(targets, self.select_magnitudes(targets, sparsity))


class LotteryRounds(Pruner):
    """The object that `pm.Lottery(…)` returns: it trains in `rounds`."""

    method: Lottery

    def rounds(self, model: nn.Module, train: TrainRound, folder: str | Path | None = None) -> list[dict[str, Any]]:
        """Find a ticket and return the result of each round; the model holds the trained ticket at the end.

        `train(model, pruner, round)` must attach the pruner to the model and a new optimizer, train to the
        end and finish it. Each entry of the returned list holds what it returned and the sparsity of the round.
        With a `folder` finished rounds are stored there, and a second call continues after them.
        """
        refuse_sharded(model, "pm.Lottery")
        targets = find_targets(model, self.method)
        sparsities = self.method.round_sparsities(sum(target.shape.numel() for target in targets))
        hold = Finetune(include=tuple(target.name for target in targets), pattern=self.method.pattern)
        layers = {target.name: list(target.shape) for target in targets}
        settings = {"options": spec_to_dict(self.method), "layers": layers}
        store = RoundStore(None if folder is None else Path(folder), settings)
        inner = unwrap(model)
        masks = {target.name: torch.ones(target.outputs_first, dtype=torch.bool) for target in targets}
        results = store.read_results()
        if results:
            inner.load_state_dict(store.read_tensors("model"))
            masks = {name: mask.bool() for name, mask in store.read_tensors("masks").items()}
        for index in range(len(results), len(sparsities)):
            if index:
                masks = self.prune(targets, masks, sparsities[index])
                inner.load_state_dict(store.read_tensors("rewind"))
            pruner = MaskHolder(hold, masks, None if index else self.method.rewind)
            result = train(model, pruner, index)
            require(pruner.finished, "train(model, pruner, round) must attach the pruner, train, and finish() it.")
            if index == 0:
                store.write_tensors("rewind", pruner.snapshot)
            # The masks come first: pruning by them again gives the same masks, should the process die in between.
            store.write_tensors("masks", {name: mask.to(torch.uint8) for name, mask in masks.items()})
            store.write_tensors("model", inner.state_dict())
            results.append({"round": index, "sparsity": sparsities[index], "result": result})
            store.write_results(results)
        return results

    @torch.no_grad()
    def prune(self, targets: Sequence[Target], masks: Masks, sparsity: float) -> Masks:
        """Return the next round's masks, selected from the trained weights."""
        trained = {t.name: t.parameter.detach().movedim(t.output_dim, 0) for t in targets}
        masks = {name: mask.to(trained[name].device) for name, mask in masks.items()}
        return self.method.update(Targets(trained, masks, TrainingProgress(0, 1)), sparsity)
