"""Tickets: files that store a network of random weights as a seed, its masks and the few values not in the seed.

    pomonaT1         8 bytes
    version          4 bytes, little-endian; this is version 1
    length           4 bytes, little-endian: size of the header
    header           JSON in UTF-8, compressed by zlib
    body             streams and tensors, in the order of the header
    SHA-256          32 bytes: checksum of everything before it, in every version

The header holds the random stream (its version, `seed` and `distribution`), the `tensors` that were drawn from it,
and the `others`, the rest of the network's state, whose bytes are in the body, little-endian. For each drawn tensor
the body holds the bits of its mask, row-major and eight to a byte (the first in the highest bit), entropy-coded
(`rans`) with frequencies that follow from the number of kept weights. If weights were re-drawn, the body also holds,
for kept weights only:

- for signed constants, the bits of the weights whose sign changed, coded in the same way;
- for uniform weights, the number of the last re-draw of each weight, over all tensors, split into planes of bytes with
  the lowest byte first. Each plane follows the 256 frequencies of its byte values, two bytes each.

A network is restored bit for bit, on any machine and with any version of torch.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import models
from ..core.fused import random_stream as streams
from ..core.fused.random_stream import RandomStream
from ..core.pruner import Pruner
from ..core.score_method import ScoreMethod
from ..core.targets import unwrap
from ..durable import replace_file
from ..errors import PomonaError, require
from ..sharding import refuse_sharded
from ..untrusted import read_bytes, reading
from ..version import __version__
from . import rans
from .ticket_header import DTYPES, FREQUENCIES_SIZE, read_header

MAGIC, VERSION, DIGEST_SIZE = b"pomonaT1", 1, 32
PREFIX = struct.Struct("<II")  # version, size of the header


@dataclass(frozen=True)
class DrawnTensor:
    """A tensor whose weights were drawn from the random stream, and its mask."""

    fan_in: int
    mask: Tensor  # true where a weight is kept
    redraws: Tensor | None = None  # the number of each weight's last re-draw; None if nothing was re-drawn


@dataclass(frozen=True)
class Ticket:
    """The content of a ticket."""

    header: dict[str, Any]
    state: dict[str, Tensor]  # the whole state dict of the network
    masks: dict[str, Tensor]  # of the drawn tensors

    def build(self) -> nn.Module:
        """Return the network in evaluation mode; raise PomonaError if the ticket does not name its model."""
        require(
            bool(self.header["model"]),
            "the ticket does not name its model: build the model, and load ticket.state into it.",
        )
        with reading("the ticket"):
            return models.build_for_state("the ticket", self.header["model"], self.state).eval()


def save(path: str | Path, pruner: Pruner, model: Mapping[str, Any] | None = None) -> int:
    """Write the ticket of a score method's network, finished or not, and return its size in bytes.

    `model` holds the name and options for `pm.models.build`, which `Ticket.build` needs. PomonaError is raised if the
    method trains weights, if the pruner is not attached, or if weights were changed since they were drawn.
    """
    method = pruner.method
    if not isinstance(method, ScoreMethod):
        raise PomonaError(f"{method.name} trains weights: a ticket holds random ones (edge_popup, iterand).")
    require(pruner.model is not None, "the pruner is not attached, and has no network to save.")
    refuse_sharded(pruner.model, "a ticket")  # type: ignore[arg-type]
    drawn = {slot.name: DrawnTensor(slot.target.fan_in, slot.mask, slot.draw_number) for slot in pruner.slots}
    state = unwrap(pruner.model).state_dict()  # type: ignore[arg-type]
    data = dumps(state, drawn, method.stream, model)
    replace_file(path, data)
    return len(data)


def load(path: str | Path) -> Ticket:
    """Read a ticket from a file; raise PomonaError if it is missing, damaged or of a newer version."""
    with reading(f"the ticket '{path}'"):
        return loads(read_bytes(path), f"'{path}'")


def dumps(
    state: Mapping[str, Tensor],
    drawn: Mapping[str, DrawnTensor],
    stream: RandomStream,
    model: Mapping[str, Any] | None = None,
) -> bytes:
    """Return a ticket as bytes.

    `state` is the whole state dict of the network; `drawn` describes the tensors of it that were drawn from `stream`.
    """
    state = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    body: list[bytes] = []
    redraws: list[Tensor] = []
    tensors = []
    for name, tensor in drawn.items():
        kept = tensor.mask.cpu().flatten().nonzero().flatten()
        values = state[name].flatten()[kept]
        fresh = stream.weights_at(name, tensor.fan_in, kept)
        entry: dict[str, Any] = {
            "name": name,
            "shape": list(tensor.mask.shape),
            "dtype": dtype_name(state[name]),
            "fan_in": tensor.fan_in,
            "kept": len(kept),
            "mask": append_bits(body, tensor.mask.cpu().flatten().numpy()),
        }
        if tensor.redraws is not None and stream.distribution == "sc":
            flips = (values != fresh.to(values.dtype)).numpy()
            entry |= {"changed": int(flips.sum()), "signs": append_bits(body, flips)}
            fresh = torch.where(torch.from_numpy(flips), -fresh, fresh)
        elif tensor.redraws is not None:
            redraws.append(tensor.redraws.cpu().flatten()[kept])
            fresh = stream.weights_at(name, tensor.fan_in, kept, redraws[-1])
        refuse_trained_weights(name, state[name], kept, fresh)
        tensors.append(entry)
    others = {name: value for name, value in state.items() if name not in drawn}
    header = {
        "pomona": __version__,
        "model": None if model is None else dict(model),
        "stream": {"version": streams.VERSION, "seed": stream.seed, "distribution": stream.distribution},
        "tensors": tensors,
        "planes": append_byte_planes(body, torch.cat(redraws).numpy()) if redraws else [],
        "others": [{"name": n, "shape": list(t.shape), "dtype": dtype_name(t)} for n, t in others.items()],
    }
    body += [tensor_bytes(value) for value in others.values()]
    compressed = zlib.compress(json.dumps(header).encode(), 9)
    data = b"".join([MAGIC, PREFIX.pack(VERSION, len(compressed)), compressed, *body])
    return data + hashlib.sha256(data).digest()


def loads(data: bytes, name: str = "this") -> Ticket:
    """Return the ticket with the given bytes; raise PomonaError, with `name` for the file, if they are damaged."""
    require(data[: len(MAGIC)] == MAGIC, f"{name} is not a ticket: it does not begin with {MAGIC.decode()}.")
    content, digest = data[:-DIGEST_SIZE], data[-DIGEST_SIZE:]
    require(
        hashlib.sha256(content).digest() == digest,
        f"{name} is damaged: its checksum is not that of its content; copy or export it again.",
    )
    with reading(name):
        return decode_ticket(content, name)


def decode_ticket(content: bytes, name: str) -> Ticket:
    """Return the ticket of bytes whose checksum is right; their header may still be anything."""
    version, length = PREFIX.unpack_from(content, len(MAGIC))
    require(
        version <= VERSION,
        f"{name} is a ticket of version {version}, but this pomona reads up to version {VERSION}: update pomona.",
    )
    start = len(MAGIC) + PREFIX.size
    require(start + length <= len(content), f"{name} is damaged: it ends within its header.")
    header = read_header(content[start : start + length], name, len(content) - start - length)
    return decode_body(header, BodyReader(content, start + length), name)


class BodyReader:
    """A reader of the body, one part after the other."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data, self.position = data, position

    def read_bytes(self, size: int) -> bytes:
        """Return the next bytes."""
        self.position += size
        return self.data[self.position - size : self.position]

    def read_bits(self, size: int, ones: int, count: int) -> np.ndarray:
        """Return `count` bits, of which `ones` are 1, from a stream of `size` bytes."""
        octets = rans.decode(self.read_bytes(size), -(-count // 8), rans.bit_frequencies(ones, count))
        return np.unpackbits(octets, count=count).astype(bool)


def decode_body(header: dict[str, Any], body: BodyReader, name: str) -> Ticket:
    """Return the ticket with a given header and body."""
    stream = RandomStream(header["stream"]["seed"], header["stream"]["distribution"])
    masks, signs = {}, {}
    for entry in header["tensors"]:
        key, shape = entry["name"], torch.Size(entry["shape"])
        masks[key] = torch.from_numpy(body.read_bits(entry["mask"], entry["kept"], shape.numel())).view(shape)
        require(int(masks[key].sum()) == entry["kept"], f"{name} is damaged: a mask does not keep as many as it says.")
        if "signs" in entry:
            signs[key] = torch.from_numpy(body.read_bits(entry["signs"], entry["changed"], entry["kept"]))
    total = sum(entry["kept"] for entry in header["tensors"])
    redraws = torch.zeros(total, dtype=torch.int64)
    for place, size in enumerate(header["planes"]):
        frequencies = np.frombuffer(body.read_bytes(FREQUENCIES_SIZE), "<u2").astype(np.uint64)
        redraws |= torch.from_numpy(rans.decode(body.read_bytes(size), total, frequencies)).long() << 8 * place
    state: dict[str, Tensor] = {}
    used = 0
    for entry in header["tensors"]:
        key = entry["name"]
        kept = masks[key].flatten().nonzero().flatten()
        values = stream.weights_at(key, entry["fan_in"], kept, redraws[used : used + len(kept)])
        if key in signs:
            values = torch.where(signs[key], -values, values)
        weight = torch.zeros(masks[key].numel(), dtype=DTYPES[entry["dtype"]])
        weight[kept] = values.to(weight.dtype)
        state[key] = weight.view(entry["shape"])
        used += len(kept)
    for entry in header["others"]:
        dtype = DTYPES[entry["dtype"]]
        data = bytearray(body.read_bytes(torch.Size(entry["shape"]).numel() * dtype.itemsize))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        state[entry["name"]] = flat.view(entry["shape"])
    return Ticket(header, state, masks)


def append_bits(body: list[bytes], flags: np.ndarray) -> int:
    """Append entropy-coded bits to the body and return how many bytes they take."""
    body.append(rans.encode(np.packbits(flags), rans.bit_frequencies(int(flags.sum()), flags.size)))
    return len(body[-1])


def append_byte_planes(body: list[bytes], numbers: np.ndarray) -> list[int]:
    """Append numbers to the body as byte planes, each behind its frequencies, and return the size of each plane."""
    sizes = []
    for place in range(max(1, -(-int(numbers.max(initial=0)).bit_length() // 8))):
        plane = (numbers >> 8 * place & 0xFF).astype(np.uint8)
        frequencies = rans.count_frequencies(plane)
        coded = rans.encode(plane, frequencies)
        body += [frequencies.astype("<u2").tobytes(), coded]
        sizes.append(len(coded))
    return sizes


def refuse_trained_weights(name: str, weight: Tensor, kept: Tensor, drawn: Tensor) -> None:
    """Raise PomonaError unless a weight holds the drawn values at the kept positions and zeros elsewhere."""
    expected = torch.zeros(weight.numel(), dtype=weight.dtype)
    expected[kept] = drawn.to(weight.dtype)
    if not torch.equal(expected, weight.flatten()):
        raise PomonaError(
            f"{name} holds values that were not drawn: it was trained or edited since, and a ticket holds random "
            "weights only; save the state dict of this network instead."
        )


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's values."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
