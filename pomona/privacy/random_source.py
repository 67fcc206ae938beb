"""Where the random choices of private training come from: which rows, which indices, which noise.

Privacy is only as good as this randomness. A seed that someone knows takes the noise away again, so a seed is
for experiments; `secure` draws from the operating system's cryptographic generator, which has none.
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
    """Random numbers on a device: from torch's generator, or with `secure` from the operating system's.

    Without a seed the generator begins with one from the operating system, which is kept nowhere.
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
        """63 random bits each, as whole numbers that are not negative."""
        if self.generator is not None:
            return torch.empty(shape, dtype=torch.int64, device=self.device).random_(generator=self.generator)
        words = np.frombuffer(bytearray(os.urandom(8 * math.prod(shape))), dtype=np.int64)
        return torch.from_numpy(words & np.int64(2**63 - 1)).view(shape).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        """In [0, 1), with the 53 bits that a float64 holds."""
        return (self.bits(*shape) >> 10).double() * 2.0**-53

    def normal(self, *shape: int) -> Tensor:
        """N(0, 1) in float32.

        Secure ones are half the sum of four: the values that a single float can take would give away which
        sum they were added to (Mironov, CCS 2012; Holohan and Braghin, ESORICS 2021).
        """
        if self.generator is not None:
            return torch.randn(shape, generator=self.generator, device=self.device)
        radius = torch.log1p(-self.uniform(2, *shape)).mul_(-2).sqrt_()
        angle = self.uniform(2, *shape).mul_(2 * math.pi)
        return (radius * (angle.cos() + angle.sin())).sum(0).div_(2).float()

    def poisson(self, rows: int, rate: float) -> Tensor:
        """A Poisson sample: each row is in it with probability `rate`, by itself."""
        return (self.uniform(rows) < rate).nonzero().squeeze(1)

    def state_dict(self) -> dict[str, Any]:
        """What makes the draws go on; it foretells them, so it must not be published. Secure ones have none."""
        return {} if self.generator is None else {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require(
            bool(state) == (self.generator is not None),
            "secure and seeded randomness cannot follow one another: go on with secure as it was.",
        )
        if self.generator is not None:
            self.generator.set_state(state["generator"].cpu())
