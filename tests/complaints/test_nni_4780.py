"""https://github.com/microsoft/nni/issues/4780: must model speedup be called again after every load?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from complaint_models import count_executed_macs, prune_at_once
from engine_helpers import Net

import pomona as pm
from pomona.sparse.layers import PackedConv2d


def test_a_loaded_model_is_packed_already(tmp_path: Path) -> None:
    """The user's model was fast after speedup, and slow again after it was saved and loaded."""
    model, x = Net(), torch.randn(2, 4, 5, 5)
    prune_at_once(model, pm.OneShot(sparsity=0.75, pattern=pm.Balanced(block=4)))
    packed = pm.compress(model, x, policy="all", patience=0.0)
    loaded = pm.load(pm.save(packed, tmp_path / "model.safetensors"), Net(seed=1))
    assert isinstance(loaded.conv1, PackedConv2d)
    assert isinstance(loaded.conv2, PackedConv2d)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), packed.eval()(x))


def test_a_loaded_model_is_shrunk_already(tmp_path: Path) -> None:
    """A network without its pruned filters is saved as a program that needs neither the class nor the masks."""
    pytest.importorskip("torch_pruning")
    model, x = Net().eval(), torch.randn(2, 4, 5, 5)
    prune_at_once(model, pm.OneShot(sparsity=0.5, pattern=pm.Filter(), allocation="uniform"))
    shrunk = pm.shrink(model, x).model
    torch.export.save(torch.export.export(shrunk, (x,)), tmp_path / "shrunk.pt2")
    loaded = torch.export.load(tmp_path / "shrunk.pt2").module()
    assert count_executed_macs(loaded, x) == count_executed_macs(shrunk, x) < count_executed_macs(model, x)
    with torch.no_grad():
        assert torch.allclose(loaded(x), model(x), atol=1e-5)
