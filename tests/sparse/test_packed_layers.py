"""Packed layers against the dense ones that they replace."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from packing import agree, balanced_weight, has_same_state, prune_balanced
from torch import nn

import pomona as pm
from pomona.sparse import BalancedTensor, compress
from pomona.sparse.layers import PackedConv2d, PackedLayer, PackedLinear, PackedLSTM, conv2d, lstm


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 64), (0, 64)])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = prune_balanced(nn.Linear(64, 40, bias=bias), 32, 3)
    packed = PackedLinear(layer, BalancedTensor.from_dense(layer.weight.detach(), 32))
    x = torch.randn(shape)
    with torch.no_grad():
        assert agree(packed(x), layer(x))
    assert has_same_state(packed.dense(), layer)
    assert torch.equal(packed.weight, layer.weight)


CONVOLUTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 1, "stride": 2, "padding": 1},
    {"kernel_size": 5, "padding": 2},
    {"kernel_size": 3, "padding": 3},
    {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": 3, "padding": 2, "dilation": 2, "stride": 3},
    {"kernel_size": (3, 5), "padding": (0, 2)},
    {"kernel_size": (1, 3), "padding": (0, 1), "stride": (2, 1)},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "stride": 2},
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolution(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 40, **options)
    layer.weight.data = balanced_weight(*layer.weight.shape, block=6, kept=2)
    packed = PackedConv2d(layer, BalancedTensor.from_dense(layer.weight.detach(), 6))
    for images in (torch.randn(1, 6, 11, 9), torch.randn(3, 6, 10, 13), torch.randn(6, 9, 9)):
        with torch.no_grad():
            assert agree(packed(images), layer(images))
            assert agree(packed(images.transpose(-1, -2)), layer(images.transpose(-1, -2)))
    assert has_same_state(packed.dense(), layer)


@torch.no_grad()
def test_a_convolution_in_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is for GPUs; here it runs on the CPU."""
    monkeypatch.setattr(conv2d, "WHOLE_LAYER_DEVICES", {"cpu"})
    torch.manual_seed(0)
    for options in CONVOLUTIONS:
        layer = nn.Conv2d(6, 40, **options).half()
        layer.weight.data = balanced_weight(*layer.weight.shape, block=6, kept=2).half()
        packed = PackedConv2d(layer, BalancedTensor.from_dense(layer.weight.detach(), 6))
        for images in (torch.randn(3, 6, 10, 13).half(), torch.randn(6, 9, 9).half()):
            assert agree(packed(images, relu=True), layer(images).relu(), 1e-2)
            assert agree(packed(images), layer(images), 1e-2)
        plain = options.get("padding_mode", "zeros") == "zeros" and options != {"kernel_size": 2, "padding": "same"}
        assert packed.has_whole_operator(torch.randn(3, 6, 10, 13).half()) is plain
        assert not packed.has_whole_operator(torch.randn(3, 6, 10, 13))
    model = nn.Sequential(PackedConv2d(layer := prune_balanced(nn.Conv2d(4, 8, 3), 4, 1).half(), pack_weight(layer)))
    x = torch.randn(2, 4, 6, 6).half()
    assert agree(torch.compile(model, backend="aot_eager", fullgraph=True)(x), layer(x), 1e-2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    assert agree(program.module()(torch.cat([x, x, x])), torch.cat([layer(x)] * 3), 1e-2)
    assert [n for n in program.graph.nodes if n.target is torch.ops.pomona.balanced_conv2d.default]


def pack_weight(layer: nn.Conv2d) -> BalancedTensor:
    return BalancedTensor.from_dense(layer.weight.detach(), 4)


@pytest.mark.parametrize("devices", [set(), {"cpu"}])
def test_an_image_that_is_too_small_is_refused(devices: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv2d, "WHOLE_LAYER_DEVICES", devices)
    layer = prune_balanced(nn.Conv2d(4, 8, 3), 4, 1).to(torch.float16 if devices else torch.float32)
    packed = PackedConv2d(layer, pack_weight(layer))
    with pytest.raises(pm.PomonaError, match="an image of 2×9 is too small for a kernel of 3×3"):
        packed(torch.ones(1, 4, 2, 9).to(layer.weight))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_lstm(bidirectional: bool, batch_first: bool, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(24, 20, 2, bias=bias, batch_first=batch_first, bidirectional=bidirectional)
    prune_balanced(layer, 4, 1)
    weights = {name: p.detach() for name, p in layer.named_parameters() if "weight" in name and name != "weight_ih_l1"}
    packed = PackedLSTM(layer, {name: BalancedTensor.from_dense(w, 4) for name, w in weights.items()})
    x = torch.randn(5, 3, 24)
    with torch.no_grad():
        dense = layer(x)
        assert agree(packed(x), dense)
        assert agree(packed(x, dense[1]), layer(x, dense[1]))
        assert agree(packed(x[0]), layer(x[0]))
        sequence = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 2] if not batch_first else [3, 2, 2, 1, 1], batch_first)
        assert agree(packed(sequence)[0].data, layer(sequence)[0].data)
    assert has_same_state(packed.dense(), layer)


