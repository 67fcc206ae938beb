"""The format `ticket`: random weights as their seed and their mask, for the networks of score methods."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..core.pruner import Pruner
from ..core.score_method import ScoreMethod
from ..errors import PomonaError
from ..sparse import ticket as tickets
from .comparison import require_equal_states
from .example import Example, flatten_outputs
from .files import Loaded
from .state_file import DENSE_RUNTIME


@dataclass(frozen=True)
class DrawnWeights:
    """A score method, and the tensors whose weights it has drawn, by name."""

    method: ScoreMethod
    tensors: Mapping[str, tickets.DrawnTensor]

    @classmethod
    def of(cls, pruner: Pruner) -> DrawnWeights:
        """Return the drawn weights of a pruner; raise PomonaError where its method trains weights."""
        if not isinstance(pruner.method, ScoreMethod):
            raise PomonaError(f"{pruner.method.name} trains weights: a ticket holds random ones (edge_popup, iterand).")
        slots = pruner.slots
        drawn = {slot.name: tickets.DrawnTensor(slot.target.fan_in, slot.mask, slot.draw_number) for slot in slots}
        return cls(pruner.method, drawn)

    def facts(self) -> dict[str, Any]:
        """Return the method, the random stream and the sparsity of the masks."""
        masks = [tensor.mask for tensor in self.tensors.values()]
        stream = self.method.stream
        return {
            "method": self.method.name,
            "seed": stream.seed,
            "distribution": stream.distribution,
            "sparsity": 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks),
        }


def write(
    model: nn.Module,
    example: Example | None,
    file: Path,
    *,
    pruner: Pruner | DrawnWeights | None = None,
    architecture: Mapping[str, Any] | None = None,
) -> Loaded:
    """Write the ticket of a network whose weights `pruner` has drawn, and require the same values of the file."""
    if pruner is None:
        raise PomonaError(
            "a ticket holds random weights as their seed, which the pruner knows: pass pruner= of a score method "
            "(edge_popup, iterand)."
        )
    drawn = DrawnWeights.of(pruner) if isinstance(pruner, Pruner) else pruner
    data = tickets.dumps(model.state_dict(), drawn.tensors, drawn.method.stream, architecture)
    file.write_bytes(data)
    loaded = copy.deepcopy(model)
    state = tickets.load(file).state
    require_equal_states(str(file), model.state_dict(), state)
    loaded.load_state_dict(state)
    run = lambda example: list(flatten_outputs(example.call(loaded)).values())  # noqa: E731
    return Loaded(run, DENSE_RUNTIME, len(drawn.tensors), details=drawn.facts())
