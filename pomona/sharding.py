"""Tensors that are divided among ranks (DTensor, as FSDP2 makes them): their local part, their whole, their placement.

Nothing here imports torch.distributed.tensor, which takes two seconds: where a DTensor exists, it is imported already.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.overrides import TorchFunctionMode

from .errors import PomonaError


def dtensor_module() -> Any:
    """Return the module torch.distributed.tensor, or None where nothing has imported it."""
    return sys.modules.get("torch.distributed.tensor")


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, of which this rank may hold a part only."""
    module = dtensor_module()
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Any:
    """Return the part of a tensor that this rank holds, sharing its memory; a plain tensor is its own part."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all ranks; a plain one as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def wrap_part(part: Tensor, like: Any) -> Any:
    """Return the tensor whose part on this rank is `part`, in the shape and placement of another one."""
    if not is_sharded(like):
        return part
    place = (like.device_mesh, like.placements)
    return type(like.data).from_local(part, *place, run_check=False, shape=like.shape, stride=like.stride())


def place_like(values: Tensor, like: Any) -> Any:
    """Return a whole tensor, or one that is placed otherwise, in the placement of another one of its shape."""
    if not is_sharded(like):
        return whole(values)
    if not is_sharded(values):
        values = replicate(values, like.device_mesh)
    if values.placements == like.placements and values.device_mesh == like.device_mesh:  # type: ignore[attr-defined]
        return values
    return values.redistribute(like.device_mesh, like.placements)  # type: ignore[attr-defined]


def replicate(values: Tensor, mesh: Any) -> Any:
    """Return a tensor that every rank of a mesh holds as a DTensor."""
    module = dtensor_module()
    return module.DTensor.from_local(values, mesh, [module.Replicate()] * mesh.ndim, run_check=False)


def reduced_placements(values: Tensor, like: Any) -> list[Any]:
    """Return placements of a tensor that has one dimension more than `like`, in front, and some others of size 1."""
    module = dtensor_module()
    return [
        module.Shard(p.dim + 1) if p.is_shard() and values.shape[p.dim + 1] > 1 else module.Replicate()
        for p in like.placements
    ]


def place_reduced(values: Any, like: Any) -> Any:
    """Return figures of the outputs of a sharded tensor, such as (2, outputs, 1, 1), divided as its outputs are."""
    values = values if is_sharded(values) else replicate(values, like.device_mesh)
    return values.redistribute(like.device_mesh, reduced_placements(values, like))


def wrap_reduced(part: Tensor, shape: Sequence[int], like: Any) -> Any:
    """Return the tensor of a shape whose part on this rank is `part`, placed as `place_reduced` does."""
    values = torch.empty(tuple(shape), device="meta")
    placements = reduced_placements(values, like)
    options = {"run_check": False, "shape": values.shape, "stride": values.stride()}
    return type(like.data).from_local(part, like.device_mesh, placements, **options)


def positions_of(like: Any) -> Tensor:
    """Return the row-major positions, in the whole tensor, of the entries that this rank holds, flat."""
    part = local_part(like)
    if not is_sharded(like):
        return torch.arange(part.numel(), device=part.device)
    every = torch.arange(like.numel(), device=part.device).view(like.shape)
    return local_part(place_like(every, like)).reshape(-1)


def sharding_mesh(tensors: Iterable[Any]) -> Any:
    """Return the device mesh of the first sharded tensor, or None where all are plain."""
    return next((tensor.device_mesh for tensor in tensors if is_sharded(tensor)), None)


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def refuse_sharded(model: nn.Module, what: str) -> None:
    """Raise PomonaError for a model whose weights are divided among ranks, where `what` needs whole ones."""
    tensors = (*model.parameters(), *model.buffers())
    if any(map(is_sharded, tensors)) or any(map(is_fully_sharded, model.modules())):
        raise PomonaError(
            f"{what} needs whole weights, and those of {type(model).__name__} are divided among ranks: gather them "
            "with torch's get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), load them into "
            "a plain model, and give that one."
        )


def reshard(model: nn.Module) -> None:
    """Give modules of FSDP2 their sharded weights again, where a forward left the gathered ones in place."""
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]


def sum_parts(figures: Tensor, tensors: Sequence[Any]) -> Tensor:
    """Return the sums over all ranks of figures of each tensor's local part, one row each; copies count once."""
    mesh = sharding_mesh(tensors)
    places = mesh.get_coordinate()

    def is_copy(tensor: Any) -> bool:
        copied = [not is_sharded(tensor) or tensor.placements[dim].is_replicate() for dim in range(mesh.ndim)]
        return any(place and copy for place, copy in zip(places, copied, strict=True))

    figures = figures * torch.tensor([[0 if is_copy(tensor) else 1] for tensor in tensors], device=figures.device)
    for dim in range(mesh.ndim):
        distributed.all_reduce(figures, group=mesh.get_group(dim))
    return figures


def shard_number(tensor: Any) -> int:
    """Return a number that ranks have in common where they hold the same part of a tensor."""
    number = 0
    if is_sharded(tensor):
        mesh = tensor.device_mesh
        for dim, (place, placement) in enumerate(zip(mesh.get_coordinate(), tensor.placements, strict=True)):
            number = number * (mesh.size(dim) + 1) + (0 if placement.is_replicate() else place)
    return number


# ---- numbers read from sharded tensors

_READS = {Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__, Tensor.__bool__, Tensor.__index__}
_EXTREMES: dict[Callable[..., Any], tuple[Callable[[Tensor], Tensor], str, float]] = {
    **dict.fromkeys((Tensor.amax, torch.amax, Tensor.max, torch.max), (torch.amax, "MAX", -torch.inf)),
    **dict.fromkeys((Tensor.amin, torch.amin, Tensor.min, torch.min), (torch.amin, "MIN", torch.inf)),
}


class _WholeReads(TorchFunctionMode):
    """A mode in which numbers that are read from sharded tensors are those of the whole tensor.

    A DTensor's `item()` reads the part of one rank, its `amax()` fails on an empty part, and it has no boolean index.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and is_sharded(args[0]):
            if func in _READS:
                args = (whole(args[0]), *args[1:])
            elif func is Tensor.__getitem__ and is_sharded(args[1]):
                args = (whole(args[0]), whole(args[1]))
            elif func in _EXTREMES and len(args) == 1 and not kwargs:
                return extreme_of(args[0], *_EXTREMES[func])
        return func(*args, **(kwargs or {}))


def extreme_of(tensor: Any, pick: Callable[[Tensor], Tensor], operation: str, identity: float) -> Any:
    """Return the largest or smallest entry of a sharded tensor, some of whose parts may be empty."""
    part, mesh = local_part(tensor), tensor.device_mesh
    value = pick(part) if part.numel() else part.new_full((), identity)
    value = value.clone()
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            distributed.all_reduce(value, getattr(distributed.ReduceOp, operation), group=mesh.get_group(dim))
    return replicate(value, mesh)


def whole_reads(needed: bool = True) -> Any:
    """Return a context in which numbers are read from whole tensors; without need, one that does nothing."""
    return _WholeReads() if needed else contextlib.nullcontext()
