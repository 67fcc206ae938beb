"""Tickets with a right checksum and a wrong content: refused before anything of their size is made."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pomona as pm
from pomona.sparse import ticket

Header = dict[str, Any]


@pytest.fixture(scope="module", params=["sc", "ku"])
def valid(request: pytest.FixtureRequest) -> bytes:
    """Return the ticket of a small network whose weights were drawn again."""
    torch.manual_seed(0)
    model = pm.models.build("mlp", hidden=(16,), in_features=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pm.IteRand(sparsity=0.6, every=1, rate=0.5, distribution=request.param)
    pruner.attach(model, optimizer, total_steps=3)
    for _ in range(3):
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
    drawn = {s.name: ticket.DrawnTensor(s.target.fan_in, s.mask, s.draw_number) for s in pruner.slots}
    options = {"name": "mlp", "hidden": [16], "in_features": 64}
    return ticket.dumps(model.state_dict(), drawn, pruner.method.stream, options)


def split(data: bytes) -> tuple[Header, bytes]:
    """Return the header and the body of a ticket."""
    start = len(ticket.MAGIC) + ticket.PREFIX.size
    _, length = ticket.PREFIX.unpack_from(data, len(ticket.MAGIC))
    return json.loads(zlib.decompress(data[start : start + length])), data[start + length : -ticket.DIGEST_SIZE]


def seal(header: bytes, body: bytes) -> bytes:
    """Return a ticket with a compressed header, a body and the right checksum."""
    content = ticket.MAGIC + ticket.PREFIX.pack(ticket.VERSION, len(header)) + header + body
    return content + hashlib.sha256(content).digest()


def forge(data: bytes, edit: Callable[[Header], Any]) -> bytes:
    """Return a ticket with an edited header and the right checksum."""
    header, body = split(data)
    edit(header)
    return seal(zlib.compress(json.dumps(header).encode()), body)


def set_first(key: str, value: Any) -> Callable[[Header], None]:
    return lambda header: header["tensors"][0].__setitem__(key, value)


def test_a_ticket_that_was_taken_apart_and_sealed_again_is_read(valid: bytes):
    assert ticket.loads(forge(valid, lambda header: None)).build() is not None


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_first("shape", [2**20, 2**20]), "tensors of 1,099,511,62"),
        (set_first("shape", [2**13, 2**13]), "a stream of .* bytes cannot hold 67,108,864 bits"),
        (set_first("shape", [-1, 64]), "a tensor has the shape"),
        (set_first("shape", [1.5]), "a tensor has the shape"),
        (set_first("shape", [1] * 100), "a tensor has the shape"),
        (set_first("shape", "ab"), "a tensor has the shape"),
        (set_first("dtype", "int8"), "it has drawn integers"),
        (set_first("dtype", "Tensor"), "a tensor has the dtype Tensor"),
        (set_first("kept", 10**6), "it keeps 1000000 of 1,024"),
        (set_first("kept", 7), "damaged"),
        (set_first("mask", -4), "a stream of -4 bytes cannot hold"),
        (set_first("mask", 10**15), "a stream of 1000000000000000 bytes cannot hold"),
        (set_first("fan_in", 0), "a fan-in is 0"),
        (set_first("name", ["x"]), "do not have names of their own"),
        (lambda h: h["stream"].__setitem__("seed", -1), "its seed is -1"),
        (lambda h: h["stream"].__setitem__("seed", 1.5), r"its seed is 1\.5"),
        (lambda h: h["stream"].__setitem__("version", "1"), "its random stream has no version"),
        (lambda h: h["stream"].__setitem__("distribution", []), "it has the distribution"),
        (lambda h: h.__setitem__("planes", [4] * 100), "it has 100 planes"),
        (lambda h: h.__setitem__("planes", [-4]), "a plane has no size"),
        (lambda h: h.__setitem__("model", "mlp"), "does not name its model"),
        (lambda h: h["others"].append({"name": "x", "shape": [2**27], "dtype": "float64"}), "its body has"),
        (lambda h: h["tensors"].append(h["tensors"][0]), "do not have names of their own"),
        (lambda h: h.pop("others"), "it has no 'others'"),
        (lambda h: h.pop("stream"), "it has no 'stream'"),
        (lambda h: h.__setitem__("tensors", 3), "damaged"),
    ],
)
def test_a_header_that_cannot_be_right_is_refused(valid: bytes, edit: Callable[[Header], Any], message: str):
    data = forge(valid, edit)
    tracemalloc.start()
    try:
        with pytest.raises(pm.PomonaError, match=message):
            ticket.loads(data, "the file")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_header_that_inflates_without_end_is_refused(valid: bytes):
    bomb = zlib.compressobj(9)
    packed = b"".join(bomb.compress(b" " * (1 << 20)) for _ in range(256)) + bomb.flush()  # 256 MiB of spaces
    tracemalloc.start()
    try:
        with pytest.raises(pm.PomonaError, match="more than the 16,777,216 bytes that are read"):
            ticket.loads(seal(packed, b""), "the file")
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "mlp", "hidden": [2**20, 2**20], "in_features": 64}, r"has layers\..* its network 'mlp' as"),
        ({"name": "mlp", "hidden": [1] * 1_000_000, "in_features": 64}, "hidden takes at most 1,000 widths"),
        ({"name": "mlp", "hidden": [2**60], "in_features": 64}, "hidden takes widths up to 16,777,216"),
        ({"name": "lstm_lm", "layers": 10**9}, "layers must be at most 1,000"),
        ({"name": "mlp", "evil": 1}, "unknown option of model 'mlp' 'evil'"),
        ({"name": "../mlp"}, "unknown model"),
    ],
)
def test_a_network_that_does_not_fit_is_not_built(valid: bytes, options: dict[str, Any], message: str):
    found = ticket.loads(forge(valid, lambda header: header.__setitem__("model", options)))
    tracemalloc.start()
    try:
        with pytest.raises(pm.PomonaError, match=message):
            found.build()
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_a_body_that_was_changed_is_refused_or_read(valid: bytes):
    header, body = split(valid)
    packed = zlib.compress(json.dumps(header).encode())
    refused = 0
    for place in range(0, len(body), 7):
        changed = bytearray(body)
        changed[place] ^= 0x55
        try:
            ticket.loads(seal(packed, bytes(changed))).build()
        except pm.PomonaError:
            refused += 1
    assert refused > 0
