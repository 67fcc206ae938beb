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
from pomona.sparse.compress import DENSE_FUSED
from pomona.sparse.files import METADATA_KEY, checksum
from pomona.sparse.layers import Conv2dReLU, PackedConv2d, PackedLinear

WITH_RELU = ", with its ReLU in one kernel"
SLOWER_TOGETHER = " alone, but the whole model is faster dense"


def network() -> nn.Sequential:
    """Return a network of convolutions, packable, grouped and without a ReLU after it, and a linear layer."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(inplace=True)]
    rest = [nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 16, 8), nn.ReLU()]
    return prune_balanced(nn.Sequential(*convolutions, *rest), 4, 1)


def sample() -> Tensor:
    """Return a batch of two images for `network`, the same at every call."""
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))


SetTimes = Callable[[dict[str, float], dict[str, float]], None]


@pytest.fixture
def set_times(monkeypatch: pytest.MonkeyPatch) -> SetTimes:
    """Return a function that replaces measured times by given ones, of single layers and of whole models."""

    def set_times_to(alone: dict[str, float], whole: dict[str, float]) -> None:
        module = sys.modules["pomona.sparse.compress"]

        def return_layer_times(sides: Sequence[Callable[[], Any]], *_: Any, **__: Any) -> list[float]:
            ways = ["dense", "fused", "balanced"] if len(sides) == 3 else ["dense", "balanced"]
            outputs = [side() for side in sides]
            assert all(torch.allclose(y, outputs[0], atol=1e-5) for y in outputs)
            grouped = len(sides) == 2 and outputs[0].shape == (2, 8, 4, 4)
            return [alone[way] for way in (["dense", "fused"] if grouped else ways)]

        def return_model_times(sides: dict[str, nn.Module], *_: Any) -> tuple[dict[str, float], dict[str, float]]:
            assert child_types(sides["all packed"])[-4:] == PACKED_REST
            for way in {"all packed", DENSE_FUSED} & sides.keys():  # the convolution that cannot be packed
                assert (child_types(sides[way])[-6:-4] == FUSED_PAIR) == (DENSE_FUSED in sides)
            return {way: whole[way] for way in sides}, {}

        monkeypatch.setattr(module, "plan_copy", lambda *_: None)
        monkeypatch.setattr(module, "median_seconds", return_layer_times)
        monkeypatch.setattr(module, "time_models", return_model_times)

    return set_times_to


def report(model: nn.Module) -> Compression:
    assert isinstance(model.compression, Compression)
    return model.compression


EVEN = {"dense": 1.0, "all packed": 1.0, "compressed": 1.0, DENSE_FUSED: 1.0}
FUSED_PAIR = [Conv2dReLU, nn.ReLU]
DENSE_REST = [nn.Conv2d, nn.Flatten, nn.Linear, nn.ReLU]
PACKED_REST = [PackedConv2d, nn.Flatten, PackedLinear, nn.ReLU]


@pytest.mark.parametrize(
    ("alone", "expected", "reason", "seconds", "saved"),
    [
        (
            {"dense": 3.0, "fused": 2.0, "balanced": 1.0},
            [PackedConv2d, nn.ReLU, *FUSED_PAIR, *PACKED_REST],
            "2.0× faster",
            (2, 1),
            1,
        ),
        (
            {"dense": 3.0, "fused": 1.0, "balanced": 3.5},
            [*FUSED_PAIR, *FUSED_PAIR, *DENSE_REST],
            "dense is faster here" + WITH_RELU,
            (1, 3.5),
            2,
        ),
        (
            {"dense": 1.0, "fused": 2.0, "balanced": 3.0},
            [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.ReLU, *DENSE_REST],
            "dense is faster here",
            (1, 3),
            0,
        ),
    ],
    ids=["packed", "fused", "dense"],
)
def test_the_fastest_of_dense_fused_and_packed_is_chosen(
    alone: dict[str, float],
    expected: list[type[nn.Module]],
    reason: str,
    seconds: tuple[float, float],
    saved: float,
    cudnn: Cudnn,
    set_times: SetTimes,
) -> None:
    set_times(alone, EVEN)
    model, x = network(), sample()
    compressed_model = compress(model, x)
    assert child_types(compressed_model) == expected
    with torch.no_grad():
        assert torch.allclose(compressed_model(x), model(x), atol=1e-5)
    result = report(compressed_model)
    first, grouped = result.layers[:2]
    assert (first.reason, first.seconds, first.saved) == (reason, seconds, saved)
    assert grouped.reason == "a grouped convolution" + WITH_RELU * (saved > 0)
    assert (grouped.seconds, grouped.saved) == (None, saved)
    assert (DENSE_FUSED in result.seconds) == (saved > 0)
    assert (DENSE_FUSED in str(result)) == (saved > 0)
    assert result.facts()["layers"][0]["saved"] == saved
    back = decompress(compressed_model)
    assert str(back) == str(model)
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), model.state_dict().values(), strict=True))


def test_policy_all_still_fuses_convolutions_that_cannot_be_packed(cudnn: Cudnn, set_times: SetTimes) -> None:
    set_times({"dense": 3.0, "fused": 1.0, "balanced": 4.0}, EVEN)
    assert child_types(compress(network(), sample(), policy="all")) == [
        PackedConv2d,
        nn.ReLU,
        *FUSED_PAIR,
        *PACKED_REST,
    ]


@pytest.mark.parametrize(
    ("fused", "dense", "compressed", "expected", "reasons"),
    [
        (1.0, 3.0, 2.0, FUSED_PAIR, ("4.0× faster" + SLOWER_TOGETHER + WITH_RELU, "a grouped convolution" + WITH_RELU)),
        (1.5, 1.0, 2.0, [nn.Conv2d, nn.ReLU], ("4.0× faster" + SLOWER_TOGETHER, "a grouped convolution")),
        (1.0, 3.0, 1.01, [PackedConv2d, nn.ReLU], ("4.0× faster", "a grouped convolution" + WITH_RELU)),
    ],
    ids=["fused", "dense", "compressed"],
)
def test_a_model_is_never_slower_than_its_fastest_dense_form(
    fused: float,
    dense: float,
    compressed: float,
    expected: list[type[nn.Module]],
    reasons: tuple[str, str],
    cudnn: Cudnn,
    set_times: SetTimes,
) -> None:
    whole = {"dense": dense, DENSE_FUSED: fused, "all packed": 9.0, "compressed": compressed}
    set_times({"dense": 5.0, "fused": 4.0, "balanced": 1.0}, whole)
    compressed_model = compress(network(), sample())
    assert child_types(compressed_model)[:2] == expected
    result = report(compressed_model)
    assert tuple(layer.reason for layer in result.layers[:2]) == reasons
    best = compressed if compressed < 2 else min(dense, fused)
    assert result.seconds == whole | {"compressed": best}


def test_a_model_without_sparse_layers_is_fused_too(cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["pomona.sparse.compress"]
    monkeypatch.setattr(
        module, "median_seconds", lambda sides, *_, **__: [2.0, 1.0][: len(sides)] + [0.5] * (len(sides) - 2)
    )
    compressed_model = compress(nn.Sequential(convolution(), nn.ReLU()), images())
    assert child_types(compressed_model) == FUSED_PAIR
    assert report(compressed_model).layers[0].reason == "0% zeros are too few" + WITH_RELU
    assert report(compressed_model).seconds == {"dense": 2.0, "all packed": 1.0, "compressed": 0.5, DENSE_FUSED: 0.5}


def test_without_cudnn_nothing_changes(set_times: SetTimes) -> None:
    set_times({"dense": 1.0, "balanced": 2.0}, EVEN)
    compressed_model = compress(network(), sample())
    assert child_types(compressed_model) == child_types(network())
    assert set(report(compressed_model).seconds) == {"dense", "all packed", "compressed"}


def test_a_compressed_model_can_be_compressed_again(cudnn: Cudnn, set_times: SetTimes) -> None:
    set_times({"dense": 3.0, "fused": 1.0, "balanced": 2.0}, EVEN)
    compressed_model = compress(network(), sample())
    assert child_types(compressed_model) == [*FUSED_PAIR, *FUSED_PAIR, *PACKED_REST]
    set_times({"dense": 3.0, "fused": 2.0, "balanced": 1.0}, EVEN)
    again = compress(compressed_model, sample())
    assert child_types(again) == [PackedConv2d, nn.ReLU, *FUSED_PAIR, *PACKED_REST]
    assert child_types(compressed_model)[:2] == FUSED_PAIR
    assert str(decompress(again)) == str(network())


def test_compiled_and_exported_models_do_not_call_cudnn_directly(cudnn: Cudnn, set_times: SetTimes) -> None:
    set_times({"dense": 3.0, "fused": 1.0, "balanced": 2.0}, EVEN)
    model, x = network(), sample()
    compressed_model = compress(model, x).eval()
    calls = cudnn.calls
    with torch.no_grad():
        assert torch.allclose(
            torch.compile(compressed_model, backend="aot_eager", fullgraph=True)(x), model(x), atol=1e-5
        )
        program = torch.export.export(compressed_model, (x,))
        assert torch.allclose(program.module()(x), model(x), atol=1e-5)
    assert cudnn.calls == calls
    assert not any("cudnn" in str(node.target) for node in program.graph.nodes)


# ---- files


@pytest.fixture
def compressed_model(cudnn: Cudnn, set_times: SetTimes) -> nn.Module:
    set_times({"dense": 3.0, "fused": 1.0, "balanced": 2.0}, EVEN)
    return compress(network(), sample())


def test_a_fused_model_is_saved_and_loaded(compressed_model: nn.Module, tmp_path: Path) -> None:
    file = save(compressed_model, tmp_path / "model.safetensors")
    again = load(file, network())
    assert child_types(again) == child_types(compressed_model)
    assert list(again.state_dict()) == list(compressed_model.state_dict())
    assert {"0.weight", "0.bias", "2.weight"} < set(compressed_model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(sample()), compressed_model(sample()))


def test_files_without_fused_layers_and_with_wrong_ones(compressed_model: nn.Module, tmp_path: Path) -> None:
    file = save(compressed_model, tmp_path / "model.safetensors")
    with safe_open(file, "pt") as given:
        head = json.loads(given.metadata()[METADATA_KEY])
        tensors = {name: given.get_tensor(name) for name in given.keys()}  # noqa: SIM118 - not a dictionary
    assert head.pop("fused") == ["0", "2"]
    del head["digest"]

    def write(**more: Any) -> Path:
        facts, other = head | more, tmp_path / "other"
        other.write_bytes(to_bytes(tensors, {METADATA_KEY: json.dumps(facts | {"digest": checksum(facts, tensors)})}))
        return other

    assert child_types(load(write(), network()))[:2] == [nn.Conv2d, nn.ReLU]  # an older file
    for wrong in ("1", "4", "5", "6"):  # a ReLU, packed layers, and one without weights
        with pytest.raises(
            pm.PomonaError, match=f"fuses a ReLU into {wrong}, where the model has no convolution with a ReLU"
        ):
            load(write(fused=[wrong]), network())
    for wrong in (["9"], [1], 3, "4.2", {"0": {}, "x": 1}):
        with pytest.raises(pm.PomonaError, match="does not fit the model"):
            load(write(fused=wrong), network())


# ---- on a device


@pytest.mark.gpu
@pytest.mark.usefixtures("nondeterministic_cudnn")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_model_is_compressed_on_a_device(layout: torch.memory_format, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = [nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten()]
    model = prune_balanced(nn.Sequential(*shape, nn.Linear(32 * 256, 64)), 32, 3).cuda().half().to(memory_format=layout)
    x = torch.randn(1, 8, 16, 16, device="cuda").half().contiguous(memory_format=layout)
    compressed_model = compress(model, x, patience=0.05)
    with torch.no_grad():
        assert torch.allclose(compressed_model(x), model(x), rtol=1e-2, atol=1e-2)
        again = load(save(compressed_model, tmp_path / "model"), copy.deepcopy(model)).cuda()
        assert child_types(again) == child_types(compressed_model)
        assert torch.allclose(again(x), compressed_model(x), rtol=1e-2, atol=1e-2)
    for layer, module in (
        (layer, compressed_model.get_submodule(layer.name)) for layer in report(compressed_model).layers
    ):
        assert isinstance(module, Conv2dReLU) == (not layer.packed and layer.saved > 0)
    assert str(decompress(compressed_model)) == str(model)
