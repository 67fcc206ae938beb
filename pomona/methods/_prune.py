"""Pruning at once, without an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn

from ..core.mask_table import mask_table
from ..core.method import Masks
from ..core.pruner import Pruner
from ..core.sparsity import Sparsity
from ..core.targets import unwrap
from ..errors import require
from ..patterns import Pattern
from ..table_view import TableView
from .oneshot import OneShot


@dataclass(frozen=True)
class PruningReport(TableView):
    """What `prune` did: the masks, by the names of the weights, and the sparsity that was reached over them."""

    method: OneShot
    masks: Masks
    sparsity: Sparsity

    @property
    def summary(self) -> str:
        """The result in a line."""
        count = sum(mask.numel() for mask in self.masks.values())
        layers = f"{len(self.masks)} layer{'s' if len(self.masks) > 1 else ''}"
        return (
            f"{self.sparsity:.2%} of {count:,} weights in {layers} pruned, "
            f"{self.method.pattern}, allocation {self.method.allocation}"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary}>"

    def __rich__(self) -> Table:
        return mask_table(self.summary, self.masks)


def prune(
    model: nn.Module,
    sparsity: float | None = None,
    *,
    pattern: Pattern | str = "unstructured",
    allocation: str | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    data: Iterable[Any] | None = None,
    max_batches: int | None = 200,
) -> PruningReport:
    """Prune a model at once and in place, by magnitude, and return what was pruned.

    This is `OneShot` without a training behind it: the same layers, counts and floors, and the same warnings. Nothing
    holds the zeros afterwards; train with `pm.Finetune()`, which keeps them. The running statistics of batch norms are
    those of the dense model: with `data`, an iterable of batches of which at most `max_batches` are read, they are
    estimated anew.

    Arguments:
        model: the model to prune.
        sparsity: the pruned fraction; 0.9, or what the pattern fixes, where it is left out.
        pattern: which weights are pruned together: pm.NM(2, 4), or "2:4", "balanced(32)", "filter", "block(4, 4)".
        allocation: "global", "uniform" or "erk"; None is the pattern's default.
        include: names of the layers to prune, or globs; the default choice is that of `pm.prunable(model)`.
        exclude: names of layers to leave dense, or globs.
        data: batches for the statistics of batch norms, as `Pruner.finish` takes them.
        max_batches: the number of batches that are read of `data`; None reads all.
    """
    method = OneShot(sparsity, pattern=pattern, allocation=allocation, include=include, exclude=exclude)  # type: ignore[arg-type]
    inner = unwrap(model)  # of DistributedDataParallel: a rank may prune alone
    parameters = list(inner.parameters())
    require(bool(parameters), f"{type(inner).__name__} has no parameters: there is nothing to prune.")
    pruner = Pruner(method).attach(inner, torch.optim.SGD(parameters))
    pruner.finish(data, max_batches=0 if data is None else max_batches)
    return PruningReport(method, pruner.masks(), pruner.sparsity())
