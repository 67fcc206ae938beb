"""Inputs and targets of one part of a data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pomona.errors import require


@dataclass(frozen=True, eq=False)
class Split:
    """Inputs `x` and targets `y`, where row i of `y` is the target of row i of `x`."""

    x: torch.Tensor
    y: torch.Tensor

    def __post_init__(self) -> None:
        require(
            len(self.x) == len(self.y),
            f"a split needs one target for each input, got {len(self.x)} inputs and {len(self.y)} targets.",
        )

    @classmethod
    def from_arrays(cls, x: np.ndarray, y: np.ndarray) -> Split:
        """Return a split of numpy arrays; targets become int64, which the losses of torch expect."""
        return cls(torch.from_numpy(np.require(x, requirements=["C", "W"])), torch.from_numpy(y.astype(np.int64)))

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: torch.device | str) -> Split:
        """Return the split on another device."""
        return Split(self.x.to(device), self.y.to(device))

    def take_rows(self, rows: np.ndarray) -> Split:
        """Return a copy of the given rows."""
        index = torch.from_numpy(rows).to(self.x.device)
        return Split(self.x[index], self.y[index])


def cut_windows(stream: Split, length: int, carry: int = 0) -> Split:
    """Cut a token stream into windows of `length` tokens; an incomplete last window is left out.

    With a batch size as `carry`, the windows are ordered so that in unshuffled batches row i of a batch continues row
    i of the previous one, and a recurrent state can be carried over. Raises PomonaError if there are too few tokens.
    """
    count = len(stream) // max(length, 1)
    require(
        length >= 1 and count >= max(carry, 1),
        f"{len(stream)} tokens give {count} windows of {length}, {max(carry, 1)} are needed: "
        "use a shorter length, a smaller batch or a longer text.",
    )

    def cut(tokens: torch.Tensor) -> torch.Tensor:
        if not carry:
            return tokens[: count * length].view(count, length)
        rows = tokens[: count // carry * carry * length].view(carry, -1, length)
        return rows.transpose(0, 1).reshape(-1, length)

    return Split(cut(stream.x), cut(stream.y))
