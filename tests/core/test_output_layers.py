"""Layers whose outputs are the network's: they are found behind every output, and none of their outputs is removed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import pomona as pm


def list_outputs(model: nn.Module) -> list[str]:
    """Return the names of the weights that are tagged as those of output layers."""
    return [choice.target.name for choice in pm.prunable(model) if "classifier" in choice.target.tags]


class Model(nn.Module):
    """A model with the given modules, whose forward is the given function of the model and its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class Untraceable(Model):
    """A model that branches on its data before it runs."""

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x) if x.sum() > -1e9 else x


class Detections(NamedTuple):
    """The outputs of a model with two heads."""

    boxes: Tensor
    classes: Tensor


def conv(inputs: int = 8, outputs: int = 8, size: int = 3) -> nn.Conv2d:
    """Return a convolution that keeps the image size."""
    return nn.Conv2d(inputs, outputs, size, padding=size // 2)


def body_and_head(forward: Callable[[Any, Tensor], Any], head: nn.Module) -> Model:
    """Return a model of two convolutions and a head."""
    return Model(forward, body=nn.Sequential(conv(), nn.ReLU(), conv(), nn.BatchNorm2d(8), nn.ReLU()), head=head)


def two_heads(forward: Callable[[Any, Tensor], Any]) -> Model:
    """Return a model of a hidden layer and two linear heads, the second of which is defined first."""
    return Model(forward, two=nn.Linear(8, 3), body=nn.Linear(8, 8), one=nn.Linear(8, 2))


class Residual(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = conv(), conv(), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.two(F.relu(self.one(x)))) + x)


class PreNorm(nn.Module):
    """A norm in front of a module, in a wrapper whose name says so."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.norm, self.module = nn.LayerNorm(8), module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(self.norm(x))


class MyLinear(nn.Linear):
    """A linear layer of the user's own, which tracing could look into."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2 * self.weight, self.bias)


class Optional(nn.Module):
    """A model that branches on an argument with a default value."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor, features: bool = False) -> Tensor:
        x = F.relu(self.body(x))
        return x if features else self.head(x)


class TiedHead(nn.Module):
    """A language model whose output is a product with its embedding."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.body, self.product = nn.Embedding(9, 8), nn.Linear(8, 8), product

    def forward(self, tokens: Tensor) -> Tensor:
        return self.product(F.relu(self.body(self.embed(tokens))), self.embed.weight)


def add_in_place(model: Any, x: Tensor) -> Tensor:
    """Run a head and add its outputs to a tensor in place."""
    out = x.new_zeros(x.size(0), 3)
    out.add_(model.head(F.relu(model.body(x))))
    return out


def upsample_to_input(model: Any, x: Tensor) -> Tensor:
    """Return a segmentation in the size of an earlier value."""
    features = model.body(x)
    logits = model.head(F.max_pool2d(features, 2))
    return F.interpolate(logits, size=features.shape[-2:], mode="bilinear").view(features.size(0), 3, -1)


IMAGE, ROW, TOKENS = (2, 8, 6, 6), (2, 8), ()

