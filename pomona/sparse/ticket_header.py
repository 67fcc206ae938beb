"""The header of a ticket: read within limits, and compared with the size of the body before anything is decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..core.fused import random_stream as streams
from ..errors import require, shorten
from ..untrusted import inflate, parse_json, require_object

FREQUENCIES_SIZE = 512  # 256 frequencies of two bytes
MAX_HEADER_BYTES = 16 << 20
MAX_WEIGHTS = 1 << 28  # of all tensors of a ticket: several times those of the largest network of `pm.models`
MAX_DIMENSIONS = 8
MAX_PLANES = 4  # bytes of the number of a re-draw
# Symbols of eight bits for each byte of a stream: a symbol takes at least log₂(65536 / 65281) bits of it.
SYMBOLS_PER_BYTE = 1500
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}


def read_header(data: bytes, name: str, body_size: int) -> dict[str, Any]:
    """Return the header of a ticket with a body of this size; raise PomonaError, with `name`, if it cannot be right."""
    header = require_object(parse_json(inflate(data, MAX_HEADER_BYTES)))
    stream = header["stream"]
    version = stream["version"]
    require(type(version) is int and version >= 1, f"{name} is damaged: its random stream has no version.")
    require(
        version <= streams.VERSION,
        f"{name} uses a random stream of version {version}, but this pomona has version {streams.VERSION}: "
        "update pomona.",
    )
    require(is_count(stream["seed"], 2**63), f"{name} is damaged: its seed is {shorten(stream['seed'])}.")
    known = stream["distribution"] in list(streams.DISTRIBUTIONS)
    require(known, f"{name} is damaged: it has the distribution {shorten(stream['distribution'])}.")
    model = header["model"]
    valid = model is None or (isinstance(model, dict) and isinstance(model.get("name"), str))
    require(valid, f"{name} is damaged: it does not name its model.")
    entries = [*header["tensors"], *header["others"]]
    names = [entry["name"] for entry in entries]
    unique = all(isinstance(one, str) for one in names) and len(set(names)) == len(names)
    require(unique, f"{name} is damaged: its tensors do not have names of their own.")
    for entry in entries:
        require_shape(entry, name)
    total = sum(math.prod(entry["shape"]) for entry in entries)
    require(total <= MAX_WEIGHTS, f"{name} has tensors of {total:,} values, and at most {MAX_WEIGHTS:,} are read.")
    sizes = [size for entry in header["tensors"] for size in require_streams(entry, name)]
    planes = header["planes"]
    require(len(planes) <= MAX_PLANES, f"{name} is damaged: it has {len(planes)} planes of re-draws.")
    require(all(is_count(size, 1 << 40) for size in planes), f"{name} is damaged: a plane has no size.")
    sizes += [size + FREQUENCIES_SIZE for size in planes]
    sizes += [math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize for entry in header["others"]]
    require(sum(sizes) == body_size, f"{name} is damaged: its body has {body_size:,} bytes, not {sum(sizes):,}.")
    return header


def is_count(value: Any, limit: int) -> bool:
    """Return whether a value is a whole number from 0 to below a limit."""
    return type(value) is int and 0 <= value < limit


def require_shape(entry: Mapping[str, Any], name: str) -> None:
    """Raise PomonaError unless an entry of the header has a shape and a dtype of torch."""
    shape = entry["shape"]
    valid = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
    valid = valid and all(is_count(length, MAX_WEIGHTS + 1) for length in shape)
    require(valid, f"{name} is damaged: a tensor has the shape {shorten(shape)}.")
    known = isinstance(entry["dtype"], str) and entry["dtype"] in DTYPES
    require(known, f"{name} is damaged: a tensor has the dtype {shorten(entry['dtype'])}.")


def require_streams(entry: Mapping[str, Any], name: str) -> list[int]:
    """Return the sizes of the streams of a drawn tensor; raise PomonaError unless they can hold its weights."""
    count = math.prod(entry["shape"])
    require(is_count(entry["kept"], count + 1), f"{name} is damaged: it keeps {shorten(entry['kept'])} of {count:,}.")
    fan_in = entry["fan_in"]
    require(is_count(fan_in, MAX_WEIGHTS) and fan_in >= 1, f"{name} is damaged: a fan-in is {shorten(fan_in)}.")
    require(DTYPES[entry["dtype"]].is_floating_point, f"{name} is damaged: it has drawn integers.")
    require_stream(entry["mask"], count, name)
    if "signs" not in entry:
        return [entry["mask"]]
    changed = is_count(entry["changed"], entry["kept"] + 1)
    require(changed, f"{name} is damaged: of {entry['kept']:,} signs {shorten(entry['changed'])} have changed.")
    require_stream(entry["signs"], entry["kept"], name)
    return [entry["mask"], entry["signs"]]


def require_stream(size: Any, bits: int, name: str) -> None:
    """Raise PomonaError unless a stream of a size can hold so many bits."""
    fits = is_count(size, 1 << 40) and -(-bits // 8) <= SYMBOLS_PER_BYTE * size
    require(fits, f"{name} is damaged: a stream of {shorten(size)} bytes cannot hold {bits:,} bits.")
