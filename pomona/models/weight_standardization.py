"""Weight standardization (Qiao et al., 2019): each filter of a convolution has mean 0 and norm 1 whenever it is used.

It is a parametrization of the layer's weight (`torch.nn.utils.parametrize`). De et al. (2022) train with it privately.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

MIN_SQUARES = 1e-4  # the least squared norm of a filter that is divided by its norm, as in De et al. (2022)


class StandardizedWeight(nn.Module):
    """The parametrization that replaces each filter w by (w − mean(w)) / ‖w − mean(w)‖."""

    def forward(self, weight: Tensor) -> Tensor:
        return Standardize.apply(weight)[0]


class Standardize(torch.autograd.Function):
    """The function of `StandardizedWeight`, whose derivative also exists for a gradient of each example."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor) -> tuple[Tensor, Tensor]:
        return standardize(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:  # type: ignore[override]
        return pull_back(gradient[None], *ctx.saved_tensors)[0]


def standardize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight with filters of mean 0 and norm 1, and the norms that it was divided by, of shape (outputs,)."""
    filters = weight.flatten(1)
    centered = filters - filters.mean(1, keepdim=True)
    norms = centered.square().sum(1, keepdim=True).clamp(min=MIN_SQUARES).sqrt()
    return (centered / norms).view_as(weight), norms.squeeze(1)


def pull_back(gradients: Tensor, standardized: Tensor, norms: Tensor) -> Tensor:
    """Return the gradients of the weight from those of the standardized weight; both have shape (rows, *weight.shape).

    Filter by filter this is (g − mean(g) − u ⟨u, g⟩) / n with the standardized filter u and its norm n. Where n is
    the constant minimum, u has no norm of 1 and its part is not removed.
    """
    g, u = gradients.flatten(2), standardized.flatten(1)
    is_unit = norms.square() > MIN_SQUARES
    along = (g * u).sum(2, keepdim=True) * is_unit[:, None]
    return ((g - g.mean(2, keepdim=True) - u * along) / norms[:, None]).view_as(gradients)


def add_weight_standardization(model: nn.Module) -> nn.Module:
    """Parametrize the weight of every convolution of a model, in place, and return the model."""
    for module in list(model.modules()):
        if isinstance(module, nn.Conv2d):
            parametrize.register_parametrization(module, "weight", StandardizedWeight())
    return model