CASES: dict[str, tuple[nn.Module, tuple[int, ...], list[str]]] = {
    "1×1 convolution and pooling": (
        body_and_head(lambda m, x: m.head(m.body(x)).mean((2, 3)).softmax(1), conv(8, 3, 1)),
        IMAGE,
        ["head.weight"],
    ),
    "convolution, norm and activation": (
        body_and_head(lambda m, x: m.head(m.body(x)).flatten(1), nn.Sequential(conv(8, 3), nn.BatchNorm2d(3))),
        IMAGE,
        ["head.0.weight"],
    ),
    "depthwise convolution": (
        body_and_head(lambda m, x: m.head(m.body(x)), nn.Sequential(conv(8, 4, 1), nn.Conv2d(4, 4, 3, groups=4))),
        IMAGE,
        ["head.0.weight", "head.1.weight"],
    ),
    "transposed convolution": (
        body_and_head(lambda m, x: torch.sigmoid(m.head(m.body(x))), nn.ConvTranspose2d(8, 3, 2, stride=2)),
        IMAGE,
        ["head.weight"],
    ),
    "sizes of an earlier value": (body_and_head(upsample_to_input, conv(8, 3, 1)), IMAGE, ["head.weight"]),
    "tuple": (
        two_heads(lambda m, x: (m.one(F.relu(m.body(x))), [m.two(F.relu(m.body(x)))])),
        ROW,
        ["two.weight", "one.weight"],
    ),
    "dictionary": (
        two_heads(lambda m, x: {"a": m.one(F.relu(m.body(x))), "b": {"c": m.two(F.relu(m.body(x)))}}),
        ROW,
        ["two.weight", "one.weight"],
    ),
    "named tuple": (
        two_heads(lambda m, x: Detections(m.one(F.relu(m.body(x))), m.two(F.relu(m.body(x))))),
        ROW,
        ["two.weight", "one.weight"],
    ),
    "concatenation": (
        two_heads(lambda m, x: torch.cat([m.one(F.relu(m.body(x))), m.two(F.relu(m.body(x)))], 1)),
        ROW,
        ["two.weight", "one.weight"],
    ),
    "added in place": (Model(add_in_place, head=nn.Linear(8, 3), body=nn.Linear(8, 8)), ROW, ["head.weight"]),
    "sum of two layers": (
        Model(
            lambda m, x: m.wide(x) + m.deep(x),
            wide=nn.Linear(8, 3),
            deep=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)),
        ),
        ROW,
        ["wide.weight", "deep.1.weight"],
    ),
    "residual network without a head": (
        nn.Sequential(conv(), Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        IMAGE,
        ["2.two.weight"],
    ),
    "wrapper called a norm": (
        Model(lambda m, x: m.body(x) + x, body=PreNorm(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)))),
        ROW,
        ["body.module.1.weight"],
    ),
    "layer of the user's own": (nn.Sequential(MyLinear(8, 8), nn.ReLU(), MyLinear(8, 3)), ROW, ["2.weight"]),
    "old spectral norm": (
        nn.Sequential(nn.Linear(8, 8), nn.utils.spectral_norm(nn.Linear(8, 3))),
        ROW,
        ["1.weight_orig"],
    ),
    "old weight norm": (
        nn.Sequential(nn.Linear(8, 8), nn.utils.weight_norm(nn.Linear(8, 3))),
        ROW,
        ["1.weight_g", "1.weight_v"],
    ),
    "parametrization": (
        nn.Sequential(nn.Linear(8, 8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))),
        ROW,
        ["1.parametrizations.weight.original"],
    ),
    "argument with a default": (Optional(), ROW, ["head.weight"]),
    "attention": (
        Model(lambda m, x: m.mix(x[None], x[None], x[None])[0][0], mix=nn.MultiheadAttention(8, 2)),
        ROW,
        ["mix.out_proj.weight"],
    ),
    "tied embedding": (TiedHead(F.linear), TOKENS, ["embed.weight"]),
    "tied embedding, transposed": (TiedHead(lambda x, weight: x @ weight.t()), TOKENS, ["embed.weight"]),
    "tied embedding, normalised": (TiedHead(lambda x, w: F.linear(x, F.normalize(w))), TOKENS, ["embed.weight"]),
    "recurrent": (Model(lambda m, x: m.lstm(m.body(x))[0], body=nn.Linear(8, 8), lstm=nn.LSTM(8, 4)), ROW, []),
    "a layer itself": (nn.Linear(8, 3), ROW, ["weight"]),
}


@pytest.mark.parametrize(("model", "outputs"), [(m, o) for m, _, o in CASES.values()], ids=CASES)
def test_output_layers_are_found_behind_the_outputs(model: nn.Module, outputs: list[str]) -> None:
    assert list_outputs(model) == outputs


BUNDLED = {
    **dict.fromkeys(("bilstm", "digits_lstm", "digits_transformer"), "linear.weight"),
    **dict.fromkeys(("conv2", "conv4", "conv6"), "classifier.4.weight"),
    **dict.fromkeys(("lenet300", "mlp"), "layers.5.weight"),
    "lstm": "linear.weight",
    "lstm_lm": "decoder.weight",
    **dict.fromkeys(("vgg11", "vgg16_d"), "classifier.0.weight"),
}


@pytest.mark.parametrize("name", pm.models.names())
def test_bundled_models_have_one_output_layer(name: str) -> None:
    """The runs in results/ prune all layers but this one, or all of them, so it must stay what it is."""
    with torch.device("meta"):
        model = pm.models.build(name)
    assert list_outputs(model) == [BUNDLED.get(name, "head.2.weight")]


# ---- the order of definition


