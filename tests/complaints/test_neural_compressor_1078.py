"""https://github.com/intel/neural-compressor/issues/1078: a pruning callback for PyTorch Lightning is wanted."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import TARGETS
from lightning_training import fit, make_module

import pomona as pm

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


def test_a_lightning_module_is_pruned_by_a_callback() -> None:
    """The maintainers decided not to support Lightning, and a user wrote callbacks of his own."""
    callbacks = pytest.importorskip("pomona.integrations.lightning")
    module = make_module()
    callback = callbacks.PruningCallback(pm.DPF(sparsity=0.8, every=2))
    fit(module, callback)
    weights = [module.net.get_parameter(name) for name in TARGETS]
    total = sum(weight.numel() for weight in weights)
    assert sum(int(torch.count_nonzero(weight)) for weight in weights) == total - round(0.8 * total)
    assert callback.pruner.finished
    make_module(seed=1).load_state_dict(module.state_dict(), strict=True)
