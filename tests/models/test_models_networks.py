"""The networks: parameter counts, initial weights and forward passes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from slow_cases import slow_after
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from pomona.models import build, info, names

# Options that make a network small enough to run on a CPU; the rest are small as they are.
SMALL: dict[str, dict] = {
    **{name: {"rho": 0.125} for name in ("resnet18", "resnet34")},
    **{name: {"rho": 0.125, "num_classes": 10} for name in ("resnet50", "resnet101", "wrn50_2")},
    **{name: {"vocabulary": 50, "hidden": 12} for name in ("lstm", "bilstm", "lstm_lm")},
}
HEAVY = {"wrn28_4", "wrn28_8", "wrn28_10", "wrn40_4", "wrn16_4"}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def make_inputs(name: str, batch: int = 2, device: str = "cpu", small: bool = True) -> torch.Tensor:
    """Return random inputs for a network, of at most 64×64 pixels if `small`."""
    shape = info(name).input_shape
    if info(name).takes_tokens:
        return torch.randint(1, 50, (batch, 9), device=device)
    return torch.randn(batch, shape[0], *((min(shape[1], 64),) * 2 if small else shape[1:]), device=device)


def build_on_meta(name: str, **options) -> nn.Module:
    with torch.device("meta"):
        return build(name, **options)


def count_params(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def count_conv_weights(model: nn.Module) -> int:
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize(
    ("name", "options", "millions"),
    [
        ("resnet20", {}, 0.27),
        ("resnet20", {"shortcut": "B"}, 0.27),
        ("resnet32", {}, 0.46),
        ("resnet44", {}, 0.66),
        ("resnet56", {}, 0.85),
        ("resnet56", {"block": "bottleneck", "shortcut": "B"}, 0.87),
        ("resnet110", {}, 1.73),
        ("wrn16_4", {}, 2.75),
        ("wrn28_2", {}, 1.47),
        ("wrn28_10", {}, 36.48),
        ("wrn40_4", {}, 8.95),
        ("resnet18", {}, 11.17),
        ("resnet18", {"stem": "imagenet", "num_classes": 1000}, 11.69),
        ("resnet34", {"stem": "imagenet", "num_classes": 1000}, 21.80),
        ("resnet50", {}, 25.56),
        ("resnet101", {}, 44.55),
        ("wrn50_2", {}, 68.88),
        ("vgg11", {}, 9.23),
        ("vgg16_d", {}, 14.72),
        ("vgg16_d", {"hidden": (512, 512)}, 15.25),
        ("densenet40", {}, 1.02),
        ("densenet100", {}, 0.77),
        ("conv6", {}, 2.26),
        ("conv4", {}, 2.43),
        ("conv2", {}, 4.30),
        ("lstm_lm", {}, 66.03),
    ],
)
def test_published_parameter_counts(name, options, millions):
    assert round(count_params(build_on_meta(name, **options)) / 1e6, 2) == millions


def test_exact_counts_worked_out_by_hand():
    assert count_params(build_on_meta("lenet300")) == 784 * 300 + 300 + 300 * 100 + 100 + 100 * 10 + 10 == 266_610
    assert 20_000 <= count_params(build_on_meta("digits_cnn")) <= 40_000
    # A new shortcut of type B at the two places where the width doubles, each with its batch norm.
    extra = count_params(build_on_meta("resnet20", shortcut="B")) - count_params(build_on_meta("resnet20"))
    assert extra == 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64
    # Stages of nine bottlenecks: the first with a shortcut, and all with their batch norms.
    bottleneck = count_params(build_on_meta("resnet56", block="bottleneck", shortcut="B"))
    blocks = [first * w + 13 * w**2 + 8 * 17 * w**2 + first * 4 * w for first, w in ((16, 16), (64, 32), (128, 64))]
    norms = [9 * 2 * 6 * w + 2 * 4 * w for w in (16, 32, 64)]
    assert bottleneck == 3 * 9 * 16 + 2 * 16 + sum(blocks) + sum(norms) + 256 * 10 + 10 == 869_530
    one_way, two_ways = count_params(build_on_meta("lstm")), count_params(build_on_meta("bilstm"))
    assert one_way == 25_002 * 100 + 4 * 256 * (100 + 256 + 2) + 256 * 2 + 2
    assert two_ways - one_way == 4 * 256 * (100 + 256 + 2) + 256 * 2


@pytest.mark.parametrize(("name", "kept_millions"), [("resnet34", 6.38), ("resnet50", 7.04), ("resnet101", 12.72)])
def test_parameters_that_iterand_keeps(name, kept_millions):
    """Chijiwa et al. (2021), Table 4: 30 % of the weights of convolutions."""
    assert round(0.3 * count_conv_weights(build_on_meta(name, stem="imagenet")) / 1e6, 2) == kept_millions


@pytest.mark.parametrize("rho", [0.25, 0.5, 1.0, 2.0])
def test_rho_scales_the_width_but_not_the_stem(rho):
    widths = [int(w * rho) for w in (64, 64, 128, 128, 256, 256, 256, 256)]
    layers = [m for m in build_on_meta("conv6", rho=rho).modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in layers] == [*widths, 10]
    assert [m.kernel_size[0] for m in layers] == [3] * 6 + [1] * 3
    assert layers[6].in_channels == int(256 * rho) * 16
    resnet = [m for m in build_on_meta("resnet18", rho=rho).modules() if isinstance(m, nn.Conv2d)]
    assert resnet[0].out_channels == 64
    assert resnet[-1].out_channels == int(512 * rho)


@pytest.mark.parametrize("name", slow_after(6, names()))
def test_forward_backward_and_trace_at_full_size(name):
    """On the meta device shapes and the graph are computed, but no values."""
    model, x = build_on_meta(name), make_inputs(name, device="meta", small=False)
    out = model(x)
    classes = info(name).options.get("num_classes")
    assert out.shape == ((2, classes) if classes else (2, 9, 10_000))
    out.sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    given = {"state": None} if name == "lstm_lm" else None
    traced = torch.fx.symbolic_trace(model, concrete_args=given)
    assert traced(*((x, None) if given else (x,))).shape == out.shape


@pytest.mark.parametrize("name", sorted(set(names()) - HEAVY))
def test_weights_gradients_and_reloading_at_small_size(name):
    options = SMALL.get(name, {})
    torch.manual_seed(3)
    model = build(name, **options)
    torch.manual_seed(3)
    again = build(name, **options)
    for (key, one), two in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, two), key

    model.train()
    x = make_inputs(name)
    model(x).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.count_nonzero() > 0, key

    fresh = build(name, **options)
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(fresh.eval()(x), model.eval()(x))


@pytest.mark.parametrize("name", [n for n in names() if "affine" in info(n).options and n not in HEAVY | {"wrn28_2"}])
def test_without_affine_only_weights_are_parameters(name):
    model = build_on_meta(name, affine=False)
    linear = sum(count_params(m) for m in model.modules() if isinstance(m, nn.Linear))
    assert count_params(model) == count_conv_weights(model) + linear


def test_group_norm_does_not_mix_samples():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    grouped, batched = build("wrn16_4", norm="group").train(), build("wrn16_4").train()
    alone = grouped(x[:1])
    assert torch.allclose(grouped(x)[:1], alone, atol=1e-4)
    assert not torch.allclose(batched(x)[:1], batched(x[:1]), atol=1e-4)
    assert count_params(grouped) == count_params(batched)


@pytest.mark.parametrize("name", ["resnet20", "wrn28_2", "resnet18", "vgg11", "densenet40", "digits_cnn"])
def test_convolutions_are_he_normal(name):
    torch.manual_seed(0)
    layers = [m for m in build(name).modules() if isinstance(m, nn.Conv2d)]
    unit = torch.cat([(m.weight * math.sqrt(m.out_channels * m.kernel_size[0] ** 2 / 2)).flatten() for m in layers])
    assert abs(unit.std().item() - 1) < 0.02
    assert abs((unit.abs() < 1).float().mean().item() - 0.683) < 0.01


def test_conv6_is_kaiming_uniform_with_zero_biases():
    for layer in build("conv6").modules():
        if isinstance(layer, nn.Conv2d):
            bound = math.sqrt(6 / layer.weight[0].numel())
            assert 0.95 * bound < layer.weight.abs().max() <= bound
            assert layer.bias is not None
            assert not layer.bias.any()


def test_shortcut_a_takes_every_second_pixel_and_pads_channels():
    block = build("resnet20").blocks[3]
    nn.init.zeros_(block.norm2.weight)  # only the shortcut is left
    x = torch.rand(1, 16, 4, 4)
    out = block.eval()(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_bottlenecks_narrow_the_channels_and_halve_the_image_between_stages(shortcut):
    """The networks of depth 44 and more in the first author's code of DPF: [1×1, w], [3×3, w], [1×1, 4w]."""
    model = build("resnet44", block="bottleneck", shortcut=shortcut).eval()
    assert len(model.blocks) == 3 * 7
    x, sizes = model.stem(torch.randn(1, 3, 32, 32)), []
    for block in model.blocks:
        x = block(x)
        layers = block.conv1, block.conv2, block.conv3
        assert [m.kernel_size[0] for m in layers] == [1, 3, 1]
        assert [m.out_channels for m in layers] == [x.shape[1] // 4, x.shape[1] // 4, x.shape[1]]
        sizes.append(tuple(x.shape[1:3]))
    assert sizes == [(64, 32)] * 7 + [(128, 16)] * 7 + [(256, 8)] * 7
    assert [i for i, block in enumerate(model.blocks) if not isinstance(block.shortcut, nn.Identity)] == [0, 7, 14]


def test_conv6_agrees_with_linear_layers():
    torch.manual_seed(0)
    model, x = build("conv6", rho=0.25), torch.randn(2, 3, 32, 32)
    h = model.features(x).reshape(2, -1)
    for layer in model.classifier:
        h = F.linear(h, layer.weight[:, :, 0, 0], layer.bias) if isinstance(layer, nn.Conv2d) else h.relu()
    assert torch.allclose(model(x), h, atol=1e-5)


def test_dropout_is_off_by_default_and_can_be_on():
    assert not any(isinstance(m, nn.Dropout) for m in build_on_meta("wrn28_2").modules())
    assert sum(isinstance(m, nn.Dropout) for m in build_on_meta("wrn28_2", dropout=0.3).modules()) == 12
    assert sum(isinstance(m, nn.Dropout) for m in build_on_meta("densenet40", dropout=0.2).modules()) == 38


@pytest.mark.parametrize("name", ["lstm", "bilstm"])
def test_classifier_reads_the_last_token_before_padding(name):
    torch.manual_seed(0)
    model = build(name, vocabulary=20, hidden=6, num_classes=3).eval()
    lengths = torch.tensor([5, 3, 1])
    tokens = torch.randint(1, 20, (3, 5)) * (torch.arange(5) < lengths[:, None])
    packed = pack_padded_sequence(model.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
    forward = model.lstm(packed)[1][0][0]
    states = model.lstm(model.embedding(tokens))[0]
    parts = [forward] if name == "lstm" else [forward, states[:, 0, 6:]]
    assert torch.allclose(model(tokens), model.linear(torch.cat(parts, 1)), atol=1e-6)


def test_left_padding_and_empty_texts_are_read():
    torch.manual_seed(0)
    model = build("bilstm", vocabulary=20, hidden=6).eval()
    tokens = torch.tensor([[0, 0, 7, 3], [0, 0, 0, 0]])
    states = model.lstm(model.embedding(tokens))[0]
    expected = model.linear(torch.cat((states[0, 3, :6], states[0, 2, 6:])))
    out = model(tokens)
    assert torch.allclose(out[0], expected, atol=1e-6)
    assert out.isfinite().all()


def test_frozen_embedding_has_no_gradient():
    model = build("lstm", vocabulary=20, hidden=4, frozen=True)
    model(torch.randint(1, 20, (2, 3))).sum().backward()
    assert model.embedding.weight.grad is None
    assert model.linear.weight.grad is not None


def test_language_model_carries_its_state():
    torch.manual_seed(0)
    model = build("lstm_lm", vocabulary=20, hidden=6).eval()
    tokens = torch.randint(0, 20, (2, 8))
    first, state = model(tokens[:, :5], model.start(2))
    second, _ = model(tokens[:, 5:], state)
    assert torch.allclose(torch.cat((first, second), 1), model(tokens), atol=1e-6)
    assert all(p.abs().max() <= 0.04 for p in model.parameters())
