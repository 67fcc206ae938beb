"""Tickets: a network of random weights as the seed that drew them, and what the seed cannot tell.

    pomonaT1         8 bytes
    version          4 bytes, little-endian; this is version 1
    length           4 bytes: of the header
    header           zlib; JSON in UTF-8
    body             streams and tensors, in the order of the header
    SHA-256          32 bytes: of all that stands before, in every version

The header has the stream (its version, `seed` and `distribution`), the `tensors` that were drawn from it and
all `others` of the network's state, which stand in the body as they are, little-endian. Of a drawn tensor the
body has the mask's bits, row-major and eight to a byte (the first in the highest bit), entropy-coded (`rans`)
with the frequencies that follow from how many are kept. Where weights were drawn anew it also has, of kept
weights only: for signed constants the bits that tell which signs changed, coded likewise; for uniform weights
the numbers of their last re-draws, of all tensors together, as planes of bytes, lowest first, each behind
its table of 256 frequencies of two bytes.

A network comes back bit for bit, on any machine and with any torch.
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

from ..core.fused import random_stream as streams
from ..core.fused.random_stream import RandomStream
from ..core.pruner import Pruner
from ..core.score_method import ScoreMethod
from ..core.targets import unwrap
from ..errors import PomonaError, require
from ..version import __version__
from . import rans

MAGIC, VERSION, DIGEST = b"pomonaT1", 1, 32
HEAD = struct.Struct("<II")


@dataclass(frozen=True)
class Drawn:
    """A tensor that was drawn: what is kept of it, and the number of each weight's last re-draw, if there were any."""

    fan_in: int
    mask: Tensor
    redraws: Tensor | None = None


@dataclass(frozen=True)
class Ticket:
    """What a ticket holds."""

    header: dict[str, Any]
    state: dict[str, Tensor]  # the network's whole state
    masks: dict[str, Tensor]  # of the tensors that were drawn

    def build(self) -> nn.Module:
        """The network itself, where the ticket tells which of `pm.models` it is."""
        from .. import models

        require(bool(self.header["model"]), "the ticket does not tell its model: build it, and load ticket.state.")
        model = models.build(**self.header["model"])
        model.load_state_dict(self.state)
        return model.eval()


def save(path: str | Path, pruner: Pruner, model: Mapping[str, Any] | None = None) -> int:
    """Write the ticket of a score method's network, finished or not, and return its size in bytes.

    `model` is the name and the options for `pm.models.build`, so that a reader need not know them.
    """
    method = pruner.method
    if not isinstance(method, ScoreMethod):
        raise PomonaError(f"{method.name} trains weights: a ticket holds random ones (edge_popup, iterand).")
    require(pruner.model is not None, "the pruner is not attached, and has no network to save.")
    drawn = {slot.name: Drawn(slot.target.fan_in, slot.mask, slot.draw_number) for slot in pruner.slots}
    state = unwrap(pruner.model).state_dict()  # type: ignore[arg-type]
    data = dumps(state, drawn, method.stream, model)
    partial = Path(f"{path}.part")
    partial.write_bytes(data)
    partial.replace(path)
    return len(data)


def load(path: str | Path) -> Ticket:
    """Read a ticket."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PomonaError(f"the ticket '{path}' cannot be read: {error.strerror}.") from error
    return loads(data, f"'{path}'")


def dumps(
    state: Mapping[str, Tensor],
    drawn: Mapping[str, Drawn],
    stream: RandomStream,
    model: Mapping[str, Any] | None = None,
) -> bytes:
    """A ticket as bytes. `state` is the network's whole state, of which some tensors were drawn."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    body: list[bytes] = []
    numbers: list[Tensor] = []
    tensors = []
    for name, one in drawn.items():
        kept = one.mask.cpu().flatten().nonzero().flatten()
        values = state[name].flatten()[kept]
        fresh = stream.weights_at(name, one.fan_in, kept)
        facts = {"name": name, "shape": list(one.mask.shape), "dtype": kind(state[name]), "fan_in": one.fan_in}
        facts |= {"kept": len(kept), "mask": put(body, one.mask.cpu().flatten().numpy())}
        if one.redraws is not None and stream.distribution == "sc":
            flips = (values != fresh.to(values.dtype)).numpy()
            facts |= {"changed": int(flips.sum()), "signs": put(body, flips)}
            fresh = torch.where(torch.from_numpy(flips), -fresh, fresh)
        elif one.redraws is not None:
            numbers.append(one.redraws.cpu().flatten()[kept])
            fresh = stream.weights_at(name, one.fan_in, kept, numbers[-1])
        refuse_trained(name, state[name], kept, fresh)
        tensors.append(facts)
    header = {
        "pomona": __version__,
        "model": None if model is None else dict(model),
        "stream": {"version": streams.VERSION, "seed": stream.seed, "distribution": stream.distribution},
        "tensors": tensors,
        "planes": planes(body, torch.cat(numbers).numpy()) if numbers else [],
        "others": [{"name": n, "shape": list(t.shape), "dtype": kind(t)} for n, t in state.items() if n not in drawn],
    }
    body += [raw(tensor) for name, tensor in state.items() if name not in drawn]
    text = zlib.compress(json.dumps(header).encode(), 9)
    data = b"".join([MAGIC, HEAD.pack(VERSION, len(text)), text, *body])
    return data + hashlib.sha256(data).digest()


