"""Data-parallel runs: the processes that torchrun started, or this process alone."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pomona.core.distributed import require_same_options, world_group
from pomona.errors import require

from .fresh_store import open_fresh_store


@dataclass(frozen=True)
class DistributedContext:
    """The place of this process among the processes that train one run together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # the rank on this machine, which is also the index of the GPU

    @property
    def is_first(self) -> bool:
        """Return whether this process writes files and reports progress."""
        return self.rank == 0

    def wrap_model(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model with its gradients averaged over all processes."""
        if self.world_size == 1:
            return model
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def mean(self, values: Tensor) -> Tensor:
        """Return the elementwise mean of a tensor over all processes."""
        if self.world_size > 1:
            distributed.all_reduce(values)
            values /= self.world_size
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum of a tensor over all processes."""
        if self.world_size > 1:
            distributed.all_reduce(values)
        return values

    def copy_buffers(self, model: nn.Module) -> None:
        """Give the model the buffers of the first process, such as its batch-norm statistics."""
        if self.world_size > 1:
            for buffer in model.buffers():
                distributed.broadcast(buffer, 0)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Return whether the flag is set in any process."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor(float(flag), device=device)
        distributed.all_reduce(flags)
        return bool(flags > 0)

    def require_same_recipe(self, settings: Mapping[str, Any]) -> None:
        """Raise PomonaError in every process where one has another value of a setting than the first."""
        if self.world_size > 1:
            sections = {key: value if isinstance(value, Mapping) else {"": value} for key, value in settings.items()}
            flat = {f"{key}.{k}".strip("."): v for key, section in sections.items() for k, v in section.items()}
            require_same_options(world_group(), flat)

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.world_size > 1:
            distributed.barrier()


_TORCHRUN_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))  # with the values without torchrun


def distributed_context() -> DistributedContext:
    """Return the place of this process, from the environment variables of torchrun."""
    return DistributedContext(*(int(os.environ.get(key, default)) for key, default in _TORCHRUN_VARIABLES))


@contextmanager
def joined_processes(device: str) -> Iterator[tuple[DistributedContext, torch.device]]:
    """Join the process group if there is one, and yield the place of this process and its device.

    A process group that is opened here stays open until the process ends: in a second group, a rank that is ahead
    would connect to addresses of the first.
    """
    processes = distributed_context()
    place = select_device(device, processes.local_rank)
    if processes.world_size > 1 and not distributed.is_initialized():
        if place.type == "cuda":
            torch.cuda.set_device(place)
        store, rank, world_size = open_fresh_store()
        backend = "nccl" if place.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        atexit.register(close_process_group)
    yield processes, place


def close_process_group() -> None:
    """Close the process group if it is open."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def select_device(device: str, local_rank: int = 0) -> torch.device:
    """Return the device of that name, where "auto" is CUDA if available; raise PomonaError if it does not exist."""
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
