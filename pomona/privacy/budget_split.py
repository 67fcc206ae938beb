"""The split of ε between index draws and noise: the predicted error of each share, and the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..theory import gip
from .budget import solve_index_epsilon, solve_noise_multiplier, validate_target

SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # compared by default


@dataclass(frozen=True)
class Split:
    """A share of ε for the index draws, and the squared error it leads to in the mean gradient of one step."""

    share: float
    theta: float
    sigma: float
    lost: float  # E[i] / m
    pruning: float
    noise: float

    @property
    def error(self) -> float:
        """Return the squared error by pruning and by noise together."""
        return self.pruning + self.noise


def splits(
    sizes: Sequence[int],
    kept: Sequence[int],
    *,
    clip: float,
    epsilon: float,
    delta: float,
    rows: int,
    batch_size: int,
    steps: int,
    spread: float | None = None,
    shares: Sequence[float] = SHARES,
) -> list[Split]:
    """Return the predicted error of each share of ε, for mean gradients of N(0, spread²).

    The error is the corrected pruning error of Theorem 3 (Yang et al., 2023) plus the noise on the m kept
    coordinates, m (σ C / B)². A share of 0 is random-k and always included.

    Args:
        sizes: the number of coordinates of each group.
        kept: the number of coordinates that each group keeps.
        clip: C, the clipping norm.
        spread: standard deviation of a coordinate. The default is C / √d, the largest that clipping allows. Pruning
            costs most there, and good indices help most.
        shares: the shares to compare.
    """
    spread = clip / math.sqrt(sum(sizes)) if spread is None else spread
    validate_target(epsilon, delta, rows, batch_size, steps, 0.0)
    predicted = []
    for share in dict.fromkeys((0.0, *shares)):
        index = solve_index_epsilon(share * epsilon, delta, batch_size / rows, steps)
        sigma = solve_noise_multiplier(epsilon, delta, batch_size / rows, steps, index)
        theta = gip.theta_for_epsilon(index, sizes, kept)
        pruning = gip.pruning_mse(theta, sizes, kept, spread)
        noise = sum(kept) * (sigma * clip / batch_size) ** 2
        lost = gip.expected_swaps(theta, sizes, kept) / sum(kept)
        predicted.append(Split(share, theta, sigma, lost, pruning, noise))
    return predicted


def best_split(sizes: Sequence[int], kept: Sequence[int], **setting: Any) -> Split:
    """Return the split with the least predicted error; the arguments are those of `splits`.

    Yang et al. (2023) use a share of 0.01.
    """
    return min(splits(sizes, kept, **setting), key=lambda split: split.error)