def loads(data: bytes, name: str = "this") -> Ticket:
    """A ticket from its bytes."""
    require(data[: len(MAGIC)] == MAGIC, f"{name} is no ticket: it does not begin as one.")
    whole, digest = data[:-DIGEST], data[-DIGEST:]
    require(
        hashlib.sha256(whole).digest() == digest,
        f"{name} is damaged: its checksum is not that of its content; copy or export it again.",
    )
    version, length = HEAD.unpack_from(whole, len(MAGIC))
    require(version <= VERSION, f"{name} is a ticket of version {version}, this is {VERSION}: update pomona.")
    start = len(MAGIC) + HEAD.size
    header = json.loads(zlib.decompress(whole[start : start + length]))
    theirs = header["stream"]["version"]
    require(
        theirs <= streams.VERSION,
        f"{name} draws from a stream of version {theirs}, this is {streams.VERSION}: update pomona.",
    )
    return unfold(header, Reader(whole, start + length))


class Reader:
    """The body, part by part."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def bits(self, size: int, ones: int, count: int) -> np.ndarray:
        """Bits, where so many of them are 1."""
        packed = rans.decode(self.take(size), -(-count // 8), rans.bits(ones, count))
        return np.unpackbits(packed, count=count).astype(bool)


def unfold(header: dict[str, Any], body: Reader) -> Ticket:
    """The network that a header and its body stand for."""
    stream = RandomStream(header["stream"]["seed"], header["stream"]["distribution"])
    masks, signs = {}, {}
    for facts in header["tensors"]:
        name, shape = facts["name"], torch.Size(facts["shape"])
        masks[name] = torch.from_numpy(body.bits(facts["mask"], facts["kept"], shape.numel())).view(shape)
        if "signs" in facts:
            signs[name] = torch.from_numpy(body.bits(facts["signs"], facts["changed"], facts["kept"]))
    total = sum(facts["kept"] for facts in header["tensors"])
    numbers = torch.zeros(total, dtype=torch.int64)
    for place, size in enumerate(header["planes"]):
        table = np.frombuffer(body.take(512), "<u2").astype(np.uint64)
        numbers |= torch.from_numpy(rans.decode(body.take(size), total, table)).long() << 8 * place
    state: dict[str, Tensor] = {}
    used = 0
    for facts in header["tensors"]:
        name = facts["name"]
        kept = masks[name].flatten().nonzero().flatten()
        values = stream.weights_at(name, facts["fan_in"], kept, numbers[used : used + len(kept)])
        if name in signs:
            values = torch.where(signs[name], -values, values)
        weight = torch.zeros(masks[name].numel(), dtype=getattr(torch, facts["dtype"]))
        weight[kept] = values.to(weight.dtype)
        state[name] = weight.view(facts["shape"])
        used += len(kept)
    for facts in header["others"]:
        dtype = getattr(torch, facts["dtype"])
        data = bytearray(body.take(torch.Size(facts["shape"]).numel() * dtype.itemsize))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        state[facts["name"]] = flat.view(facts["shape"])
    return Ticket(header, state, masks)


def put(body: list[bytes], flags: np.ndarray) -> int:
    """Add bits to the body, entropy-coded, and return how many bytes they take."""
    body.append(rans.encode(np.packbits(flags), rans.bits(int(flags.sum()), flags.size)))
    return len(body[-1])


def planes(body: list[bytes], numbers: np.ndarray) -> list[int]:
    """Add numbers to the body, a plane of bytes at a time, and return how many bytes each takes behind its table."""
    sizes = []
    for place in range(max(1, -(-int(numbers.max(initial=0)).bit_length() // 8))):
        plane = (numbers >> 8 * place & 0xFF).astype(np.uint8)
        table = rans.histogram(plane)
        coded = rans.encode(plane, table)
        body += [table.astype("<u2").tobytes(), coded]
        sizes.append(len(coded))
    return sizes


def refuse_trained(name: str, weight: Tensor, kept: Tensor, drawn: Tensor) -> None:
    """Refuse weights that are not the stream's, or not zero where they are pruned."""
    expected = torch.zeros(weight.numel(), dtype=weight.dtype)
    expected[kept] = drawn.to(weight.dtype)
    if not torch.equal(expected, weight.flatten()):
        raise PomonaError(
            f"{name} holds values that were not drawn: it was trained or edited since, and a ticket keeps random "
            "weights only; save the state of such a network as it is."
        )


def kind(tensor: Tensor) -> str:
    """The name of a tensor's type."""
    return str(tensor.dtype).removeprefix("torch.")


def raw(tensor: Tensor) -> bytes:
    """A tensor's bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
