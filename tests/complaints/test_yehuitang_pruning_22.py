"""https://github.com/yehuitang/Pruning/issues/22: no acceleration for ManiDP, whose masks multiply outputs."""

from __future__ import annotations

import pytest
import torch
from complaint_models import count_executed_macs, prune_at_once
from engine_helpers import Net, count_hooks

import pomona as pm


def test_a_pruned_model_has_no_masks_and_a_shrunk_one_runs_the_macs_that_are_reported() -> None:
    """The FLOPs of the paper were counted by masks, while the code ran the dense convolutions and the masks on top."""
    pytest.importorskip("torch_pruning")
    model, x = Net().eval(), torch.randn(2, 4, 5, 5)
    modules = [type(module) for module in model.modules()]
    dense = count_executed_macs(model, x)
    prune_at_once(model, pm.OneShot(sparsity=0.5, pattern=pm.Filter(), allocation="uniform"))
    assert [type(module) for module in model.modules()] == modules
    assert not any(count_hooks(model, torch.optim.SGD(model.parameters())).values())
    assert count_executed_macs(model, x) == dense  # nothing was added to a forward pass
    shrunk = pm.shrink(model, x)
    assert count_executed_macs(shrunk.model, x) == len(x) * shrunk.macs.after < dense
