"""Private steps whose budget is solved at once: by default those of GIP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import require
from .budget import Budget, solve_steps
from .private_step import PrivateStep
from .ramp import RampLike
from .random_source import Source


def gip(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rows: int,
    batch_size: int,
    epsilon: float,
    delta: float,
    steps: int | None = None,
    sigma: float | None = None,
    share: float = 0.01,
    noise_ramp: RampLike = None,
    index_ramp: RampLike = None,
    seed: int | None = None,
    **options: Any,
) -> PrivateStep:
    """Return private training steps with gradients index pruning, after solving their budget with dp-accounting.

    Args:
        rows: of the training data.
        batch_size: expected rows of a Poisson sample.
        epsilon: ε of the whole run.
        delta: δ of the whole run, below 1 / rows.
        steps: of the whole run.
        sigma: in place of `steps`: the run has as many steps as noise of this σ allows without index draws.
        share: of ε for the index sets, 1 % in Yang et al. (2023); ignored by other methods than "gip".
        noise_ramp: (start, end) of a factor of σ over the steps, or a `Ramp`.
        index_ramp: the same for the ε of index draws.
        seed: not private, for experiments only, because whoever knows it can subtract the noise. Without one the key of
            all random numbers is the operating system's.
        options: further options of `PrivateStep`.
    """
    share = share if options.get("method", "gip") == "gip" else 0.0
    require((steps is None) != (sigma is None), "give steps, or sigma to have them solved for.")
    target = {"epsilon": epsilon, "delta": delta, "rows": rows, "batch_size": batch_size}
    steps = steps if sigma is None else solve_steps(**target, sigma=sigma)  # type: ignore[arg-type]
    ramps = {"noise_ramp": noise_ramp, "index_ramp": index_ramp}
    budget = Budget.solve(**target, steps=steps, share=share, **ramps)  # type: ignore[arg-type]
    source = Source(next(model.parameters()).device, seed=seed)
    return PrivateStep(model, optimizer, budget, source=source, **options)
