"""Private steps with floating-point sums and noise, as they were before the grid: a target that attacks must break."""

from __future__ import annotations

import torch
from torch import Tensor

from pomona.privacy import PrivateStep, Source


class TorchSource(Source):
    """A source whose noise is normal float32 numbers of torch's generator, of which a CPU uses 32 bits of the seed."""

    def __init__(self, device: str = "cpu", *, seed: int | None = None) -> None:
        super().__init__(device, seed=seed)
        self.generator = torch.Generator(self.device)
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def normal(self, count: int) -> Tensor:
        """Return float32 numbers of N(0, 1)."""
        return torch.randn(count, generator=self.generator, device=self.device)


class FloatGrid:
    """Sums that are already gradients."""

    @staticmethod
    def to_gradient(total: Tensor, divisor: float) -> Tensor:
        return total / divisor


class FloatStep(PrivateStep):
    """A private step that adds floating-point numbers."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.grid = FloatGrid()

    def sum_clipped_gradients(self, inputs, targets, mechanism):
        gradients, losses = self.gradients.of_examples(inputs, targets)
        flat = torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)
        total = (flat * (self.clip / flat.norm(dim=1, keepdim=True).clamp(min=1e-30)).clamp(max=1)).sum(0)
        return total + self.source.normal(self.size).mul_(self.budget.sigma * self.clip), losses