@pytest.mark.parametrize(
    ("modules", "outputs"),
    [
        ({"body": nn.Linear(8, 8), "head": nn.Linear(8, 3)}, ["head"]),
        ({"body": nn.Linear(8, 16), "boxes": nn.Linear(16, 4), "classes": nn.Linear(16, 3)}, ["boxes", "classes"]),
        ({"body": conv(), "boxes": conv(8, 4, 1), "classes": conv(8, 3, 1)}, ["boxes", "classes"]),
        (
            {"body": nn.Linear(8, 16), "heads": nn.ModuleList([nn.Linear(16, n) for n in (2, 3, 4)])},
            [f"heads.{i}" for i in range(3)],
        ),
        (
            {f"head{i}": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)) for i in range(2)},
            ["head0.2", "head1.2"],
        ),
        (
            {"encoder": nn.Linear(8, 4), "up": nn.ConvTranspose2d(4, 2, 2), "out": nn.ConvTranspose2d(2, 1, 2)},
            ["encoder", "out"],
        ),
        ({"body": conv(), "head": conv(8, 8, 1)}, ["head"]),
    ],
)
def test_without_a_graph_the_last_layer_and_the_heads_beside_it_are_taken(
    modules: dict[str, nn.Module], outputs: list[str]
) -> None:
    assert list_outputs(Untraceable(lambda m, x: x, **modules)) == [f"{name}.weight" for name in outputs]


# ---- no output is removed


SEVERAL_LAYERS = [
    name
    for name, (model, shape, _) in CASES.items()
    if shape and len(pm.prunable(model).targets) > 0 and name != "recurrent"
]


@pytest.mark.parametrize("name", SEVERAL_LAYERS)
def test_no_output_of_the_network_is_constant_after_filters_are_removed(name: str) -> None:
    torch.manual_seed(0)
    model, shape, _ = CASES[name]
    with torch.no_grad():
        for output in list_outputs(model):
            model.get_parameter(output).mul_(1e-3)  # the first to be removed
    pruner = pm.OneShot(sparsity=0.5, pattern=pm.Filter()).attach(model, SGD(model.parameters(), lr=0.1))
    pruner.finish()
    assert pruner.sparsity() > 0.2
    for values in torch.utils._pytree.tree_leaves(model(torch.randn(16, *shape[1:]))):
        channels = values.transpose(0, 1).flatten(1)
        assert (channels.std(1) > 0).all()


@settings(max_examples=25, deadline=None)
@given(classes=st.integers(2, 9), sparsity=st.floats(0, 0.8), seed=st.integers(0, 99), hard=st.booleans())
def test_a_fully_convolutional_classifier_keeps_its_classes(
    classes: int, sparsity: float, seed: int, hard: bool
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(conv(1, 6), nn.ReLU(), conv(6, classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    nn.init.normal_(model[2].weight, std=1e-3)  # the smallest filters of all
    optimizer = SGD(model.parameters(), lr=0.1)
    make = pm.OneShot if hard else pm.SFP
    pruner = make(sparsity=sparsity, pattern=pm.Filter(), allocation="global")
    pruner.attach(model, optimizer, total_steps=2, steps_per_epoch=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner.finish()
    assert model[2].weight.flatten(1).any(1).all()


def test_including_an_output_layer_is_refused_where_outputs_would_be_removed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(pm.PomonaError, match=r"2\.weight computes outputs of the network.*exclude=\['2\.weight'\]"):
        pm.OneShot(sparsity=0.5, pattern=pm.Filter(), include="*").attach(model, SGD(model.parameters(), lr=0.1))
    pruner = pm.OneShot(sparsity=0.5, pattern=pm.Filter(), include="*", exclude="2")
    assert list(pruner.attach(model, SGD(model.parameters(), lr=0.1)).masks()) == ["0.weight"]
    pruner.finish()
    pm.OneShot(sparsity=0.5, include="*").attach(model, SGD(model.parameters(), lr=0.1))  # single weights may go


def test_srigl_ablates_no_class() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        model[2].weight[:5] *= 1e-3  # weights that are dropped first, of outputs without gradient
    optimizer = SGD(model.parameters(), lr=0.01)
    pruner = pm.SRigL(sparsity=0.5, every=2, until=1.0, ablation=1.0).attach(model, optimizer, total_steps=20)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 16))[:, 5:].square().mean().backward()
        optimizer.step()
    assert "2.weight" in pruner.masks()
    assert pruner.masks()["2.weight"].any(1).all()
