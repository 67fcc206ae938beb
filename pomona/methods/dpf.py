"""Dynamic pruning with feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..compressors import COMPRESSORS, Compressor
from ..core.method import Masks, Targets, method
from ..errors import require
from ..scores import magnitude
from ._periodic import Periodic


@method("dpf", paper="Lin et al., ICLR 2020", weights="soft")
@dataclass(frozen=True, kw_only=True)
class DPF(Periodic):
    """Dynamic pruning with feedback, Algorithm 1.

    The model runs on m ⊙ w; the gradient taken there moves the dense w, so that a weight pruned too
    early comes back. Until the last tenth of training the mask follows w, and then it is at rest.

    An output that lost all its weights sends zeros to the batch norm behind it, which divides by √(0 + ε): the gradient
    of these weights is some hundred times that of others. With `feedback` it is no longer than so many mean ones.
    """

    ranks: ClassVar[bool] = True

    every: int = 16  # p: steps between mask updates
    settle: float = 0.1  # share of training, at its end, with the mask at rest; the paper has 0
    compressor: Compressor | None = None  # what is done to m ⊙ w besides: Soft(), Quantize(bits), Binary()
    feedback: float | None = None  # a bound on the gradient of outputs without weights, in mean ones; None: no bound

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compressor is not None:
            self._set(compressor=COMPRESSORS.resolve(self.compressor))
            self.compressor.check(self.pattern)
        require(
            self.feedback is None or self.feedback >= 0,
            f"feedback is a bound in mean gradients, 0 or more, or None for no bound, got {self.feedback}.",
        )
        require(0 <= self.settle < 1, f"settle is a share of training in [0, 1), got {self.settle}.")
        require(
            self.schedule.until <= self.rest + 1e-9,
            f"the sparsity would still rise (until={self.schedule.until:g}) when the mask comes to rest at "
            f"{self.rest:g} of training: lower until or settle.",
        )

    @property
    def rest(self) -> float:
        return 1 - self.settle

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return self.select(magnitude(targets.latent), sparsity)  # line 3: m ← m_t(w_t)

    def gauge(self, latent: Tensor, mask: Tensor, rows: int) -> Tensor | None:
        return None if self.compressor is None else self.compressor.gauge(latent, mask, rows)

    def project(self, latent: Tensor, mask: Tensor, out: Tensor, gauge: Tensor | None = None) -> None:
        super().project(latent, mask, out)  # line 5: w̃ ← m ⊙ w, or any compressor C(w) (section 4)
        if self.compressor is not None:
            self.compressor.compress(out, mask, gauge)

    def bound(self, latent: Tensor) -> None:
        if self.compressor is not None:
            self.compressor.bound(latent)

    @property
    def tempers(self) -> bool:
        return self.feedback is not None

    def temper(self, gradient: Tensor, mask: Tensor, rows: int) -> Tensor:
        assert self.feedback is not None
        inner = [dim for dim in range(gradient.ndim) if dim != rows]
        kept = mask.any(inner, keepdim=True)
        length = torch.linalg.vector_norm(gradient.float(), dim=inner, keepdim=True)
        longest = self.feedback * (length * kept).sum() / kept.sum()
        share = (longest / length).clamp(max=1)  # NaN for 0 of 0, and where nothing is kept to compare with: no bound
        return gradient * share.masked_fill(kept | share.isnan(), 1).to(gradient.dtype)

    @property
    def plain(self) -> bool:
        return self.compressor is None
