"""Fine-tuning with a fixed mask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..core.method import Masks, Targets, method
from ..core.targets import DENSE
from ..patterns import Unstructured
from ._single_update import SingleUpdate


@method("finetune", paper="Han et al., NeurIPS 2015", weights="hard")
@dataclass(frozen=True, kw_only=True)
class Finetune(SingleUpdate):
    """Keep the zeros that a model has, whatever made them: a training stage that can follow any method.

    With `pattern=Filter()` the biases and batch norms of removed filters are kept at zero too.
    """

    # A bias of zero was pruned, or is dead; a frozen zero stays one.
    left_dense: ClassVar[frozenset[str]] = DENSE - {"classifier", "bias", "frozen"}

    sparsity: float | None = field(default=0.0, init=False)
    allocation: str = field(default="global", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pattern.removes_outputs:  # the zeros exist already, in whatever pattern
            self._set(pattern=Unstructured())

    def _validate(self) -> None:
        """Accept every combination of options: no sparsity is asked for."""

    def update(self, targets: Targets, sparsity: float) -> Masks:
        return {name: weight != 0 for name, weight in targets.latent.items()}
