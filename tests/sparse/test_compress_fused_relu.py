"""`compress` with convolutions that stay dense and compute their ReLU: the choice, and the files."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import prune_balanced
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from substitute_cudnn import Cudnn, child_types, convolution, images
from torch import Tensor, nn

import pomona as pm
from pomona.sparse import Compression, compress, decompress, load, save
from pomona.sparse.compress import DENSE_FUSED, find_block
from pomona.sparse.files import METADATA_KEY, checksum
from pomona.sparse.layers import Conv2dReLU, PackedConv2d, PackedLinear
from pomona.sparse.surgery import Fused

KERNEL = ", with its ReLU in one kernel"
DENSE = " alone, but the whole model is faster dense"


def network() -> nn.Sequential:
    """A convolution that can be packed, one that cannot, one that no ReLU follows, and a linear layer."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(inplace=True)]
    rest = [nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 16, 8), nn.ReLU()]
    return prune_balanced(nn.Sequential(*convolutions, *rest), 4, 1)


def sample() -> Tensor:
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))


Race = Callable[[dict[str, float], dict[str, float]], None]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Race:
    """Times that are told beforehand, by layer and by whole model, in place of measured ones."""

    def tell(alone: dict[str, float], whole: dict[str, float]) -> None:
        module = sys.modules[find_block.__module__]

        def race(sides: Sequence[Callable[[], Any]], *_: Any, **__: Any) -> list[float]:
            ways = ["dense", "fused", "packed"] if len(sides) == 3 else ["dense", "packed"]
            outputs = [side() for side in sides]
            assert all(torch.allclose(y, outputs[0], atol=1e-5) for y in outputs)
            grouped = len(sides) == 2 and outputs[0].shape == (2, 8, 4, 4)
            return [alone[way] for way in (["dense", "fused"] if grouped else ways)]

        def times(sides: dict[str, nn.Module], *_: Any) -> tuple[dict[str, float], dict[str, float]]:
            assert child_types(sides["all packed"])[-4:] == PACKED
            for way in {"all packed", DENSE_FUSED} & sides.keys():  # the convolution that cannot be packed
                assert (child_types(sides[way])[-6:-4] == BOTH) == (DENSE_FUSED in sides)
            return {way: whole[way] for way in sides}, {}

        monkeypatch.setattr(module, "median_seconds", race)
        monkeypatch.setattr(module, "time_models", times)

    return tell


def report(model: nn.Module) -> Compression:
    assert isinstance(model.compression, Compression)
    return model.compression


EVEN = {"dense": 1.0, "all packed": 1.0, "compressed": 1.0, DENSE_FUSED: 1.0}
BOTH = [Conv2dReLU, Fused]
REST = [nn.Conv2d, nn.Flatten, nn.Linear, nn.ReLU]
PACKED = [PackedConv2d, nn.Flatten, PackedLinear, Fused]


@pytest.mark.parametrize(
    ("alone", "expected", "reason", "seconds", "saved"),
    [
        ({"dense": 3.0, "fused": 2.0, "packed": 1.0}, [PackedConv2d, Fused, *BOTH, *PACKED], "2.0× faster", (2, 1), 1),
        (
            {"dense": 3.0, "fused": 1.0, "packed": 3.5},
            [*BOTH, *BOTH, *REST],
            "dense is faster here" + KERNEL,
            (1, 3.5),
            2,
        ),
        (
            {"dense": 1.0, "fused": 2.0, "packed": 3.0},
            [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.ReLU, *REST],
            "dense is faster here",
            (1, 3),
            0,
        ),
    ],
    ids=["packed", "fused", "dense"],
)
def test_the_fastest_of_three_is_taken(
    alone: dict[str, float],
    expected: list[type[nn.Module]],
    reason: str,
    seconds: tuple[float, float],
    saved: float,
    cudnn: Cudnn,
    timed: Race,
) -> None:
    timed(alone, EVEN)
    model, x = network(), sample()
    small = compress(model, x)
    assert child_types(small) == expected
    with torch.no_grad():
        assert torch.allclose(small(x), model(x), atol=1e-5)
    told = report(small)
    first, grouped = told.layers[:2]
    assert (first.reason, first.seconds, first.saved) == (reason, seconds, saved)
    assert grouped.reason == "a grouped convolution" + KERNEL * (saved > 0)
    assert (grouped.seconds, grouped.saved) == (None, saved)
    assert (DENSE_FUSED in told.seconds) == (saved > 0)
    assert (DENSE_FUSED in str(told)) == (saved > 0)
    assert told.facts()["layers"][0]["saved"] == saved
    back = decompress(small)
    assert str(back) == str(model)
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), model.state_dict().values(), strict=True))


