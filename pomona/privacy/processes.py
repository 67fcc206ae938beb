"""Private steps in several processes: one key, one sample that they share out, and one sum of integers.

Integers are added exactly in any order, so the result is that of one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import PomonaError, require


class Processes:
    """The processes of torch.distributed's default group, or the only one."""

    def __init__(self, model: nn.Module) -> None:
        is_used = dist.is_available() and dist.is_initialized()
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if is_used else (0, 1)
        require(
            not isinstance(model, DistributedDataParallel),
            "DistributedDataParallel adds gradients before they are clipped: pass the model itself, as a private step "
            "adds the clipped gradients of all processes.",
        )

    def share_key(self, key: bytes) -> bytes:
        """Return the key of the first process in all of them."""
        keys = [key]
        if self.count > 1:
            dist.broadcast_object_list(keys)
        return keys[0]

    def own_rows(self, rows: Tensor) -> Tensor:
        """Return this process's part of a sample."""
        return rows[self.rank :: self.count]

    def add(self, values: Tensor) -> Tensor:
        """Add a tensor of all processes up, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def require_agreement(self, what: str, digest: str) -> None:
        """Raise PomonaError in all processes unless they have the same digest."""
        if self.count == 1:
            return
        found = [""] * self.count
        dist.all_gather_object(found, digest)
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        require(
            other is None,
            f"the {what} of process {other} are not those of process 0: load the same weights and data in all "
            "processes, and draw with the same private step.",
        )

    def run_on_first(self, work: Callable[[], None]) -> None:
        """Run something in the first process; if it raises PomonaError there, raise it in all."""
        message: list[str | None] = [None]
        if self.rank == 0:
            try:
                work()
            except PomonaError as error:
                message = [str(error)]
        if self.count > 1:
            dist.broadcast_object_list(message)
        if message[0] is not None:
            raise PomonaError(message[0])
