"""https://github.com/tensorflow/model-optimization/issues/611: pruning does not reduce inference time."""

from __future__ import annotations

import pytest
import torch
from complaint_models import count_executed_macs, prune_at_once

import pomona as pm


def test_a_filter_pruned_resnet_executes_less_work() -> None:
    """The user pruned a ResNet and asked that pruning remove its edges instead of setting weights to zero."""
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model = pm.models.build("resnet20").eval()
    x = torch.randn(2, 3, 32, 32)
    dense = count_executed_macs(model, x)
    prune_at_once(model, pm.OneShot(sparsity=0.5, pattern=pm.Filter(), allocation="uniform"))
    assert count_executed_macs(model, x) == dense  # zeros alone are multiplied like other numbers
    shrunk = pm.shrink(model, x)
    assert count_executed_macs(shrunk.model, x) == len(x) * shrunk.macs.after
    assert count_executed_macs(shrunk.model, x) < 0.5 * dense
    with torch.no_grad():
        assert torch.allclose(shrunk.model(x), model(x), atol=1e-4)
