"""The lottery ticket: train, prune, go back to the start, train again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..core.method import Masks, Method, Targets, Time, method
from ..core.pruner import Pruner
from ..core.targets import Target, unwrap
from ..errors import PomonaError, require
from ..registry import spec_to_dict
from ..schedules import Constant, Schedule
from ..scores import exclude_pruned, magnitude
from .finetune import Finetune

Train = Callable[[nn.Module, Pruner, int], Any]


@method("lottery", paper="Frankle & Carbin, ICLR 2019", weights="hard")
@dataclass(frozen=True, kw_only=True)
class Lottery(Method):
    """Iterative magnitude pruning with rewinding, in rounds of a full training each.

    A round trains to the end, prunes ⌈rate · remaining⌉ of the weights and sets the rest back to what they
    were after `rewind` steps of the first round. `retrainings` sets the rate so that so many rounds suffice.
    """

    rate: float = 0.2
    retrainings: int | None = None
    rewind: int = 0
    schedule: Schedule = field(default=Constant(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.rate < 1, f"rate is the part pruned each round, in (0, 1), got {self.rate}.")
        require(
            self.retrainings is None or self.retrainings >= 1,
            f"retrainings counts rounds after the first training and must be ≥ 1, got {self.retrainings}.",
        )
        require(self.rewind >= 0, f"rewind is a step of the first training and must be ≥ 0, got {self.rewind}.")

    def levels(self, count: int) -> list[float]:
        """The sparsity of each training in turn, of `count` weights; the first is dense."""
        goal = round(self.target * count)
        rate = self.rate if self.retrainings is None else 1 - (1 - self.target) ** (1 / self.retrainings)
        pruned = [0]
        while pruned[-1] < goal:
            pruned.append(min(goal, pruned[-1] + math.ceil(rate * (count - pruned[-1]) - 1e-9)))
        return [n / count for n in pruned]

    def due(self, time: Time) -> bool:
        raise PomonaError("lottery trains several times: call pm.Lottery(…).rounds(model, train) instead of attach.")

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select(exclude_pruned(magnitude(targets.latent), targets.masks), sparsity)


class Rounds(Pruner):
    """What `pm.Lottery(…)` gives."""

    method: Lottery

    def rounds(self, model: nn.Module, train: Train, folder: str | Path | None = None) -> list[dict[str, Any]]:
        """Find a ticket; the model holds it, trained, at the end.

        `train(model, pruner, round)` must attach the pruner to the model and a new optimizer, train to the
        end and finish it. What it returns stands in the list that comes back, with the sparsity of each round.
        With a `folder` finished rounds are kept there, and a second call goes on behind them.
        """
        targets = self.method.targets(model)
        require(bool(targets), "the model has nothing to prune: name layers with include=[…].")
        for target in targets:
            self.method.pattern.validate_shape(target.name, target.outputs_first)
        levels = self.method.levels(sum(target.shape.numel() for target in targets))
        hold = Finetune(include=tuple(target.name for target in targets), pattern=self.method.pattern)
        model_is = {target.name: list(target.shape) for target in targets}
        shelf = Shelf(
            None if folder is None else Path(folder), {"options": spec_to_dict(self.method), "layers": model_is}
        )
        inner = unwrap(model)
        masks = {target.name: torch.ones(target.outputs_first, dtype=torch.bool) for target in targets}
        done = shelf.results()
        if done:
            inner.load_state_dict(shelf.read("model"))
            masks = {name: mask.bool() for name, mask in shelf.read("masks").items()}
        for index in range(len(done), len(levels)):
            if index:
                masks = self.prune(targets, masks, levels[index])
                inner.load_state_dict(shelf.read("rewind"))
            pruner = Holder(hold, masks, None if index else self.method.rewind)
            result = train(model, pruner, index)
            require(pruner.finished, "train(model, pruner, round) must attach the pruner, train, and finish() it.")
            if index == 0:
                shelf.write("rewind", pruner.snapshot)
            # The masks first: pruning any weights by them again gives the same masks, whatever comes between.
            shelf.write("masks", {name: mask.to(torch.uint8) for name, mask in masks.items()})
            shelf.write("model", inner.state_dict())
            done.append({"round": index, "sparsity": levels[index], "result": result})
            shelf.record(done)
        return done

    @torch.no_grad()
    def prune(self, targets: Sequence[Target], masks: Masks, sparsity: float) -> Masks:
        """The next round's masks, from what was trained."""
        trained = {t.name: t.parameter.detach().movedim(t.rows, 0) for t in targets}
        masks = {name: mask.to(trained[name].device) for name, mask in masks.items()}
        return self.method.update(Targets(trained, masks, Time(0, 1)), sparsity)


class Holder(Pruner):
    """Holds the masks of a round, and remembers the weights after `rewind` steps of the first."""

    def __init__(self, method: Method, masks: Masks, rewind: int | None) -> None:
        super().__init__(method)
        self.given = masks
        self.rewind = rewind
        self.snapshot: dict[str, Tensor] = {}

    def attach(self, model: nn.Module, optimizer: Any, total_steps: int | None = None, *args: Any, **kw: Any) -> Pruner:
        require(
            not self.rewind or total_steps is None or self.rewind <= total_steps,
            f"rewind={self.rewind} lies past the end of training, which has {total_steps} steps.",
        )
        super().attach(model, optimizer, total_steps, *args, **kw)
        self.remember()
        return self

    def _start(self, loss: Any) -> None:
        """With the masks that were given: a weight may be zero and kept."""
        self._put({slot.name: self.given[slot.name].to(slot.mask.device) for slot in self.slots}, 0.0)

    def advance(self) -> None:
        super().advance()
        self.remember()

    def remember(self) -> None:
        if self.step == self.rewind and self.model is not None:
            self.snapshot = {name: value.detach().clone() for name, value in unwrap(self.model).state_dict().items()}

    def finish(self) -> None:
        require(
            self.rewind is None or bool(self.snapshot),
            f"rewind={self.rewind} lies past the end of training, which took {self.step} steps.",
        )
        super().finish()


class Shelf:
    """Where finished rounds are kept: in a folder, or in memory."""

    def __init__(self, folder: Path | None, label: dict[str, Any]) -> None:
        self.folder, self.label = folder, json.loads(json.dumps(label))
        self.memory: dict[str, dict[str, Tensor]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        tensors = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        self.memory[name] = tensors
        if self.folder is not None:
            partial = self.folder / f"{name}.partial"
            save_file(tensors, partial)
            partial.replace(self.folder / f"{name}.safetensors")

    def read(self, name: str) -> dict[str, Tensor]:
        if name not in self.memory:
            self.memory[name] = load_file(self.folder / f"{name}.safetensors")  # type: ignore[operator]
        return self.memory[name]

    def record(self, done: list[dict[str, Any]]) -> None:
        if self.folder is not None:
            text = json.dumps({**self.label, "rounds": done}, indent=1, default=plain_number)
            partial = self.folder / "rounds.partial"
            partial.write_text(text)
            partial.replace(self.folder / "rounds.json")

    def results(self) -> list[dict[str, Any]]:
        """The rounds that were finished before."""
        path = None if self.folder is None else self.folder / "rounds.json"
        if path is None or not path.exists():
            return []
        kept = json.loads(path.read_text())
        for what, mine in self.label.items():
            require(kept.get(what) == mine, f"{path} is of a lottery with other {what}: choose another folder.")
        return kept["rounds"]


def plain_number(value: Any) -> Any:
    """A tensor or a numpy number as JSON can hold it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise PomonaError(
        f"train returned {value!r}, which a folder cannot keep: return numbers, texts, lists or dictionaries."
    )
