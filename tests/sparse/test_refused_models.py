"""What `compress` refuses before it copies a model, each in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packing import prune_balanced
from torch import Tensor, nn
from torch.nn.utils import prune

import pomona as pm
from pomona.sparse import Compression, compress


def make_linear() -> nn.Module:
    """Return a balanced linear layer."""
    return prune_balanced(nn.Linear(64, 64), 32, 3)


class Scaled(nn.Module):
    """A linear layer whose output is multiplied by a number, its `compression`."""

    def __init__(self, compression: Any = None) -> None:
        super().__init__()
        self.linear = make_linear()
        if compression is not None:
            self.compression = compression

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.compression  # type: ignore[no-any-return]


class ScaledByClass(Scaled):
    """The same with the number of a class."""

    compression = 0.5


class ScaledByProperty(Scaled):
    """The same with a property."""

    @property
    def compression(self) -> float:
        """The number."""
        return 0.5


OWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "number": (lambda: Scaled(0.5), "float"),
    "tensor": (lambda: Scaled(torch.ones(1)), "Tensor"),
    "part": (lambda: Scaled(make_linear()), "Linear"),
    "class": (ScaledByClass, "float"),
    "property": (ScaledByProperty, "property"),
}


@pytest.mark.parametrize("case", OWN)
def test_a_compression_of_the_model_is_not_replaced(case: str) -> None:
    make, kind = OWN[case]
    with pytest.raises(pm.PomonaError, match=f"a part of its own called 'compression', a {kind}, .*: rename it"):
        compress(make())


def test_a_report_is_replaced_and_parts_may_have_a_compression() -> None:
    first = compress(nn.Sequential(make_linear()), policy="all")
    assert isinstance(compress(first, policy="all").compression, Compression)
    inner = compress(nn.Sequential(Scaled(0.5)), policy="all", patience=0)
    x = torch.randn(2, 64)
    assert isinstance(inner.compression, Compression)
    torch.testing.assert_close(inner(x), 0.5 * inner[0].linear(x))


def l1(layer: nn.Module, leaf: str) -> nn.Module:
    """Return a layer pruned by the hooks of PyTorch."""
    prune.l1_unstructured(layer, leaf, 0.9)
    return layer


def freeze(model: nn.Module) -> nn.Module:
    """Return a model without gradients, whose computed weights PyTorch can copy."""
    return model.requires_grad_(False)


COMPUTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "pruned weight": (lambda: l1(make_linear(), "weight"), "0 computes its weight from weight_orig at"),
    "pruned bias": (lambda: l1(make_linear(), "bias"), "0 computes its bias from bias_orig at"),
    "frozen bias": (lambda: l1(freeze(make_linear()), "bias"), "0 computes its bias from bias_orig at"),
    "weight norm": (lambda: nn.utils.weight_norm(make_linear()), "0 computes its weight from weight_g, weight_v at"),
    "pruned LSTM": (lambda: l1(nn.LSTM(64, 64), "weight_hh_l0"), "0 computes its weight from weight_hh_l0_orig at"),
    "frozen LSTM": (lambda: l1(freeze(nn.LSTM(64, 64)), "bias_hh_l0"), "0 computes its bias from bias_hh_l0_orig at"),
    "pruned GRU": (lambda: l1(nn.GRU(64, 64), "weight_ih_l0"), "0.weight_ih_l0 is computed with a gradient"),
    "normed Conv1d": (lambda: nn.utils.weight_norm(nn.Conv1d(8, 8, 3)), "0.weight is computed with a gradient"),
}


@pytest.mark.parametrize("case", COMPUTED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_computed_tensor_is_refused_with_the_way_out(case: str) -> None:
    make, message = COMPUTED[case]
    with pytest.raises(pm.PomonaError, match=f"^{message}.*: make it permanent first, by .*prune.remove or"):
        compress(nn.Sequential(make(), make_linear()), policy="all")


def test_what_is_permanent_is_compressed() -> None:
    layer, gru = l1(make_linear(), "bias"), l1(nn.GRU(64, 64), "weight_ih_l0")
    prune.remove(layer, "bias")
    prune.remove(gru, "weight_ih_l0")
    gru.flatten_parameters()
    compressed = compress(nn.Sequential(layer, gru), policy="all")
    assert list(compressed.compression.dense) == ["1"]  # type: ignore[union-attr, arg-type]


def test_an_output_that_forward_keeps_is_refused() -> None:
    model = Scaled(None)
    model.last = model.linear(torch.randn(1, 64))
    with pytest.raises(pm.PomonaError, match="^last is computed with a gradient and cannot be copied: .* detach it"):
        compress(model)
    model.last = model.last.detach()
    compress(model)
