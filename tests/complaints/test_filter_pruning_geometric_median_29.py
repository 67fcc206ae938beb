"""https://github.com/he-y/filter-pruning-geometric-median/issues/29: a pruned ResNet-20 takes as long as before."""

from __future__ import annotations

import pytest
import torch
from complaint_models import count_executed_macs, prune_at_once
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pomona as pm


class CollectOperators(TorchDispatchMode):
    """Collects the names of the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(str(function))
        return function(*arguments, **(options or {}))


@torch.no_grad()
def collect_operators(model: nn.Module, x: Tensor) -> list[str]:
    """Return the operators of a forward pass in their order."""
    with CollectOperators() as collected:
        model(x)
    return collected.names


def test_a_shrunk_resnet_runs_less_work_and_no_other_operators() -> None:
    """The model with zeros was no faster; the one without was slower, since its shortcuts picked channels by index."""
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model = pm.models.build("resnet20").eval()
    x = torch.randn(1, 3, 32, 32)
    prune_at_once(model, pm.OneShot(sparsity=0.4, pattern=pm.Filter(), allocation="uniform"))
    shrunk = pm.shrink(model, x).model
    assert count_executed_macs(shrunk, x) < 0.7 * count_executed_macs(model, x)
    operators = collect_operators(model, x)
    assert collect_operators(shrunk, x) == operators
    assert not any("index" in name or "gather" in name for name in operators)
