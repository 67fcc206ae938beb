"""Data-parallel runs: the processes that torchrun started, or just this one."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pomona.errors import require


@dataclass(frozen=True)
class DistributedContext:
    """This process among those that train together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # the rank on this machine, which is also its GPU

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model with its gradients averaged over the processes."""
        if self.world_size == 1:
            return model
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the processes, entry by entry."""
        if self.world_size > 1:
            distributed.all_reduce(values)
            values /= self.world_size
        return values

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is up anywhere in the processes."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor(float(flag), device=device)
        distributed.all_reduce(flags)
        return bool(flags > 0)

    def wait(self) -> None:
        """Until all are here."""
        if self.world_size > 1:
            distributed.barrier()


def distributed_context() -> DistributedContext:
    """This process's place, as torchrun tells it."""
    return DistributedContext(*(int(os.environ.get(key, default)) for key, default in _TORCHRUN_VARIABLES))


@contextmanager
def joined_processes(device: str) -> Iterator[tuple[DistributedContext, torch.device]]:
    """The processes and this process's device.

    A process group that had to be opened stays open to the end of the process: in a second one a rank that is ahead
    would meet the addresses of the first.
    """
    processes = distributed_context()
    place = select_device(device, processes.local_rank)
    if processes.world_size > 1 and not distributed.is_initialized():
        if place.type == "cuda":
            torch.cuda.set_device(place)
        distributed.init_process_group("nccl" if place.type == "cuda" else "gloo")
        atexit.register(close_process_group)
    yield processes, place


def close_process_group() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def select_device(device: str, local_rank: int = 0) -> torch.device:
    """The device of that name; "auto" takes CUDA where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type == "cuda":
        count = torch.cuda.device_count()
        require(count > 0, f"device '{device}' was asked for, but torch sees no GPU here: set train.device = \"cpu\".")
        place = torch.device("cuda", local_rank if place.index is None else place.index)
        require(
            place.index < count,
            f"device '{place}' was asked for, but there are {count} GPUs: take one of cuda:0 … cuda:{count - 1}.",
        )
    return place


_TORCHRUN_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))  # as torchrun sets them
