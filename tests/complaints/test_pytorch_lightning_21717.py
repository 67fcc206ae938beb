"""https://github.com/Lightning-AI/pytorch-lightning/pull/21717: ModelPruning fails when it is used again."""

from __future__ import annotations

import copy

import pytest
from lightning_training import STEPS, fit, make_module

import pomona as pm

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


def test_a_module_is_pruned_in_several_fits() -> None:
    """The second trainer.fit() raised "Only Tensors created explicitly by the user support the deepcopy protocol"."""
    callbacks = pytest.importorskip("pomona.integrations.lightning")
    module = make_module()
    for sparsity in (0.25, 0.5, 0.75):
        callback = callbacks.PruningCallback(pm.OneShot(sparsity=sparsity), resume=False, max_batches=0)
        fit(module, callback)
        assert callback.pruner.finished
        assert float(callback.pruner.sparsity()) == pytest.approx(sparsity, abs=1e-3)
        assert callback.pruner.sparsity().zeros == pytest.approx(sparsity, abs=1e-3)
        copied = copy.deepcopy(module)  # what failed, inside the callback
        assert all(parameter.is_leaf for parameter in copied.parameters())


def test_the_same_callback_is_used_again() -> None:
    """In iterative pruning one callback serves every call of fit()."""
    callbacks = pytest.importorskip("pomona.integrations.lightning")
    module = make_module()
    callback = callbacks.PruningCallback(pm.OneShot(sparsity=0.5), resume=False, max_batches=0)
    for _ in range(3):
        fit(module, callback)
        assert callback.pruner.finished
        assert callback.pruner.step == STEPS
        assert callback.pruner.sparsity().zeros == pytest.approx(0.5, abs=1e-3)