@pytest.mark.parametrize("grad", [False, True])
def test_an_lstm_keeps_its_dense_form_until_a_weight_changes(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = prune_balanced(nn.LSTM(24, 20), 4, 1)
    packed, other = (compress(layer, policy="all", patience=0) for _ in range(2))
    made: list[nn.Module] = []
    build = PackedLSTM.empty_dense_layer
    monkeypatch.setattr(PackedLSTM, "empty_dense_layer", lambda self: made.append(y := build(self)) or y)
    x = torch.randn(3, 2, 24, requires_grad=grad)
    given = x if grad else nn.utils.rnn.pack_padded_sequence(x, [3, 2])

    def run(model: nn.Module) -> torch.Tensor:
        y = model(given)[0]
        return y if grad else y.data

    with torch.inference_mode():
        packed(nn.utils.rnn.pack_padded_sequence(x.detach(), [3, 2]))
    for _ in range(3):
        assert agree(run(packed), run(layer))
    assert len(made) == 1
    assert not list(packed.parameters())
    assert pickle.loads(pickle.dumps(packed)).state_dict().keys() == packed.state_dict().keys()
    assert agree(run(copy.deepcopy(packed)), run(layer))
    with torch.no_grad():
        for tensors in (layer.parameters(), other.buffers()):
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.mul_(2)
    packed.load_state_dict(other.state_dict())
    made.clear()
    for _ in range(2):
        assert agree(run(packed), run(layer))
    assert len(made) == 1
    assert packed.half().dense_once().weight_ih_l0.dtype == torch.float16


@pytest.mark.parametrize("devices", [set(), {"cpu"}], ids=["step by step", "whole"])
@torch.no_grad()
def test_an_lstm_under_autocast_has_the_dtypes_of_the_dense_one(
    devices: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lstm, "WHOLE_LAYER_DEVICES", devices)
    torch.manual_seed(0)
    layer = prune_balanced(nn.LSTM(24, 20, 2), 4, 1)
    packed = compress(layer, policy="all", patience=0)
    with torch.autocast("cpu", torch.bfloat16):
        for x in (torch.randn(5, 3, 24), torch.randn(5, 24), torch.randn(5, 3, 24).bfloat16()):
            found, expected = packed(x), layer(x)
            again = packed(x, found[1]), layer(x, expected[1])
            for (y, state), (z, wanted) in ((found, expected), again):
                for one, other in zip((y, *state), (z, *wanted), strict=True):
                    assert one.dtype == other.dtype == torch.bfloat16
                    torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)


