"""One bound for a whole region: by how much pruning can change the margin of one class over another, anywhere in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import require
from .intervals import EPS, Interval
from .margin_bounds import NetworkPair, bound_gaps
from .regions import InputSet, Region


@dataclass(frozen=True)
class MarginGaps:
    """How much pruning can change a margin anywhere in a region: `bounds[i, j]` ≥ sup (gap_i − gap_j).

    The gap is the dense network's output minus the pruned one's. Where a margin of either network exceeds the bound,
    the other network predicts the same class.
    """

    bounds: Tensor

    def unchanged(self, outputs: Tensor, of: str = "pruned") -> Tensor:
        """Return which predictions the other network shares, from the outputs of one: examples × classes.

        `of` is the network that computed the outputs, "pruned" or "dense".
        """
        return self.margins(outputs, of) > 0

    def margins(self, outputs: Tensor, of: str = "pruned") -> Tensor:
        """Return a lower bound of each example's smallest margin in the other network."""
        outputs = outputs.flatten(1).double()
        return self.smallest_margins(Interval(outputs, outputs), outputs.argmax(1), of)

    def smallest_margins(self, outputs: Interval, classes: Tensor, of: str) -> Tensor:
        """Return a lower bound of the smallest margin of each example's class in the other network."""
        require(of in ("pruned", "dense"), f"of is 'pruned' or 'dense', got {of!r}.")
        # dense margin of c over j = pruned margin + gap_c − gap_j, and gap_j − gap_c is at most bounds[j, c].
        most = self.bounds.T[classes] if of == "pruned" else self.bounds[classes]
        margins = outputs.low.gather(1, classes[:, None]) - outputs.high - most
        margins = margins.scatter(1, classes[:, None], torch.inf)
        return margins.amin(1) - 4 * EPS * (outputs.magnitude.abs().amax(1) + most.abs().amax(1))


def certify_margins(
    dense: nn.Module, pruned: nn.Module | Mapping[str, Tensor], input_shape: tuple[int, ...], region: Region
) -> MarginGaps:
    """Return by how much pruning can change the margin of one class over another, anywhere in a region."""
    pair = NetworkPair.of(dense, pruned, torch.zeros(input_shape))
    return margin_gaps(pair, region)


@torch.no_grad()
def margin_gaps(pair: NetworkPair, region: Region) -> MarginGaps:
    """Return the bounds of `certify_margins` for a pair of networks."""
    inputs = region.inputs(tuple(pair.graph.input_shape[1:]))
    inputs = InputSet(*(getattr(inputs, name).to(pair.graph.device) for name in ("low", "high", "centre", "radius")))
    return MarginGaps(bound_gaps(pair, inputs))
