"""The balanced pattern with every method: each block of a layer keeps the same count, and the result is packed.

Weights that DPF trains in few bits are packed as codes without another change.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_helpers import attach_to_network, train

import pomona as pm
from pomona.masking import matrix_shape
from pomona.methods import METHODS
from pomona.sparse import BalancedTensor, QuantizedBalancedTensor

TOTAL, BLOCK = 40, 4
OTHER = ("finetune", "lottery", "feather", "st3", "srigl")  # hold, repeat, or have a pattern of their own
NAMES = [name for name in METHODS if METHODS[name].weights != "score" and name not in OTHER]


def pruner(name: str, allocation: str) -> pm.Pruner:
    wanted: dict[str, Any] = {
        "sparsity": 0.7,
        "pattern": pm.Balanced(block=BLOCK),
        "allocation": allocation,
        "every": 4,
        "at": 0.5,
    }
    known = METHODS[name].__dataclass_fields__
    return pm.Pruner(METHODS[name](**{key: value for key, value in wanted.items() if key in known}))


@pytest.mark.parametrize("allocation", ["uniform", "global"])
@pytest.mark.parametrize("name", NAMES)
def test_every_method_keeps_the_same_count_in_every_block(name: str, allocation: str) -> None:
    model, optimizer, working = attach_to_network(pruner(name, allocation), total=TOTAL)
    train(model, optimizer, range(TOTAL))
    masks = {key: mask.clone() for key, mask in working.masks().items()}
    working.finish()
    for key, mask in masks.items():
        rows, columns = matrix_shape(mask.shape)
        counts = mask.view(rows, columns // BLOCK, BLOCK).sum(-1)
        assert counts.unique().numel() == 1
        assert counts.min() >= 1
        weight = model.get_parameter(key).detach().float()
        packed = BalancedTensor.from_dense(weight, BLOCK)
        assert packed.kept <= int(counts[0, 0])
        assert torch.equal(packed.dense(), weight)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("values", "bits"), [("int8", 8), ("int8", 6), ("int4", 4), ("int4", 3)])
def test_weights_trained_in_few_bits_are_packed_without_a_change(values: str, bits: int, momentum: float) -> None:
    torch.manual_seed(bits)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    method = pm.DPF(0.75, pattern=pm.Balanced(block=16), every=4, compressor=pm.Quantize(bits))
    working = method.attach(model, optimizer, total_steps=TOTAL)
    for _ in range(TOTAL):
        optimizer.zero_grad()
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
    working.finish()
    weight = model[0].weight.detach()
    assert 3 <= weight.unique().numel() <= 2**bits - 1
    packed = QuantizedBalancedTensor.from_dense(weight, 16, values).verify()
    assert torch.equal(packed.dense(), weight)
    assert packed.kept <= 4
    assert packed.scales.unique().numel() <= 2