class TestJointMatrices:
    """An LSTM with one joint packed matrix a layer, which is for GPUs and runs on the CPU here."""

    @pytest.fixture(autouse=True)
    def use_joint_matrices_on_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lstm, "WHOLE_LAYER_DEVICES", {"cpu"})
        monkeypatch.setattr(PackedLSTM, "run_layers", lambda *_: pytest.fail("step by step"))

    def build_layers(self, **options: Any) -> tuple[nn.LSTM, PackedLSTM]:
        torch.manual_seed(0)
        layer = prune_balanced(nn.LSTM(24, 20, 2, **options), 4, 1)
        weights = {name: p.detach() for name, p in layer.named_parameters() if "weight" in name}
        return layer, PackedLSTM(layer, {name: BalancedTensor.from_dense(w, 4) for name, w in weights.items()})

    @pytest.mark.parametrize("bidirectional", [False, True])
    @pytest.mark.parametrize("batch_first", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    @torch.no_grad()
    def test_outputs_and_states_match_the_dense_lstm(self, bidirectional: bool, batch_first: bool, bias: bool) -> None:
        layer, packed = self.build_layers(bias=bias, batch_first=batch_first, bidirectional=bidirectional)
        x = torch.randn(5, 3, 24)
        dense = layer(x)
        assert agree(packed(x), dense)
        assert agree(packed(x, dense[1]), layer(x, dense[1]))
        assert agree(packed(x[0]), layer(x[0]))
        assert has_same_state(packed.dense(), layer)
        assert set(packed.state_dict()) == {name for name, _ in packed.named_buffers() if "joint" not in name}

    @torch.no_grad()
    def test_joint_matrices_follow_the_weights(self) -> None:
        (layer, packed), (other, another) = self.build_layers(), self.build_layers()
        for parameter in other.parameters():
            parameter *= 2
        _, filled = self.build_layers()
        twice = {name: BalancedTensor.from_dense(p.detach(), 4) for name, p in other.named_parameters() if p.ndim > 1}
        filled.load_state_dict(PackedLSTM(other, twice).state_dict())
        x = torch.randn(5, 3, 24)
        assert agree(filled(x), other(x))
        assert not agree(filled(x), layer(x))
        assert agree(copy.deepcopy(packed).double().float()(x), layer(x))
        assert agree(pickle.loads(pickle.dumps(another))(x), layer(x))

    @torch.no_grad()
    def test_compiled_and_exported(self) -> None:
        layer, packed = self.build_layers(bidirectional=True)
        x = torch.randn(5, 3, 24)
        assert agree(torch.compile(packed, backend="aot_eager", fullgraph=True)(x), layer(x))
        program = torch.export.export(packed, (x,))
        assert agree(program.module()(x), layer(x))
        assert [n for n in program.graph.nodes if n.target is torch.ops.pomona.balanced_lstm.default]

    def test_states_of_the_wrong_shape_are_refused(self) -> None:
        _, packed = self.build_layers()
        with pytest.raises(pm.PomonaError, match=r"a state has shape \(2, 4, 20\) where \(2, 3, 20\) is needed"):
            packed(torch.randn(5, 3, 24), (torch.zeros(2, 4, 20), torch.zeros(2, 3, 20)))


def test_an_lstm_in_training_or_with_many_vectors_runs_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm, "WHOLE_LAYER_DEVICES", {"cpu"})
    layer = prune_balanced(nn.LSTM(24, 20, 2, dropout=0.5), 4, 1)
    packed = compress(layer, policy="all", patience=0)
    assert isinstance(packed, PackedLSTM)
    assert packed.joint_blocks == [24, 20]  # of the two widths in the first layer, the one with fewer bytes
    assert packed.has_whole_operator(torch.zeros(1, 8, 24))
    assert not packed.has_whole_operator(torch.zeros(1, 9, 24))
    assert not packed.has_whole_operator(torch.zeros(1, 8, 24).half())
    assert not packed.train().has_whole_operator(torch.zeros(1, 8, 24))
    partly = PackedLSTM(layer, {"weight_ih_l0": BalancedTensor.from_dense(layer.weight_ih_l0.detach(), 4)})
    assert partly.joint_blocks == [0, 0]


@pytest.mark.parametrize("layer", [nn.Linear(16, 8), nn.Conv2d(4, 8, 3, padding=1), nn.LSTM(16, 8)], ids=repr)
def test_gradients_reach_the_input(layer: nn.Module) -> None:
    prune_balanced(layer, 4, 1)
    example = torch.randn(2, 4, 5, 5) if isinstance(layer, nn.Conv2d) else None
    packed = compress(layer, example, policy="all", patience=0)
    assert isinstance(packed, PackedLayer)
    shape = (2, 4, 5, 5) if isinstance(layer, nn.Conv2d) else (3, 2, 16)
    one = torch.randn(shape).requires_grad_()
    other = one.detach().clone().requires_grad_()
    for model, x in ((layer, one), (packed, other)):
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    assert agree(one.grad, other.grad)
