"""What the removal of weights costs the margins of predictions, to first order.

The margin of example n falls by about A[n, k] = w_k ∂margin_n/∂w_k when weight k is removed. The drops of all removed
weights add up, with their signs, to the drift D_n of the margin. The cost of a set of removed weights is

    Σ_n (D_n / s_n)² / 2,      s_n: the margin of the example in the dense network, or a small quantile of all margins

so that weights whose drops cancel are removed together, and examples near a class boundary count most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ...core.targets import Target
from ...patterns import Pattern
from ...patterns.units import UnitPattern

DAMPING = 8.0  # factor of the cost of a weight alone: many are removed between two computations of the drift
SMALLEST_SCALE = 0.05  # the quantile of all margins that the scale of an example is at least
TEMPERATURE = 0.1  # of the smooth margin, in medians of the margins
MAX_ENTRIES = 2**27  # of the matrix of drops; of more examples than fit, the first ones are used
CHUNK = 2**24  # entries of the matrix that are differentiated at a time


@dataclass(frozen=True)
class MarginDrops:
    """The drop of each example's margin for each weight of the targets, outputs first, and the margins themselves."""

    drops: Tensor
    margins: Tensor


class MarginCosts:
    """The costs of the weights of a model for the predictions of a dense network on some examples."""

    def __init__(
        self, targets: Sequence[Target], pattern: Pattern, model: nn.Module, x: Tensor, classes: Tensor
    ) -> None:
        self.targets, self.pattern, self.classes = targets, pattern, classes
        with torch.no_grad():
            outputs = model(x).flatten(1)
            top = outputs.topk(2, 1).values
            self.temperature = max(TEMPERATURE * float((top[:, 0] - top[:, 1]).median()), 1e-6)
        self.sizes = [target.shape.numel() for target in targets]
        self.count = max(1, min(len(x), MAX_ENTRIES // sum(self.sizes)))
        self.margins = self.differentiate(model, x).margins
        self.scale = self.margins.clamp(min=max(float(self.margins.quantile(SMALLEST_SCALE)), self.temperature))

    def differentiate(self, model: nn.Module, x: Tensor) -> MarginDrops:
        """Return the drops of the margins of a model at one input for each example."""
        names = [target.name for target in self.targets]
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        fixed = {name: tensor.detach() for name, tensor in tensors.items()}
        weights = {name: fixed.pop(name) for name in names}

        def margin(weights: Mapping[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
            outputs = functional_call(model, {**fixed, **weights}, (x[None],)).flatten()
            own = torch.arange(len(outputs), device=outputs.device) == label
            others = torch.where(own, -torch.inf, outputs / self.temperature)
            return torch.where(own, outputs, 0.0).sum() - self.temperature * torch.logsumexp(others, 0)

        differentiate = vmap(grad_and_value(margin), in_dims=(None, 0, 0))
        rows, margins = [], []
        size = max(1, CHUNK // sum(self.sizes))
        for start in range(0, self.count, size):
            part = slice(start, min(start + size, self.count))
            gradients, values = differentiate(weights, x[part], self.classes[part])
            drops = [
                (gradients[t.name] * weights[t.name]).movedim(t.output_dim + 1, 1).flatten(1) for t in self.targets
            ]
            rows.append(torch.cat(drops, 1))
            margins.append(values)
        return MarginDrops(torch.cat(rows), torch.cat(margins))

    def drift(self, found: MarginDrops) -> Tensor:
        """Return how far each margin has fallen below that of the dense network."""
        return self.margins - found.margins

    def own_costs(self, found: MarginDrops) -> Tensor:
        """Return the cost of each unit of the pattern alone."""
        drops = self.unit_sums(found.drops)
        return 0.5 * ((drops / self.scale[:, None]) ** 2).sum(0)

    def scores(self, found: MarginDrops, own: Tensor, drift: Tensor) -> dict[str, Tensor]:
        """Return the score of each weight, outputs first: what its removal, or that of its unit, costs now."""
        costs = own + self.unit_sums(((drift / self.scale**2) @ found.drops)[None])[0]
        if not isinstance(self.pattern, UnitPattern):
            return self.split(costs)
        units, sizes = self.units
        costs = costs / sizes  # what a removed weight costs
        # A pattern ranks its units by a norm of their scores: equal scores whose norm is the cost, made positive.
        positive = costs - costs.min() + torch.finfo(costs.dtype).tiny
        return self.split((positive / sizes ** (1 / self.pattern.norm))[units])

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """Return a number for each weight as one tensor for each target, outputs first."""
        parts = values.split(self.sizes)
        return {t.name: part.view(t.outputs_first) for t, part in zip(self.targets, parts, strict=True)}

    def unit_sums(self, values: Tensor) -> Tensor:
        """Return rows of numbers for each weight summed over the units of the pattern."""
        if not isinstance(self.pattern, UnitPattern):
            return values
        units, sizes = self.units
        return values.new_zeros(len(values), len(sizes)).index_add_(1, units, values)

    @property
    def units(self) -> tuple[Tensor, Tensor]:
        """The unit of each weight, and the number of weights of each unit."""
        assert isinstance(self.pattern, UnitPattern)
        parts, first = [], 0
        for target in self.targets:
            view, inner = self.pattern.split_into_units(target.outputs_first)
            outer = [1 if dim in inner else size for dim, size in enumerate(view)]
            count = torch.Size(outer).numel()
            parts.append(torch.arange(first, first + count).view(outer).expand(view).reshape(-1))
            first += count
        units = torch.cat(parts).to(self.classes.device)
        return units, torch.bincount(units).to(torch.float32)
