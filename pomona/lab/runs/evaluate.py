"""The evaluation of a model: loss and accuracy, and the re-estimation of batch-norm statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from pomona.core.batch_norm import reestimate_statistics

Batch = tuple[Tensor, Tensor]
LARGEST_EXPONENT = 700  # exp of more overflows a double


def accuracy(model: nn.Module, batches: Iterable[Batch], precision: str = "float32") -> float:
    """Return the top-1 accuracy of a model in per cent."""
    return measure(model, batches, precision)["accuracy"]


def measure(
    model: nn.Module,
    batches: Iterable[Batch],
    precision: str = "float32",
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """Return the mean cross-entropy `loss`, the `accuracy` in per cent and the `perplexity` of a model.

    Where the batches are one process's share, `add_up` returns the sum of a tensor over all processes.

    Targets may have any shape, one label for each image or one token for each position: the classes are the last
    dimension of the logits. The training modes of the modules are restored. The device is synchronized once. Raises
    ValueError if there are no batches.
    """
    loss: Tensor | float = 0.0
    correct: Tensor | float = 0.0
    count = 0
    with torch.no_grad(), evaluation_mode(model):
        for inputs, targets in batches:
            if not len(targets):  # a process's share of a last batch with fewer rows than processes
                continue
            with autocast(inputs.device, precision):
                logits = model(inputs)
            loss = loss + cross_entropy(logits, targets, reduction="sum").double()
            correct = correct + (logits.argmax(-1) == targets).sum()
            count += targets.numel()
    if add_up is not None:
        device = next(model.parameters()).device
        totals = torch.tensor([float(loss), float(correct), count], dtype=torch.float64, device=device)
        loss, correct, count = add_up(totals).tolist()
    if not count:
        raise ValueError("there is nothing to measure: the batches are empty")
    mean = float(loss) / count
    return {
        "loss": mean,
        "accuracy": 100 * float(correct) / count,
        "perplexity": math.exp(mean) if mean < LARGEST_EXPONENT else math.inf,
    }


def cross_entropy(logits: Tensor, targets: Tensor, **options: object) -> Tensor:
    """Return the cross-entropy in float32 over the last dimension of the logits."""
    return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), **options)  # type: ignore[arg-type]


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context of a forward pass: autocast to bfloat16 for "bf16", nothing for "float32"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set every module to evaluation mode in the block, and restore the mode of each afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def reestimate_batchnorm(
    model: nn.Module, batches: Iterable[Batch], count: int, precision: str = "float32"
) -> nn.Module:
    """Return a copy of the model whose batch-norm statistics are the mean over `count` training batches.

    Right after a mask change the running statistics are those of the old mask. The model itself, its buffers and the
    random state are unchanged; dropout is off while the statistics are computed.
    """

    def run(model: nn.Module, batch: Batch) -> None:
        with autocast(batch[0].device, precision):
            model(batch[0])

    fresh = copy.deepcopy(model)
    reestimate_statistics(fresh, batches, count, run)
    return fresh
