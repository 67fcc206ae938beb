"""Channels that a forward pass divides into heads stay, and the others are removed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pomona as pm
from pomona.models.example_inputs import ModelInputs
from pomona.sparse.shrink.divided_outputs import find_divided_layers


class Heads(nn.Module):
    """Two linear layers, of which the first one's outputs are divided into two heads of four and summed by head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.hidden, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.view(*x.shape[:-1], 2, 4).softmax(-1).flatten(-2)
        return self.last(torch.relu(self.hidden(x)))


def zero_output(layer: nn.Linear, index: int) -> None:
    """Set the weights and the bias of one output to zero."""
    with torch.no_grad():
        layer.weight[index] = 0
        layer.bias[index] = 0


@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6)])
def test_the_layers_whose_outputs_are_divided_are_found(shape: tuple[int, ...]) -> None:
    model = Heads()
    assert find_divided_layers(model, ModelInputs((torch.randn(shape),))) == {model.first}
    assert not model.first._forward_hooks


def test_merged_dimensions_are_not_divided() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Flatten(), nn.Linear(18, 2))
    assert find_divided_layers(model, ModelInputs((torch.randn(2, 3, 4),))) == set()


def test_divided_channels_stay_and_others_are_removed() -> None:
    pytest.importorskip("torch_pruning")
    model, x = Heads(), torch.randn(5, 6)
    zero_output(model.first, 1)
    with pytest.raises(pm.PomonaError, match="first has 1 because the forward pass divides them, as into heads"):
        pm.shrink(model, x)
    zero_output(model.hidden, 2)
    shrunk = pm.shrink(model, x)
    assert {name: tuple(change) for name, change in shrunk.removed.items()} == {"hidden": (8, 7)}
    assert shrunk.kept == {"first": "1 because the forward pass divides them, as into heads"}
    with torch.no_grad():
        assert torch.allclose(shrunk.model(x), model(x), atol=1e-6)
