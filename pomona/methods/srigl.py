"""SRigL: RigL with constant fan-in and neuron ablation."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..core.method import Targets, method
from ..errors import require
from ..masking import matrix_shape
from ..patterns import Balanced, Pattern
from ..patterns.selection import select_largest, select_largest_per_row
from ..sharding import is_sharded, place_like
from .rigl import RigL


@method("srigl", paper="Lasby et al., ICLR 2024", weights="hard")
@dataclass(frozen=True, kw_only=True)
class SRigL(RigL):
    """RigL in which every neuron keeps the same number of weights; neurons with few salient weights are ablated.

    The outputs of the network are never ablated.
    """

    pattern: Pattern = field(default=Balanced(blocks=1), init=False)
    ablation: float = 0.3  # γ_sal: the share of its fan-in that must be salient for a neuron to stay

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.ablation <= 1, f"ablation is a share of the fan-in in [0, 1], got {self.ablation}.")

    def rewire(self, name: str, targets: Targets) -> torch.Tensor:
        """Return one layer's new mask; kept weights and those of the largest gradients are salient."""
        if is_sharded(targets.masks[name]):  # the ranking of a neuron's weights needs the whole layer
            return place_like(self.rewire(name, targets.whole_layer(name)), targets.masks[name])
        weight, mask, shape = targets.latent[name], targets.masks[name], matrix_shape(targets.masks[name].shape)
        total, active = targets.memory.setdefault(name, int(mask.sum())), mask.reshape(shape).any(1)
        kept = self.drop(weight, mask, targets.progress).reshape(shape)
        growth = self.growth_score(name, targets).reshape(shape).masked_fill(kept | ~active[:, None], -torch.inf)
        salient = kept | select_largest([growth], int(mask.sum() - kept.sum()))[0]
        stays = active & (salient.sum(1) >= self.ablation * total / active.sum())
        stays = stays if bool(stays.any()) and name not in targets.output_layers else active
        fan_in = min(round(total / int(stays.sum())), shape[1])
        ranking = torch.where(kept, 2 + weight.reshape(shape).abs() / weight.abs().amax(), growth / growth.amax())
        return (select_largest_per_row(ranking, fan_in) & stays[:, None]).reshape(mask.shape)
