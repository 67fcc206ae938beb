"""Which norms and biases are removed with a filter: those that the traced forward puts behind it, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import pomona as pm

Removed = dict[str, Tensor]  # layer → true where all weights of an output are zero


class Model(nn.Module):
    """A model with the given modules, whose forward is the given function of the model and its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, module in modules.items():
            setattr(self, name, module)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self, x)).mean((2, 3))


def conv(inputs: int = 4, outputs: int = 4) -> nn.Conv2d:
    """Return a 3×3 convolution with a bias that keeps the image size."""
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def norm(channels: int = 4) -> nn.BatchNorm2d:
    """Return a batch norm."""
    return nn.BatchNorm2d(channels)


def depthwise() -> nn.Conv2d:
    """Return a depthwise convolution with a bias."""
    return nn.Conv2d(4, 4, 3, padding=1, groups=4)


def tied(one: nn.Conv2d, two: nn.Conv2d) -> dict[str, nn.Module]:
    """Return two convolutions that share a weight and have a bias each."""
    two.weight = one.weight
    return {"a": one, "b": two}


def prune_filters(model: nn.Module, sparsity: float = 0.5, **options: Any) -> Removed:
    """Remove filters after every bias and norm was set to values other than zero; return what was removed."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
        for module in model.modules():
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.uniform_(0.5, 1.5)
    pruner = pm.OneShot(sparsity=sparsity, pattern=pm.Filter(), allocation="uniform", **options)
    pruner.attach(model, SGD(model.parameters(), lr=0.1))
    masks = {slot.name.rpartition(".")[0]: ~slot.kept_outputs() for slot in pruner.slots}
    pruner.finish()
    return masks


NOTHING = torch.zeros(4, dtype=torch.bool)

# name → a model, and for each norm which of its channels are removed
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Callable[[Removed], Tensor]]]] = {
    "two norms behind one convolution": (
        lambda: Model(lambda m, x: m.p(y := m.a(x)) + m.q(F.relu(y)), a=conv(), p=norm(), q=norm()),
        {"p": lambda r: r["a"], "q": lambda r: r["a"]},
    ),
    "a norm behind a norm": (
        lambda: Model(lambda m, x: m.q(F.max_pool2d(F.relu(m.p(m.a(x))), 2)), a=conv(), p=norm(), q=norm()),
        {"p": lambda r: r["a"], "q": lambda r: r["a"]},
    ),
    "sum": (
        lambda: Model(lambda m, x: m.p(F.relu(m.a(x)) + m.b(x)), a=conv(), b=conv(), p=norm()),
        {"p": lambda r: r["a"] & r["b"]},
    ),
    "stream of residual blocks": (
        lambda: Model(lambda m, x: m.q((y := m.a(x)) + m.b(F.relu(m.p(y)))), a=conv(), b=conv(), p=norm(), q=norm()),
        {"p": lambda r: r["a"], "q": lambda r: r["a"] & r["b"]},
    ),
    "sum with the input": (lambda: Model(lambda m, x: m.p(m.a(x) + x), a=conv(), p=norm()), {"p": lambda r: NOTHING}),
    "sum with a number": (lambda: Model(lambda m, x: m.p(m.a(x) + 1), a=conv(), p=norm()), {"p": lambda r: NOTHING}),
    "sigmoid": (
        lambda: Model(lambda m, x: m.p(torch.sigmoid(m.a(x))), a=conv(), p=norm()),
        {"p": lambda r: NOTHING},
    ),
    "gate": (
        lambda: Model(lambda m, x: m.p(m.a(x) * torch.sigmoid(m.b(x))), a=conv(), b=conv(), p=norm()),
        {"p": lambda r: r["a"]},
    ),
    "product": (
        lambda: Model(lambda m, x: m.p(m.a(x) * m.b(x)), a=conv(), b=conv(), p=norm()),
        {"p": lambda r: r["a"] | r["b"]},
    ),
    "depthwise convolution": (
        lambda: Model(lambda m, x: m.p(m.d(F.relu(m.a(x)))), a=conv(), d=depthwise(), p=norm()),
        {"d": lambda r: r["a"] | r["d"], "p": lambda r: r["a"] | r["d"]},
    ),
    "excluded depthwise convolution": (
        lambda: Model(lambda m, x: m.p(m.kept(F.relu(m.a(x)))), a=conv(), kept=depthwise(), p=norm()),
        {"kept": lambda r: r["a"], "p": lambda r: r["a"]},
    ),
    "sum of concatenations": (
        lambda: Model(
            lambda m, x: m.e(m.p(torch.cat((m.a(x), m.b(x)), 1) + m.c(x))),
            a=conv(4, 2),
            b=conv(4, 4),
            c=conv(4, 6),
            e=conv(6),
            p=norm(6),
        ),
        {"p": lambda r: torch.cat((r["a"], r["b"])) & r["c"]},
    ),
    "concatenation": (
        lambda: Model(
            lambda m, x: m.c(m.p(torch.cat((m.a(x), F.relu(m.b(x))), 1))), a=conv(), b=conv(4, 2), c=conv(6), p=norm(6)
        ),
        {"p": lambda r: torch.cat((r["a"], r["b"]))},
    ),
    "concatenation with the input": (
        lambda: Model(lambda m, x: m.c(m.p(torch.cat((x, m.a(x)), 1))), a=conv(), c=conv(8), p=norm(8)),
        {"p": lambda r: NOTHING.repeat(2)},
    ),
    "concatenation with an excluded layer": (
        lambda: Model(
            lambda m, x: m.c(m.p(torch.cat((m.kept(x), m.a(x)), 1))), a=conv(), kept=conv(), c=conv(8), p=norm(8)
        ),
        {"p": lambda r: torch.cat((NOTHING, r["a"]))},
    ),
    "one norm called twice": (
        lambda: Model(lambda m, x: m.p(m.a(x)) * m.p(m.b(x)), a=conv(), b=conv(), p=norm()),
        {"p": lambda r: r["a"] & r["b"]},
    ),
    "one convolution called twice": (
        lambda: Model(lambda m, x: m.p(m.a(x)) + m.q(m.a(2 * x)), a=conv(), p=norm(), q=norm()),
        {"p": lambda r: r["a"], "q": lambda r: r["a"]},
    ),
    "tied weights": (
        lambda: Model(lambda m, x: m.p(m.a(x)) + m.q(m.b(x)), **tied(conv(), conv()), p=norm(), q=norm()),
        {"p": lambda r: r["a"], "q": lambda r: r["a"], "b": lambda r: r["a"]},
    ),
    "channels in another order": (
        lambda: Model(lambda m, x: m.p(m.a(x).unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2)), a=conv(), p=norm()),
        {"p": lambda r: NOTHING},
    ),
    "old spectral norm": (
        lambda: Model(lambda m, x: m.p(m.a(x)), a=nn.utils.spectral_norm(conv()), p=norm()),
        {"p": lambda r: r["a"]},
    ),
    "group norm": (
        lambda: Model(lambda m, x: m.p(m.a(x)), a=conv(), p=nn.GroupNorm(2, 4)),
        {"p": lambda r: r["a"]},
    ),
    "instance norm": (
        lambda: Model(lambda m, x: m.p(m.a(x)), a=conv(), p=nn.InstanceNorm2d(4, affine=True)),
        {"p": lambda r: r["a"]},
    ),
    "layer norm behind a linear layer": (
        lambda: Model(lambda m, x: m.p(m.a(x.mean((2, 3))))[:, :, None, None], a=nn.Linear(4, 4), p=nn.LayerNorm(4)),
        {"p": lambda r: r["a"]},
    ),
    "layer norm over the width of an image": (
        lambda: Model(lambda m, x: m.p(m.a(x)), a=conv(), p=nn.LayerNorm(4)),
        {"p": lambda r: NOTHING},
    ),
    "transposed convolution": (
        lambda: Model(lambda m, x: m.p(m.a(x)), a=nn.ConvTranspose2d(4, 4, 2), p=norm()),
        {"p": lambda r: r["a"]},
    ),
    "transposed convolution with groups": (
        lambda: Model(lambda m, x: m.p(m.a(x)), a=nn.ConvTranspose2d(4, 4, 2, groups=2), p=norm()),
        {"p": lambda r: r["a"]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_coupled_vectors_are_zero_where_their_channel_is_removed(name: str) -> None:
    make, expected = CASES[name]
    model = make()
    removed = prune_filters(model, exclude=["kept"] if hasattr(model, "kept") else [])
    assert all(channels.any() and not channels.all() for channels in removed.values())
    own = {layer: lambda r, layer=layer: r[layer] for layer in removed}
    for layer, find_removed in (own | expected).items():
        for leaf in ("weight", "bias"):
            vector = model.get_submodule(layer)._parameters.get(leaf)
            if vector is not None and vector.ndim == 1:
                assert ((vector == 0) == find_removed(removed)).all(), f"{layer}.{leaf}"


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", CASES)
def test_norms_turn_no_removed_channel_into_a_constant(name: str, training: bool) -> None:
    make, expected = CASES[name]
    model = make()
    removed = prune_filters(model, exclude=["kept"] if hasattr(model, "kept") else [])
    seen: dict[str, list[Tensor]] = {layer: [] for layer in expected}
    for layer in seen:
        model.get_submodule(layer).register_forward_hook(lambda _, __, out, layer=layer: seen[layer].append(out))
    model.train(training)(torch.randn(3, 4, 4, 4))
    for layer, outputs in seen.items():
        for out in outputs:
            assert not out[:, expected[layer](removed)].any()


@pytest.mark.parametrize("count", [1, 2])
def test_running_means_of_norms_without_gain_are_cleared(count: int) -> None:
    norms = {f"norm{i}": nn.BatchNorm2d(4, affine=False) for i in range(count)}
    model = Model(lambda m, x: sum(getattr(m, n)(y) for n, y in ((n, m.a(x)) for n in norms)), a=conv(), **norms)
    removed = prune_filters(model)["a"]
    for each in norms.values():
        assert ((each.running_mean == 0) == removed).all()
    features = model.run(model.eval(), torch.randn(3, 4, 4, 4))
    assert not features[:, removed].any()


def test_a_filter_of_a_grouped_transposed_convolution_is_an_output_of_every_group() -> None:
    model = Model(lambda m, x: m.a(x), a=nn.ConvTranspose2d(4, 4, 1, groups=2))
    with torch.no_grad():
        model.a.weight.copy_(torch.tensor([[1.0, 2], [1, 2], [1, 2], [1, 2]]).view(4, 2, 1, 1))
        model.a.bias.fill_(1)
    pm.OneShot(sparsity=0.5, pattern=pm.Filter()).attach(model, SGD(model.parameters(), lr=0.1))
    assert model.a.bias.tolist() == [0, 1, 0, 1], "outputs 0 and 2 are the first of their groups"
    out = model.a(torch.ones(1, 4, 1, 1)).flatten()
    assert out.tolist() == [0, 5, 0, 5]


@pytest.mark.parametrize("name", ["densenet40", "wrn16_4", "resnet20"])
def test_norms_of_bundled_networks_map_channels_of_zeros_to_zeros(name: str) -> None:
    """In a DenseNet every later norm of a block reads a filter, and in a pre-activation ResNet norms read sums."""
    model = pm.models.build(name).eval()
    prune_filters(model)
    zeros = 0

    def compare(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal zeros
        dead = ~inputs[0].transpose(0, 1).flatten(1).any(1)
        zeros += int(dead.sum())
        assert not out[:, dead].any()

    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(compare)
    model(torch.randn(2, 3, 16, 16))
    assert zeros > 50
