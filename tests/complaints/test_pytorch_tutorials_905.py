"""https://github.com/pytorch/tutorials/issues/905: model sparsity increases, but inference time is not cut down."""

from __future__ import annotations

from pathlib import Path

import torch
from complaint_models import count_executed_macs, find_zeros
from engine_helpers import TARGETS, Net, attach_to_network, make_batch, train

import pomona as pm
from pomona.sparse.layers import PackedConv2d


def test_a_saved_state_dict_keeps_its_zeros(tmp_path: Path) -> None:
    """After torch.save(model.state_dict()) and loading, the sparsity of the user's pruned modules was 0 again."""
    model, optimizer, pruner = attach_to_network(pm.OneShot(sparsity=0.8), total=4)
    train(model, optimizer, range(4))
    pruner.finish()
    torch.save(model.state_dict(), tmp_path / "model.pth")
    loaded = Net(seed=1).double()
    loaded.load_state_dict(torch.load(tmp_path / "model.pth", weights_only=True), strict=True)
    zeros = find_zeros(loaded, TARGETS)
    assert sum(int(z.sum()) for z in zeros.values()) == round(0.8 * sum(z.numel() for z in zeros.values()))
    x, _ = make_batch(0)
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_zeros_alone_save_no_work_and_packed_weights_do() -> None:
    """The user zeroed 80 % of every convolution, and a forward pass took as long as before."""
    dense, model = Net(), Net()
    x = torch.randn(2, 4, 5, 5)
    pm.prune(model, 0.8)
    assert count_executed_macs(model, x) == count_executed_macs(dense, x)

    fast = pm.compress(model, x, policy="all", formats=["unstructured"], patience=0.0)
    assert isinstance(fast.conv2, PackedConv2d)
    weight = fast.conv2.packed_weight("weight")
    rows = (model.conv2.weight != 0).flatten(1).sum(1)
    assert weight.values.shape == (rows.max(), 16)  # 12 rows, padded to one slice of 16 and to its longest row
    assert weight.values.numel() < model.conv2.weight.numel() / 4
    with torch.no_grad():
        assert torch.allclose(fast.eval()(x), model.eval()(x), atol=1e-5)
