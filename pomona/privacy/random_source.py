"""The random numbers of private training: the sampled rows, the index sets and the noise.

Privacy is only as good as this randomness. Whoever knows the seed can subtract the noise, so a seed is for
experiments. `secure` uses the operating system's cryptographic generator, which has no seed.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import require


class Source:
    """Random numbers on a device, from torch's generator or, with `secure`, from the operating system's.

    Without a seed, torch's generator starts from a seed of the operating system that is not stored.
    """

    def __init__(self, device: torch.device | str = "cpu", *, seed: int | None = None, secure: bool = False) -> None:
        require(not (secure and seed is not None), "secure randomness has no seed: leave out seed, or secure.")
        self.device, self.secure = torch.device(device), secure
        self.generator = None if secure else torch.Generator(self.device)
        if self.generator is not None and seed is None:
            self.generator.seed()
        elif self.generator is not None and seed is not None:
            self.generator.manual_seed(seed)

    def bits(self, *shape: int) -> Tensor:
        """Return int64 numbers of 63 random bits each, none negative."""
        if self.generator is not None:
            return torch.empty(shape, dtype=torch.int64, device=self.device).random_(generator=self.generator)
        words = np.frombuffer(bytearray(os.urandom(8 * math.prod(shape))), dtype=np.int64)
        return torch.from_numpy(words & np.int64(2**63 - 1)).view(shape).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Return uniform float64 numbers in [0, 1), with all 53 bits of the significand random."""
        return (self.bits(*shape) >> 10).double() * 2.0**-53

    def normal(self, *shape: int) -> Tensor:
        """Return float32 numbers of N(0, 1).

        Secure numbers are half the sum of four. The floating-point values that a single normal number can take would
        reveal the sum that it was added to (Mironov, CCS 2012; Holohan and Braghin, ESORICS 2021).
        """
        if self.generator is not None:
            return torch.randn(shape, generator=self.generator, device=self.device)
        radius = torch.log1p(-self.uniform(2, *shape)).mul_(-2).sqrt_()
        angle = self.uniform(2, *shape).mul_(2 * math.pi)
        return (radius * (angle.cos() + angle.sin())).sum(0).div_(2).float()

    def poisson(self, rows: int, rate: float) -> Tensor:
        """Return the indices of a Poisson sample, which holds each row independently with probability `rate`."""
        return (self.uniform(rows) < rate).nonzero().squeeze(1)

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state, or nothing if secure.

        The state predicts all further random numbers, so it must not be published.
        """
        return {} if self.generator is None else {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; raise PomonaError if it is of the other kind of generator."""
        require(
            bool(state) == (self.generator is not None),
            "a secure run cannot continue a seeded one, nor a seeded run a secure one: set secure as it was.",
        )
        if self.generator is not None:
            self.generator.set_state(state["generator"].cpu())
