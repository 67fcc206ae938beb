"""Tickets: the content and size of the files, and the files that are refused."""

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
from slow_cases import slow_after
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.core.fused.random_stream import RandomStream
from pomona.lab import Recipe, train
from pomona.lab.runs.export import export_run
from pomona.sparse import rans, ticket


def make_network() -> nn.Module:
    """Return a small network with weights from a fixed seed."""
    torch.manual_seed(0)
    return pm.models.build("digits_cnn", affine=False)


def train_steps(
    pruner: pm.Pruner, steps: int = 12, model: nn.Module | None = None, dtype: Any = torch.float32
) -> nn.Module:
    model = make_network() if model is None else model
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


def equal_states(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two state dicts have the same keys, dtypes, shapes and values."""
    return one.keys() == other.keys() and all(
        v.dtype == other[k].dtype and v.shape == other[k].shape and torch.equal(v, other[k]) for k, v in one.items()
    )


@every_method
@pytest.mark.parametrize("dtype", slow_after(1, [torch.float32, torch.float64, torch.bfloat16]))
def test_ticket_restores_the_network(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pruner = METHODS[name]()
    model = train_steps(pruner, dtype=dtype)
    for when in ("before finish", "after finish"):
        size = ticket.save(tmp_path / when, pruner, {"name": "digits_cnn", "affine": False})
        assert size == (tmp_path / when).stat().st_size
        back = ticket.load(tmp_path / when)
        assert equal_states(back.state, model.state_dict())
        assert equal_states(back.masks, pruner.masks())
        pruner.finish()
    changed = [facts.get("changed") for facts in back.header["tensors"]]
    assert all(n is None for n in changed) or (name == "iterand sc" and sum(changed) > 0)
    assert bool(back.header["planes"]) == name.startswith("iterand ku")


def test_transposed_convolution_and_memory_formats() -> None:
    """The fan-in of a transposed convolution counts dimension 0 of its weight; memory formats do not matter."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ConvTranspose2d(6, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pruner = pm.IteRand(sparsity=0.5, every=2, rate=0.5, distribution="ku")
    train_steps(pruner, model=model)
    drawn = {s.name: ticket.DrawnTensor(s.target.fan_in, s.mask, s.draw_number) for s in pruner.slots}
    assert drawn["1.weight"].fan_in == 6 * 9
    back = ticket.loads(ticket.dumps(model.state_dict(), drawn, pruner.method.stream))
    assert equal_states(back.state, dict(model.state_dict()))


def test_network_without_kept_weights() -> None:
    drawn = {"a": ticket.DrawnTensor(4, torch.zeros(3, 4, dtype=torch.bool), torch.zeros(3, 4, dtype=torch.int32))}
    for distribution in ("sc", "ku"):
        state = {"a": torch.zeros(3, 4), "n": torch.tensor(7), "e": torch.empty(0, 2)}
        back = ticket.loads(ticket.dumps(state, drawn, RandomStream(1, distribution)))
        assert equal_states(back.state, state)


def test_large_redraw_numbers_take_several_planes() -> None:
    stream, mask = RandomStream(5, "ku"), torch.rand(50, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    redraws = torch.randint(0, 70_000, mask.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    state = {"a": stream.weights("a", 40, torch.empty(mask.shape), redraws) * mask}
    back = ticket.loads(ticket.dumps(state, {"a": ticket.DrawnTensor(40, mask, redraws)}, stream))
    assert len(back.header["planes"]) == 3
    assert equal_states(back.state, state)


PRINT_LOGITS_HASH = """
import hashlib, sys, torch
from pomona.sparse import ticket
torch.set_num_threads(1)
model = ticket.load(sys.argv[1]).build()
x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(2))
with torch.no_grad():
    print(hashlib.sha256(model(x).numpy().tobytes()).hexdigest())
"""


def test_logits_are_bit_identical_in_another_process(tmp_path: Path) -> None:
    pruner = METHODS["iterand ku"]()
    model = train_steps(pruner).eval()
    pruner.finish()
    ticket.save(tmp_path / "net.ticket", pruner, {"name": "digits_cnn", "affine": False})
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = hashlib.sha256(model(x).numpy().tobytes()).hexdigest()
    out = subprocess.run(
        [sys.executable, "-c", PRINT_LOGITS_HASH, tmp_path / "net.ticket"], capture_output=True, text=True
    )
    assert out.stdout.strip() == expected, out.stderr


@pytest.mark.slow
def test_size_of_a_resnet18_at_60_percent() -> None:
    """Edge-popup takes at most 1/30 of the float32 state; IteRand with signed constants and random signs 1/22."""
    model = pm.models.build("resnet18", affine=False)
    generator, stream = torch.Generator().manual_seed(0), RandomStream(0, "sc")
    popup, iterand, drawn, redrawn = dict(model.state_dict()), dict(model.state_dict()), {}, {}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            random = torch.randint(0, 1000, parameter.shape, generator=generator)
            mask, fan_in = random < 400, parameter[0].numel()
            popup[name] = stream.weights(name, fan_in, parameter.detach()).masked_fill_(~mask, 0)
            iterand[name] = torch.where(random % 2 == 0, -popup[name], popup[name])
            drawn[name] = ticket.DrawnTensor(fan_in, mask)
            redrawn[name] = ticket.DrawnTensor(fan_in, mask, random)
    whole = sum(value.numel() * value.element_size() for value in popup.values())
    assert whole > 44e6
    assert whole / len(ticket.dumps(popup, drawn, stream)) >= 30
    assert whole / len(ticket.dumps(iterand, redrawn, stream)) >= 22


# ---- the file format, read by hand


def test_file_follows_its_specification() -> None:
    """A reader written only from the specification, for one tensor of signed constants."""
    stream = RandomStream(9, "sc")
    mask = torch.tensor([[True, False, True], [True, True, False]])
    weight = stream.weights("w", 3, torch.empty(2, 3))
    weight[0, 0] *= -1
    state = {"w": weight * mask, "b": torch.tensor([1.5, -2.0])}
    data = ticket.dumps(state, {"w": ticket.DrawnTensor(3, mask, torch.zeros(2, 3, dtype=torch.int32))}, stream)
    assert data[:8] == b"pomonaT1"
    version, length = struct.unpack("<II", data[8:16])
    assert version == 1
    header = json.loads(zlib.decompress(data[16 : 16 + length]))
    assert header["stream"] == {"version": 1, "seed": 9, "distribution": "sc"}
    (facts,) = header["tensors"]
    assert (facts["name"], facts["shape"], facts["kept"], facts["changed"]) == ("w", [2, 3], 4, 1)
    body = data[16 + length : -32]
    bits, signs = body[: facts["mask"]], body[facts["mask"] : facts["mask"] + facts["signs"]]
    assert rans.decode(bits, 1, rans.bit_frequencies(4, 6)).tolist() == [0b10111000]
    assert rans.decode(signs, 1, rans.bit_frequencies(1, 4)).tolist() == [0b10000000]
    assert body[facts["mask"] + facts["signs"] :] == struct.pack("<2f", 1.5, -2.0)
    assert data[-32:] == hashlib.sha256(data[:-32]).digest()


def test_stored_ticket_of_version_1_can_be_read() -> None:
    """These bytes must always be readable: an edit that breaks them breaks every existing ticket."""
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


# ---- refused tickets


def make_small_ticket() -> bytes:
    """Return the ticket of a small network with re-drawn uniform weights."""
    pruner = METHODS["iterand ku"]()
    model = train_steps(pruner, steps=3)
    drawn = {s.name: ticket.DrawnTensor(s.target.fan_in, s.mask, s.draw_number) for s in pruner.slots}
    return ticket.dumps(model.state_dict(), drawn, pruner.method.stream)


def append_checksum(data: bytes) -> bytes:
    """Return the data with a valid checksum."""
    return data + hashlib.sha256(data).digest()


def test_flipped_bit_is_detected() -> None:
    data = make_small_ticket()
    for at in [8, 12, 16, 40, len(data) // 2, len(data) - 33, len(data) - 32, len(data) - 1]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(pm.PomonaError, match="damaged: its checksum"):
            ticket.loads(bytes(damaged))
    with pytest.raises(pm.PomonaError, match="damaged: its checksum"):
        ticket.loads(data[:-1])
    with pytest.raises(pm.PomonaError, match="is not a ticket: it does not begin with pomonaT1"):
        ticket.loads(b"x" + data[1:])
    with pytest.raises(pm.PomonaError, match="is not a ticket: it does not begin with pomonaT1"):
        ticket.loads(b"")


def test_newer_versions_are_refused(tmp_path: Path) -> None:
    data = make_small_ticket()
    newer_version = r"a\.ticket' is a ticket of version 2, but this pomona reads up to version 1: update pomona"
    newer_stream = "a random stream of version 2, but this pomona has version 1: update pomona"
    newer = append_checksum(data[:8] + struct.pack("<I", 2) + data[12:-32])
    (tmp_path / "a.ticket").write_bytes(newer)
    with pytest.raises(pm.PomonaError, match=newer_version):
        ticket.load(tmp_path / "a.ticket")
    length = struct.unpack("<I", data[12:16])[0]
    header = json.loads(zlib.decompress(data[16 : 16 + length]))
    header["stream"]["version"] = 2
    text = zlib.compress(json.dumps(header).encode())
    other = append_checksum(data[:12] + struct.pack("<I", len(text)) + text + data[16 + length : -32])
    with pytest.raises(pm.PomonaError, match=newer_stream):
        ticket.loads(other)
    with pytest.raises(pm.PomonaError, match=r"nothing\.ticket' cannot be read: No such file"):
        ticket.load(tmp_path / "nothing.ticket")


def test_trained_weights_are_refused(tmp_path: Path) -> None:
    pruner = METHODS["edge_popup sc"]()
    model = train_steps(pruner)
    pruner.finish()
    with torch.no_grad():
        model.get_parameter("features.0.weight")[0, 0, 0, 0] += 1
    with pytest.raises(pm.PomonaError, match=r"features\.0\.weight holds values that were not drawn"):
        ticket.save(tmp_path / "x", pruner)
    dpf = pm.DPF()
    train_steps(dpf, steps=3)
    with pytest.raises(pm.PomonaError, match="dpf trains weights: a ticket holds random ones"):
        ticket.save(tmp_path / "x", dpf)
    with pytest.raises(pm.PomonaError, match="not attached"):
        ticket.save(tmp_path / "x", pm.EdgePopup())
    assert not list(tmp_path.iterdir())


def test_build_of_a_ticket_without_a_model_is_refused(tmp_path: Path) -> None:
    pruner = METHODS["edge_popup sc"]()
    train_steps(pruner, steps=2)
    ticket.save(tmp_path / "x", pruner)
    with pytest.raises(pm.PomonaError, match="does not name its model"):
        ticket.load(tmp_path / "x").build()


# ---- tickets of runs


def make_recipe(method: str, **more: Any) -> Recipe:
    """Return a recipe of one epoch on the digits."""
    model = {"name": "digits_cnn", "affine": False, "rho": 0.5}
    options = {"epochs": 1, "batch_size": 256, "device": "cpu"}
    return Recipe.load({"name": "x", "data": "digits", "model": model, "method": method, "train": options, **more})


def no_note(sentence: str) -> None:
    """Ignore a note of `export_run`: a ticket is smaller, and runs no faster."""


@pytest.mark.parametrize("distribution", ["sc", "ku"])
def test_exported_ticket_restores_the_model_of_a_run(distribution: str, tmp_path: Path) -> None:
    recipe = make_recipe(f"iterand(sparsity=0.6, every=2, rate=0.5, distribution='{distribution}')", seed=4)
    train(recipe, tmp_path / "run")
    facts = export_run(tmp_path / "run", "ticket", note=no_note, seconds=0).facts()
    assert Path(facts["file"]) == tmp_path / "run" / "model.ticket"
    assert (facts["method"], facts["seed"], facts["distribution"]) == ("iterand", 4, distribution)
    assert facts["sparsity"] == pytest.approx(0.6, abs=1e-3)
    assert facts["bytes"] == Path(facts["file"]).stat().st_size < facts["state_bytes"] / 5
    from safetensors.torch import load_file

    model = ticket.load(facts["file"]).build()
    assert equal_states(dict(model.state_dict()), load_file(tmp_path / "run" / "model.safetensors"))
    report = export_run(tmp_path / "run", "ticket", tmp_path / "other", note=no_note, seconds=0)
    assert report.file == str(tmp_path / "other")


def test_runs_that_trained_weights_are_refused(tmp_path: Path) -> None:
    train(make_recipe("edge_popup", finetune={"epochs": 1}), tmp_path / "tuned")
    train(make_recipe("dense"), tmp_path / "dense")
    for name in ("tuned", "dense"):
        with pytest.raises(pm.PomonaError, match=f"the last stage of '.*{name}' trained weights"):
            export_run(tmp_path / name, "ticket")
    with pytest.raises(pm.PomonaError, match="not a finished run"):
        export_run(tmp_path / "nothing", "ticket")


def test_ticket_from_another_machine_and_torch_restores_its_network() -> None:
    """A ResNet-18, ρ = 0.5, trained by IteRand on CIFAR-10 on an H200 with torch 2.11; the hash is of its weights."""
    found = ticket.load(Path(__file__).parents[2] / "results" / "models" / "iterand-resnet18.ticket")
    digest = hashlib.sha256()
    for name, value in sorted(found.state.items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    assert digest.hexdigest() == "ea545ee52686e2ec16a2b11ee169e58b36b6f9057ad38893a34cf9650cd6be96"
    model = found.build()
    assert all(torch.equal(value, found.state[name]) for name, value in model.state_dict().items())
