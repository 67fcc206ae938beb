"""https://github.com/VainF/Torch-Pruning/issues/149: inference time does not speed up after half of the channels go."""

from __future__ import annotations

import pytest
import torch
from complaint_models import count_executed_macs, prune_at_once
from torch import nn

import pomona as pm


def test_the_report_has_the_measured_time_beside_the_counted_work() -> None:
    """Parameters and MACs fell, the time on the user's CPU did not, and only counts had been reported."""
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    ).eval()  # fmt: skip
    prune_at_once(model, pm.OneShot(sparsity=0.5, pattern=pm.Filter(), allocation="uniform"))
    x = torch.randn(2, 3, 8, 8)
    shrunk = pm.shrink(model, x, latency=True)
    assert {name: tuple(change) for name, change in shrunk.removed.items()} == {"0": (16, 8), "3": (16, 8)}
    assert count_executed_macs(shrunk.model, x) < 0.5 * count_executed_macs(model, x)
    latency = shrunk.latency
    assert latency is not None
    assert latency.before > 0 < latency.after
    for milliseconds in latency:
        assert f"{milliseconds:.2f}" in str(shrunk)
