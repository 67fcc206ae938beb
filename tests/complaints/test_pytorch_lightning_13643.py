"""https://github.com/Lightning-AI/pytorch-lightning/issues/13643: a lottery ticket's parameters are not reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning_training import fit, make_module

import pomona as pm

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


def test_every_round_begins_at_the_first_weights() -> None:
    """Pruned parameters were zero in the next round, and the others kept their trained values."""
    callbacks = pytest.importorskip("pomona.integrations.lightning")
    module = make_module()
    first = {name: value.detach().clone() for name, value in module.named_parameters()}
    starts: list[dict[str, torch.Tensor]] = []

    class Remember(callbacks.PruningCallback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_start(trainer, pl_module)
            starts.append({name: value.detach().clone() for name, value in pl_module.named_parameters()})

    def train(model: Any, pruner: pm.Pruner, index: int) -> None:
        fit(model, Remember(pruner, max_batches=0))

    rounds = pm.Lottery(sparsity=0.5, retrainings=2).rounds(module, train)
    assert [entry["round"] for entry in rounds] == [0, 1, 2]
    for start in starts:
        for name, value in start.items():
            kept = value != 0
            assert torch.equal(value[kept], first[name][kept])
    pruned = [sum(int((value == 0).sum()) for value in start.values()) for start in starts]
    assert pruned[0] < pruned[1] < pruned[2]
    trained = dict(module.named_parameters())
    assert any(not torch.equal(trained[name][value != 0], value[value != 0]) for name, value in starts[-1].items())