def test_all_packed_leaves_dense_convolutions_what_they_gain(cudnn: Cudnn, timed: Race) -> None:
    timed({"dense": 3.0, "fused": 1.0, "packed": 4.0}, EVEN)
    assert child_types(compress(network(), sample(), policy="all")) == [PackedConv2d, Fused, *BOTH, *PACKED]


@pytest.mark.parametrize(
    ("fused", "dense", "compressed", "expected", "reasons"),
    [
        (1.0, 3.0, 2.0, BOTH, ("4.0× faster" + DENSE + KERNEL, "a grouped convolution" + KERNEL)),
        (1.5, 1.0, 2.0, [nn.Conv2d, nn.ReLU], ("4.0× faster" + DENSE, "a grouped convolution")),
        (1.0, 3.0, 1.01, [PackedConv2d, Fused], ("4.0× faster", "a grouped convolution" + KERNEL)),
    ],
    ids=["fused", "dense", "compressed"],
)
def test_a_model_is_as_fast_as_its_fastest_dense_way(
    fused: float,
    dense: float,
    compressed: float,
    expected: list[type[nn.Module]],
    reasons: tuple[str, str],
    cudnn: Cudnn,
    timed: Race,
) -> None:
    whole = {"dense": dense, DENSE_FUSED: fused, "all packed": 9.0, "compressed": compressed}
    timed({"dense": 5.0, "fused": 4.0, "packed": 1.0}, whole)
    small = compress(network(), sample())
    assert child_types(small)[:2] == expected
    told = report(small)
    assert tuple(layer.reason for layer in told.layers[:2]) == reasons
    best = compressed if compressed < 2 else min(dense, fused)
    assert told.seconds == whole | {"compressed": best}


