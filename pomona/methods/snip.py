"""Single-shot network pruning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.method import Masks, Targets, method
from ..core.targets import DENSE
from ..scores import saliency
from ._single_update import SingleUpdate


@method("snip", paper="Lee et al., ICLR 2019", weights="hard")
@dataclass(frozen=True, kw_only=True)
class SNIP(SingleUpdate):
    """Prune before training, by the effect of each weight on the loss of one batch: |w · ∂L/∂w|.

    Give `attach` that loss; otherwise the gradient of the first step is used, and that step moves nothing.
    Biases and the classifier are pruned too, as the authors do.
    """

    updates_before_step: ClassVar[bool] = True

    @property
    def left_dense(self) -> frozenset[str]:  # type: ignore[override]
        """Biases are pruned like other weights, unless the pattern is a structure of matrices."""
        return DENSE - {"classifier", "bias"} if self.pattern.is_elementwise else DENSE - {"classifier"}

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select(targets, saliency(targets.latent, targets.grads), sparsity)
