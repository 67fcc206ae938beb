"""Tickets: the coder, what a file holds, how small it is, and what damages it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.core.fused.random_stream import RandomStream
from pomona.lab import Recipe, train
from pomona.lab.runs.export import ticket as export_ticket
from pomona.sparse import rans, ticket

# ---- the coder


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(1, 20))
def test_bytes_come_back(data: bytes, times: int) -> None:
    symbols = np.frombuffer(data * times, np.uint8)
    table = rans.histogram(symbols)
    assert table.sum() == rans.WHOLE
    assert table.max() < rans.WHOLE
    assert np.array_equal(rans.decode(rans.encode(symbols, table), len(symbols), table), symbols)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 40_000), st.floats(0, 1), st.integers(0, 99))
def test_bits_come_back(count: int, share: float, seed: int) -> None:
    packed = np.packbits(np.random.default_rng(seed).random(count) < share)
    ones = int(np.unpackbits(packed).sum())
    table = rans.bits(ones, count)
    assert table.sum() == rans.WHOLE
    assert np.array_equal(rans.decode(rans.encode(packed, table), len(packed), table), packed)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4, 0.5, 0.9])
def test_bits_take_their_entropy(share: float) -> None:
    count = 2_000_000
    flags = np.random.default_rng(0).random(count) < share
    ones = int(flags.sum())
    p = ones / count
    entropy = -p * math.log2(p) - (1 - p) * math.log2(1 - p)
    size = 8 * len(rans.encode(np.packbits(flags), rans.bits(ones, count)))
    assert entropy * count - 64 <= size <= (entropy + 0.006) * count


def test_frequencies_by_hand() -> None:
    """Bits that are 1 once in three times: a byte of k ones has (1/3)^k (2/3)^(8−k) of 2¹⁶ − 256, and 1 more."""
    table = rans.bits(1, 3)
    assert table[0b10010001] == 1 + (65536 - 256) * 2**5 // 3**8
    assert table[0xFF] == 1 + (65536 - 256) // 3**8
    assert table[0] == 65536 - sum(int(f) for f in table[1:])
    assert rans.scaled([0, 5, 0]).tolist() == [1, 65535, 0]
    assert rans.scaled([0, 0, 0]).tolist() == [65535, 1, 0]
    assert rans.scaled([3, 1]).tolist() == [1 + 65534 * 3 // 4 + 1, 1 + 65534 // 4]


def test_one_lane_by_hand() -> None:
    """Two symbols of a half each: the state 2³² takes 1, then 0, and gives them back in that order."""
    table = np.zeros(256, np.uint64)
    table[:2] = 2**15
    data = rans.encode(np.array([0, 1], np.uint8), table)
    after_one = ((2**32 // 2**15) << 16) + 2**15  # a remainder of 0, and where 1 starts
    assert struct.unpack("<Q", data) == ((after_one // 2**15 << 16) + after_one % 2**15,)
    assert rans.decode(data, 2, table).tolist() == [0, 1]


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-4], lambda d: d + b"\0\0\0\0", lambda d: d[:3], lambda d: b"\1" + d[1:]]
)
def test_a_damaged_stream_is_refused(damage: Any) -> None:
    symbols = np.random.default_rng(0).integers(0, 5, 5000).astype(np.uint8)
    table = rans.histogram(symbols)
    with pytest.raises(pm.PomonaError, match="damaged"):
        rans.decode(damage(rans.encode(symbols, table)), len(symbols), table)


# ---- tickets


def network() -> nn.Module:
    torch.manual_seed(0)
    return pm.models.build("digits_cnn", affine=False)


def trained(
    pruner: pm.Pruner, steps: int = 12, model: nn.Module | None = None, dtype: Any = torch.float32
) -> nn.Module:
    model = network() if model is None else model
    model = model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    pruner.attach(model, optimizer, total_steps=steps)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(16, 1, 8, 8, generator=generator), torch.randint(10, (16,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()
    return model


METHODS = {
    "edge_popup sc": lambda: pm.EdgePopup(sparsity=0.6, seed=3),
    "edge_popup ku": lambda: pm.EdgePopup(sparsity=0.6, seed=3, distribution="ku"),
    "iterand sc": lambda: pm.IteRand(sparsity=0.6, seed=3, every=2, rate=0.5),
    "iterand ku": lambda: pm.IteRand(sparsity=0.6, seed=3, every=2, rate=0.5, distribution="ku"),
    "iterand ku global": lambda: pm.IteRand(sparsity=0.9, every=1, rate=1.0, distribution="ku", allocation="global"),
}
every_method = pytest.mark.parametrize("name", METHODS)


def same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        v.dtype == other[k].dtype and v.shape == other[k].shape and torch.equal(v, other[k]) for k, v in one.items()
    )


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_ticket_is_the_network(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pruner = METHODS[name]()
    model = trained(pruner, dtype=dtype)
    for when in ("before finish", "after finish"):
        size = ticket.save(tmp_path / when, pruner, {"name": "digits_cnn", "affine": False})
        assert size == (tmp_path / when).stat().st_size
        back = ticket.load(tmp_path / when)
        assert same_state(back.state, model.state_dict())
        assert same_state(back.masks, pruner.masks())
        pruner.finish()
    changed = [facts.get("changed") for facts in back.header["tensors"]]
    assert all(n is None for n in changed) or (name == "iterand sc" and sum(changed) > 0)
    assert bool(back.header["planes"]) == name.startswith("iterand ku")


def test_other_layers_and_layouts() -> None:
    """A transposed convolution counts its fan-in behind the outputs; memory formats do not matter."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ConvTranspose2d(6, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pruner = pm.IteRand(sparsity=0.5, every=2, rate=0.5, distribution="ku")
    trained(pruner, model=model)
    drawn = {s.name: ticket.Drawn(s.target.fan_in, s.mask, s.draw_number) for s in pruner.slots}
    assert drawn["1.weight"].fan_in == 6 * 9
    back = ticket.loads(ticket.dumps(model.state_dict(), drawn, pruner.method.stream))
    assert same_state(back.state, dict(model.state_dict()))


