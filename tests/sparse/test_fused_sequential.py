"""A packed layer computes the ReLU after it only where its Sequential calls both: nothing else sees a difference."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import prune_balanced
from substitute_cudnn import Cudnn, convolution, images
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from pomona.sparse import compress, decompress, load, save
from pomona.sparse.layers import FusedSequential, PackedLinear
from pomona.sparse.network import plan_copy
from pomona.sparse.surgery import fuse_relus


class Taps(nn.Module):
    """Convolutions whose outputs are read before the ReLU, as perceptual losses do."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        layers = [nn.Conv2d(4, 16, 3), nn.ReLU(inplace), nn.Conv2d(16, 16, 3), nn.ReLU(inplace), nn.Conv2d(16, 8, 1)]
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        taps = []
        for layer in self.features:
            x = layer(x)
            taps.append(x)
        return tuple(taps)


class Twice(nn.Module):
    """A linear layer that is called by itself and in its Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(64, 64), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.f[0](x) + self.f(x)


def make_mlp() -> nn.Sequential:
    """Return a network of balanced linear layers and ReLUs."""
    torch.manual_seed(0)
    return prune_balanced(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), 32, 3).eval()


@pytest.fixture
def relus(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record of each call of a packed linear layer whether it computed a ReLU."""
    calls, multiply = [], PackedLinear.multiply_packed

    def record(self: PackedLinear, name: str, x: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        calls.append(relu)
        return multiply(self, name, x, bias, relu)

    monkeypatch.setattr(PackedLinear, "multiply_packed", record)
    return calls


@pytest.mark.parametrize("inplace", [False, True])
@torch.no_grad()
def test_outputs_before_a_relu_are_those_of_the_dense_layers(inplace: bool) -> None:
    torch.manual_seed(0)
    model, x = prune_balanced(Taps(inplace), 4, 1).eval(), torch.randn(2, 4, 9, 9)
    packed = compress(model, x, policy="all", patience=0.01)
    planned = plan_copy(packed, (x,))
    for other in filter(None, (packed, planned)):
        assert all(map(torch.allclose, other(x), model(x), [1e-4] * 5, [1e-5] * 5))


@pytest.mark.parametrize("example", [None, (64,)])
@torch.no_grad()
def test_a_layer_that_is_also_called_by_itself(example: tuple[int, ...] | None) -> None:
    torch.manual_seed(0)
    model, x = prune_balanced(Twice(), 32, 3).eval(), torch.randn(2, 64)
    torch.testing.assert_close(compress(model, example, policy="all", patience=0.01)(x), model(x))


@torch.no_grad()
def test_a_pair_is_one_product_and_a_part_of_it_another(relus: list[bool]) -> None:
    model, x = make_mlp(), torch.randn(2, 64)
    packed = compress(model, policy="all")
    parts: list[tuple[Callable[[Any], Any], list[bool]]] = [
        (lambda m: m, [True, False]),
        (lambda m: m[0], [False]),
        (lambda m: m[:1], [False]),
        (lambda m: m[:2], [True]),
        (lambda m: nn.Sequential(*m), [False, False]),
        (lambda m: m[:2] + m[2:], [False, False]),
        (lambda m: pickle.loads(pickle.dumps(m)), [True, False]),
    ]
    for take, expected in parts:
        relus.clear()
        torch.testing.assert_close(take(packed)(x), take(model)(x))
        assert relus == expected


@torch.no_grad()
def test_a_layer_in_two_places_computes_the_relu_in_one(relus: list[bool]) -> None:
    linear, relu = make_mlp()[0], nn.ReLU()
    model, x = nn.Sequential(linear, relu, relu, linear, nn.Sequential(linear, relu)), torch.randn(2, 64)
    packed = compress(model, policy="all")
    relus.clear()
    torch.testing.assert_close(packed(x), model(x))
    assert relus == [True, False, True]


@torch.no_grad()
def test_modules_that_are_replaced_afterwards_are_called(relus: list[bool]) -> None:
    packed = compress(model := make_mlp(), policy="all")
    for one in (packed, model):
        one[1] = nn.Tanh()
    x = torch.randn(2, 64)
    relus.clear()
    torch.testing.assert_close(packed(x), model(x))
    assert relus == [False, False]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", ["hook", "hook of all modules", "forward"])
@torch.no_grad()
def test_what_is_added_afterwards_sees_the_outputs_of_the_dense_layers(
    kind: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = make_mlp(), torch.randn(2, 64)
    seen = []
    for one in (model, compress(model, policy="all")):
        module, outputs = one[place], []

        def see(module: nn.Module, _: Any, y: Tensor, wanted: Any = module, outputs: Any = outputs) -> None:
            if module is wanted:
                outputs.append(y)

        def forward(x: Tensor, module: Any = module, outputs: Any = outputs) -> Tensor:
            outputs.append(type(module).forward(module, x))
            return outputs[-1]

        if kind == "forward":
            monkeypatch.setattr(module, "forward", forward)
        handle = (
            None
            if kind == "forward"
            else (module.register_forward_hook(see) if kind == "hook" else register_module_forward_hook(see))
        )
        one(x)
        if handle is not None:
            handle.remove()
        seen.append(outputs)
    assert len(seen[0]) == 1
    torch.testing.assert_close(seen[1], seen[0])


@torch.no_grad()
def test_decompress_restores_the_containers_and_files_keep_them(tmp_path: Path) -> None:
    model, x = make_mlp(), torch.randn(2, 64)
    packed = compress(model, policy="all")
    assert type(packed) is FusedSequential
    assert str(decompress(packed)) == str(model)
    loaded = load(save(packed, tmp_path / "model.safetensors"), copy.deepcopy(model))
    assert type(loaded) is FusedSequential
    assert torch.equal(loaded(x), packed(x))
    assert list(packed.state_dict()) == list(loaded.state_dict())


@torch.no_grad()
def test_a_dense_convolution_called_by_itself_is_without_its_relu(cudnn: Cudnn) -> None:
    layer, x = convolution(), images()
    model = fuse_relus(nn.Sequential(layer, nn.ReLU()), ["0"])
    assert torch.equal(model(x), layer(x).relu())
    assert cudnn.calls == 1
    assert torch.equal(model[0](x), layer(x))
    assert torch.equal(model[:1](x), layer(x))
    assert cudnn.calls == 1
