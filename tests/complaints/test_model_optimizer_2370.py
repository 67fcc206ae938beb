"""https://github.com/NVIDIA/Model-Optimizer/pull/2370: sharded weights kept the sparsity mask before the last one."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from engine_helpers import attach_to_network, obeys_masks, train
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pomona as pm


def test_weights_and_their_state_dict_follow_every_new_mask() -> None:
    """After a mask was replaced, reading or exporting the weight still gave the weights of the mask before."""
    model, optimizer, pruner = attach_to_network(pm.RigL(sparsity=0.6, every=2, until=1.0), total=12)
    previous = {name: mask.clone() for name, mask in pruner.masks().items()}
    changes = 0
    for step in range(12):
        train(model, optimizer, [step])
        assert obeys_masks(model, pruner, grown=True)
        state = model.state_dict()
        for name, mask in pruner.masks().items():
            assert not state[name][~mask].any()
            changes += int((mask != previous[name]).any())
            previous[name] = mask.clone()
    assert changes > 4


def test_sharded_weights_follow_every_new_mask(tmp_path: Path) -> None:
    """The complaint is about FSDP2, whose forward gathers the weights that a new mask must have reached."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = pm.RigL(sparsity=0.5, include=["0.weight"], every=2, until=1.0)
        pruner.attach(model, optimizer, total_steps=8)
        gathered, masks = [], []
        model[0].register_forward_pre_hook(lambda layer, _: gathered.append(layer.weight.detach().clone()))
        for step in range(8):
            optimizer.zero_grad()
            model(torch.full((2, 8), step + 1.0)).square().sum().backward()
            assert not masks or not gathered[-1][~masks[-1]].any()
            optimizer.step()
            masks.append(pruner.masks()["0.weight"].full_tensor().clone())
            assert not model.state_dict()["0.weight"].full_tensor()[~masks[-1]].any()
        assert sum(not torch.equal(*pair) for pair in itertools.pairwise(masks)) == 3
    finally:
        distributed.destroy_process_group()