def test_a_model_in_which_nothing_is_sparse_gains_as_well(cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[find_block.__module__]
    monkeypatch.setattr(
        module, "median_seconds", lambda sides, *_, **__: [2.0, 1.0][: len(sides)] + [0.5] * (len(sides) - 2)
    )
    small = compress(nn.Sequential(convolution(), nn.ReLU()), images())
    assert child_types(small) == BOTH
    assert report(small).layers[0].reason == "0% zeros are too few" + KERNEL
    assert report(small).seconds == {"dense": 2.0, "all packed": 1.0, "compressed": 0.5, DENSE_FUSED: 0.5}


def test_without_cudnn_nothing_changes(timed: Race) -> None:
    timed({"dense": 1.0, "packed": 2.0}, EVEN)
    small = compress(network(), sample())
    assert child_types(small) == child_types(network())
    assert set(report(small).seconds) == {"dense", "all packed", "compressed"}


def test_what_was_compressed_is_considered_anew(cudnn: Cudnn, timed: Race) -> None:
    timed({"dense": 3.0, "fused": 1.0, "packed": 2.0}, EVEN)
    small = compress(network(), sample())
    assert child_types(small) == [*BOTH, *BOTH, *PACKED]
    timed({"dense": 3.0, "fused": 2.0, "packed": 1.0}, EVEN)
    again = compress(small, sample())
    assert child_types(again) == [PackedConv2d, Fused, *BOTH, *PACKED]
    assert child_types(small)[:2] == BOTH
    assert str(decompress(again)) == str(network())


def test_compiled_and_exported_it_is_the_plain_way(cudnn: Cudnn, timed: Race) -> None:
    timed({"dense": 3.0, "fused": 1.0, "packed": 2.0}, EVEN)
    model, x = network(), sample()
    small = compress(model, x).eval()
    calls = cudnn.calls
    with torch.no_grad():
        assert torch.allclose(torch.compile(small, backend="aot_eager", fullgraph=True)(x), model(x), atol=1e-5)
        program = torch.export.export(small, (x,))
        assert torch.allclose(program.module()(x), model(x), atol=1e-5)
    assert cudnn.calls == calls
    assert not any("cudnn" in str(node.target) for node in program.graph.nodes)


# ---- files


@pytest.fixture
def small(cudnn: Cudnn, timed: Race) -> nn.Module:
    timed({"dense": 3.0, "fused": 1.0, "packed": 2.0}, EVEN)
    return compress(network(), sample())


def test_it_comes_back_from_a_file(small: nn.Module, tmp_path: Path) -> None:
    file = save(small, tmp_path / "model.safetensors")
    again = load(file, network())
    assert child_types(again) == child_types(small)
    assert list(again.state_dict()) == list(small.state_dict())
    assert {"0.weight", "0.bias", "2.weight"} < set(small.state_dict())
    with torch.no_grad():
        assert torch.equal(again(sample()), small(sample()))


def test_files_without_and_with_more_of_it(small: nn.Module, tmp_path: Path) -> None:
    file = save(small, tmp_path / "model.safetensors")
    with safe_open(file, "pt") as given:
        head = json.loads(given.metadata()[METADATA_KEY])
        tensors = {name: given.get_tensor(name) for name in given.keys()}  # noqa: SIM118 - it is no dictionary
    assert head.pop("fused") == ["0", "2"]
    del head["digest"]

    def write(**more: Any) -> Path:
        facts, other = head | more, tmp_path / "other"
        other.write_bytes(to_bytes(tensors, {METADATA_KEY: json.dumps(facts | {"digest": checksum(facts, tensors)})}))
        return other

    assert child_types(load(write(), network()))[:2] == [nn.Conv2d, nn.ReLU]  # an older file
    for odd in ("1", "4", "5", "6"):  # a ReLU, packed layers, and one without weights
        with pytest.raises(pm.PomonaError, match=f"the file has {odd} with a ReLU behind it, the model has not"):
            load(write(fused=[odd]), network())
    for odd in (["9"], [1], 3, "4.2", {"0": {}, "x": 1}):
        with pytest.raises(pm.PomonaError, match="does not fit the model"):
            load(write(fused=odd), network())


# ---- on a device


@pytest.mark.gpu
@pytest.mark.usefixtures("nondeterministic_cudnn")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_model_is_compressed_on_a_device(layout: torch.memory_format, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = [nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten()]
    model = prune_balanced(nn.Sequential(*shape, nn.Linear(32 * 256, 64)), 32, 3).cuda().half().to(memory_format=layout)
    x = torch.randn(1, 8, 16, 16, device="cuda").half().contiguous(memory_format=layout)
    small = compress(model, x, patience=0.05)
    with torch.no_grad():
        assert torch.allclose(small(x), model(x), rtol=1e-2, atol=1e-2)
        again = load(save(small, tmp_path / "model"), copy.deepcopy(model)).cuda()
        assert child_types(again) == child_types(small)
        assert torch.allclose(again(x), small(x), rtol=1e-2, atol=1e-2)
    for layer, module in ((layer, small.get_submodule(layer.name)) for layer in report(small).layers):
        assert isinstance(module, Conv2dReLU) == (not layer.packed and layer.saved > 0)
    assert str(decompress(small)) == str(model)