def test_an_empty_network_of_nothing_kept() -> None:
    drawn = {"a": ticket.Drawn(4, torch.zeros(3, 4, dtype=torch.bool), torch.zeros(3, 4, dtype=torch.int32))}
    for distribution in ("sc", "ku"):
        state = {"a": torch.zeros(3, 4), "n": torch.tensor(7), "e": torch.empty(0, 2)}
        back = ticket.loads(ticket.dumps(state, drawn, RandomStream(1, distribution)))
        assert same_state(back.state, state)


def test_many_redraws_take_several_planes() -> None:
    stream, mask = RandomStream(5, "ku"), torch.rand(50, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    redraws = torch.randint(0, 70_000, mask.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    state = {"a": stream.weights("a", 40, torch.empty(mask.shape), redraws) * mask}
    back = ticket.loads(ticket.dumps(state, {"a": ticket.Drawn(40, mask, redraws)}, stream))
    assert len(back.header["planes"]) == 3
    assert same_state(back.state, state)


FRESH = """
import hashlib, sys, torch
from pomona.sparse import ticket
torch.set_num_threads(1)
model = ticket.load(sys.argv[1]).build()
x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(2))
with torch.no_grad():
    print(hashlib.sha256(model(x).numpy().tobytes()).hexdigest())
"""


def test_the_same_logits_bit_for_bit_in_a_fresh_process(tmp_path: Path) -> None:
    pruner = METHODS["iterand ku"]()
    model = trained(pruner).eval()
    pruner.finish()
    ticket.save(tmp_path / "net.ticket", pruner, {"name": "digits_cnn", "affine": False})
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        mine = hashlib.sha256(model(x).numpy().tobytes()).hexdigest()
    out = subprocess.run([sys.executable, "-c", FRESH, tmp_path / "net.ticket"], capture_output=True, text=True)
    assert out.stdout.strip() == mine, out.stderr


def test_a_resnet18_at_60_percent_is_small_enough() -> None:
    """Edge-popup at most 1/30 of the float32 state; IteRand with signed constants 1/22, were every sign a toss-up."""
    model = pm.models.build("resnet18", affine=False)
    generator, stream = torch.Generator().manual_seed(0), RandomStream(0, "sc")
    popup, iterand, drawn, redrawn = dict(model.state_dict()), dict(model.state_dict()), {}, {}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            random = torch.randint(0, 1000, parameter.shape, generator=generator)
            mask, fan_in = random < 400, parameter[0].numel()
            popup[name] = stream.weights(name, fan_in, parameter.detach()).masked_fill_(~mask, 0)
            iterand[name] = torch.where(random % 2 == 0, -popup[name], popup[name])
            drawn[name] = ticket.Drawn(fan_in, mask)
            redrawn[name] = ticket.Drawn(fan_in, mask, random)
    whole = sum(value.numel() * value.element_size() for value in popup.values())
    assert whole > 44e6
    assert whole / len(ticket.dumps(popup, drawn, stream)) >= 30
    assert whole / len(ticket.dumps(iterand, redrawn, stream)) >= 22


# ---- a format that others may read: the file by hand


def test_the_file_as_it_is_specified() -> None:
    """A reader written from the specification alone, for one tensor of signed constants."""
    stream = RandomStream(9, "sc")
    mask = torch.tensor([[True, False, True], [True, True, False]])
    weight = stream.weights("w", 3, torch.empty(2, 3))
    weight[0, 0] *= -1
    state = {"w": weight * mask, "b": torch.tensor([1.5, -2.0])}
    data = ticket.dumps(state, {"w": ticket.Drawn(3, mask, torch.zeros(2, 3, dtype=torch.int32))}, stream)
    assert data[:8] == b"pomonaT1"
    version, length = struct.unpack("<II", data[8:16])
    assert version == 1
    header = json.loads(zlib.decompress(data[16 : 16 + length]))
    assert header["stream"] == {"version": 1, "seed": 9, "distribution": "sc"}
    (facts,) = header["tensors"]
    assert (facts["name"], facts["shape"], facts["kept"], facts["changed"]) == ("w", [2, 3], 4, 1)
    body = data[16 + length : -32]
    bits, signs = body[: facts["mask"]], body[facts["mask"] : facts["mask"] + facts["signs"]]
    assert rans.decode(bits, 1, rans.bits(4, 6)).tolist() == [0b10111000]
    assert rans.decode(signs, 1, rans.bits(1, 4)).tolist() == [0b10000000]
    assert body[facts["mask"] + facts["signs"] :] == struct.pack("<2f", 1.5, -2.0)
    assert data[-32:] == hashlib.sha256(data[:-32]).digest()


def test_a_ticket_written_by_version_1_can_always_be_read() -> None:
    """Bytes of this format, for ever: an edit that breaks them breaks every ticket there is."""
    data = zlib.decompress(base64.b85decode(GOLDEN.replace("\n", "")))
    back = ticket.loads(data)
    bound = float(np.float32(math.sqrt(6 / 3)))
    assert back.masks["w"].tolist() == [[True, False, True], [False, True, True]]
    assert back.state["w"].abs().max() < bound
    assert [float(v).hex() for v in back.state["w"].flatten()] == GOLDEN_WEIGHTS
    assert back.state["b"].tolist() == [0.25]


GOLDEN = """
c-kw-&&|(E3^8P6U|`q?#1*%4`z~@d8}PW+FMSf}vbO16xQpA7j-=e~wbIUizN@~=OwRv4@6MBF4DZ9z1@pKznfM!fh^)y|IDF*Y
u?@V1$}u<PKP=Eab8geQR0op{YgX^dEQvIob<?1@=H2%nod-7^K4~$DH;>!r7PHPemCehiv~up<vCU)3yC+UHu?%jH4PH4pDc}07
^L<H@qI~4EPnvD6b{44@rMHxXUg=!by2IjPe&+wsS^slwc7Ntw=ooNfM*hs1GeNF*07L2nT9`QsXaIB>7(nUZz-Ww(Y~WnY38owD
bZc_=FW7lXHUDmibhOKvg)2_Rc?l*?5pc;DQJj+Ae;WX9334I
"""
GOLDEN_WEIGHTS = [
    "-0x1.0b0df40000000p+0",
    "0x0.0p+0",
    "0x1.4fc6fc0000000p+0",
    "0x0.0p+0",
    "0x1.56ef800000000p-3",
    "0x1.5822420000000p+0",
]


# ---- what is refused


def small() -> bytes:
    pruner = METHODS["iterand ku"]()
    model = trained(pruner, steps=3)
    drawn = {s.name: ticket.Drawn(s.target.fan_in, s.mask, s.draw_number) for s in pruner.slots}
    return ticket.dumps(model.state_dict(), drawn, pruner.method.stream)


def resealed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def test_a_flipped_bit_anywhere_is_found() -> None:
    data = small()
    for at in [8, 12, 16, 40, len(data) // 2, len(data) - 33, len(data) - 32, len(data) - 1]:
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        with pytest.raises(pm.PomonaError, match="damaged: its checksum"):
            ticket.loads(bytes(broken))
    with pytest.raises(pm.PomonaError, match="damaged: its checksum"):
        ticket.loads(data[:-1])
    with pytest.raises(pm.PomonaError, match="is no ticket"):
        ticket.loads(b"x" + data[1:])
    with pytest.raises(pm.PomonaError, match="is no ticket"):
        ticket.loads(b"")


def test_newer_versions_are_refused(tmp_path: Path) -> None:
    data = small()
    newer = resealed(data[:8] + struct.pack("<I", 2) + data[12:-32])
    (tmp_path / "a.ticket").write_bytes(newer)
    with pytest.raises(pm.PomonaError, match=r"a\.ticket' is a ticket of version 2, this is 1: update pomona"):
        ticket.load(tmp_path / "a.ticket")
    length = struct.unpack("<I", data[12:16])[0]
    header = json.loads(zlib.decompress(data[16 : 16 + length]))
    header["stream"]["version"] = 2
    text = zlib.compress(json.dumps(header).encode())
    other = resealed(data[:12] + struct.pack("<I", len(text)) + text + data[16 + length : -32])
    with pytest.raises(pm.PomonaError, match="stream of version 2, this is 1: update pomona"):
        ticket.loads(other)
    with pytest.raises(pm.PomonaError, match=r"nothing\.ticket' cannot be read: No such file"):
        ticket.load(tmp_path / "nothing.ticket")


def test_trained_weights_are_no_ticket(tmp_path: Path) -> None:
    pruner = METHODS["edge_popup sc"]()
    model = trained(pruner)
    pruner.finish()
    with torch.no_grad():
        model.get_parameter("features.0.weight")[0, 0, 0, 0] += 1
    with pytest.raises(pm.PomonaError, match=r"features\.0\.weight holds values that were not drawn"):
        ticket.save(tmp_path / "x", pruner)
    dpf = pm.DPF()
    trained(dpf, steps=3)
    with pytest.raises(pm.PomonaError, match="dpf trains weights: a ticket holds random ones"):
        ticket.save(tmp_path / "x", dpf)
    with pytest.raises(pm.PomonaError, match="not attached"):
        ticket.save(tmp_path / "x", pm.EdgePopup())
    assert not list(tmp_path.iterdir())


def test_a_ticket_without_a_model_says_so(tmp_path: Path) -> None:
    pruner = METHODS["edge_popup sc"]()
    trained(pruner, steps=2)
    ticket.save(tmp_path / "x", pruner)
    with pytest.raises(pm.PomonaError, match="does not tell its model"):
        ticket.load(tmp_path / "x").build()


# ---- a run


def recipe(method: str, **more: Any) -> Recipe:
    model = {"name": "digits_cnn", "affine": False, "rho": 0.5}
    options = {"epochs": 1, "batch_size": 256, "device": "cpu"}
    return Recipe.load({"name": "x", "data": "digits", "model": model, "method": method, "train": options, **more})


@pytest.mark.parametrize("distribution", ["sc", "ku"])
def test_a_runs_ticket_is_its_model(distribution: str, tmp_path: Path) -> None:
    made = recipe(f"iterand(sparsity=0.6, every=2, rate=0.5, distribution='{distribution}')", seed=4)
    train(made, tmp_path / "run")
    facts = export_ticket(tmp_path / "run")
    assert Path(facts["file"]) == tmp_path / "run" / "model.ticket"
    assert (facts["method"], facts["seed"], facts["distribution"]) == ("iterand", 4, distribution)
    assert facts["sparsity"] == pytest.approx(0.6, abs=1e-3)
    assert facts["bytes"] == Path(facts["file"]).stat().st_size < facts["state_bytes"] / 5
    from safetensors.torch import load_file

    model = ticket.load(facts["file"]).build()
    assert same_state(dict(model.state_dict()), load_file(tmp_path / "run" / "model.safetensors"))
    assert export_ticket(tmp_path / "run", tmp_path / "other")["file"] == str(tmp_path / "other")


def test_runs_without_a_ticket(tmp_path: Path) -> None:
    train(recipe("edge_popup", finetune={"epochs": 1}), tmp_path / "tuned")
    train(recipe("dense"), tmp_path / "dense")
    for name in ("tuned", "dense"):
        with pytest.raises(pm.PomonaError, match=f"the last stage of '.*{name}' trained weights"):
            export_ticket(tmp_path / name)
    with pytest.raises(pm.PomonaError, match="no finished run"):
        export_ticket(tmp_path / "nothing")


def test_a_ticket_from_another_machine_and_torch_is_the_network_trained_there() -> None:
    """ResNet-18, ρ = 0.5, trained by IteRand on CIFAR-10 on an H200 with torch 2.11; the sum is that of its weights."""
    found = ticket.load(Path(__file__).parents[2] / "results" / "models" / "iterand-resnet18.ticket")
    told = hashlib.sha256()
    for name, value in sorted(found.state.items()):
        told.update(name.encode() + value.contiguous().numpy().tobytes())
    assert told.hexdigest() == "ea545ee52686e2ec16a2b11ee169e58b36b6f9057ad38893a34cf9650cd6be96"
    model = found.build()
    assert all(torch.equal(value, found.state[name]) for name, value in model.state_dict().items())
