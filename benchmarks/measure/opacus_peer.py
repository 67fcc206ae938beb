"""A private step with Opacus, with each of its kinds of clipping, for the scripts that time Pomona's beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLIPPING = ("plain", "fast", "ghost")  # gradients of all examples at once, layer by layer, or only their norms


def make_opacus_step(
    model: nn.Module, x: Tensor, y: Tensor, clipping: str, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    """Return a function that takes one private step: gradients of examples, clipping to norm 1, noise, SGD.

    The forward pass runs under autocast where `dtype` is a type of 16 bits.
    """
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    sgd = torch.optim.SGD(model.parameters(), 0.1)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": len(x)}
    wrapped: Any
    loss: Callable[[Tensor, Tensor], Any] = F.cross_entropy
    if clipping == "plain":
        wrapped, optimizer = GradSampleModule(model, loss_reduction="mean"), DPOptimizer(sgd, **options)
    else:
        ghost = clipping == "ghost"
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=ghost)
        optimizer = DPOptimizerFastGradientClipping(sgd, **options)
        loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def work() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
            value = loss(wrapped(x), y)
        value.backward()
        optimizer.step()

    return work
