"""Single-shot network pruning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.method import Masks, Targets, method
from ..core.targets import DENSE
from ..scores import saliency
from ._single_update import Single


@method("snip", paper="Lee et al., ICLR 2019", weights="hard")
@dataclass(frozen=True, kw_only=True)
class SNIP(Single):
    """Prune before training, by what each connection means to the loss of one batch: |w · ∂L/∂w|.

    Give `attach` that loss, or it takes the gradient of the first step, which then moves nothing.
    Biases and the classifier are pruned too, as the authors do.
    """

    before: ClassVar[bool] = True

    @property
    def dense(self) -> frozenset[str]:  # type: ignore[override]
        """Biases are weights like others, where the pattern is no structure of a matrix."""
        return DENSE - {"classifier", "bias"} if self.pattern.is_elementwise else DENSE - {"classifier"}

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select(saliency(targets.latent, targets.grads), sparsity)
