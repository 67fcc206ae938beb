"""What `pruner.sparsity()` returns: what the masks prune, and what is zero."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from engine_helpers import Net, attach_to_network, make_sgd, train
from hypothesis import given
from hypothesis import strategies as st

import pomona as pm
from pomona.core.sparsity import Sparsity

shares = st.floats(0, 1)


@given(pruned=shares, zeros=shares)
def test_it_is_the_pruned_fraction_as_a_float(pruned: float, zeros: float) -> None:
    sparsity = Sparsity(pruned, zeros)
    assert sparsity == sparsity.pruned == pruned
    assert sparsity.zeros == zeros
    assert json.loads(json.dumps({"sparsity": sparsity})) == {"sparsity": pruned}
    assert (str(sparsity), f"{sparsity}", f"{sparsity:.3%}") == (str(pruned), f"{pruned}", f"{pruned:.3%}")
    assert repr(sparsity) == f"Sparsity(pruned={pruned}, zeros={zeros})"
    for copied in (copy.deepcopy(sparsity), pickle.loads(pickle.dumps(sparsity))):
        assert (copied.pruned, copied.zeros) == (pruned, zeros)


def test_weights_that_have_just_grown_are_zero_and_not_pruned() -> None:
    model, optimizer, pruner = attach_to_network(pm.SET(sparsity=0.5, every=4, share=0.4))
    train(model, optimizer, range(4))  # the fourth step is followed by an update
    reached = pruner.sparsity()
    weights = torch.cat([model.get_parameter(name).flatten() for name in pruner.masks()])
    assert reached == pytest.approx(0.5, abs=1e-3)
    assert reached.zeros == (weights == 0).double().mean()
    assert reached.zeros == pytest.approx(0.5 + 0.4 * 0.5, abs=2e-3)  # 40 % of the kept half starts at zero
    train(model, optimizer, [4])
    assert 0.5 <= pruner.sparsity().zeros < reached.zeros


def test_weights_that_have_grown_again_are_pruned_and_not_zero() -> None:
    model, optimizer, pruner = attach_to_network(pm.SFP(sparsity=0.5, every=4))
    train(model, optimizer, range(6))
    assert pruner.sparsity().zeros < pruner.sparsity().pruned


def test_zeros_after_finish_are_those_of_the_model_now() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.OneShot(sparsity=0.75).attach(model, optimizer, total_steps=1)
    pruner.finish()
    assert pruner.sparsity().zeros == pruner.sparsity() == pytest.approx(0.75, abs=1e-3)
    train(model, optimizer, range(2))  # nothing holds the zeros
    assert pruner.sparsity() == pytest.approx(0.75, abs=1e-3)
    assert pruner.sparsity().zeros < 0.5
    with torch.no_grad():
        for name in pruner.masks():
            model.get_parameter(name).zero_()
    assert pruner.sparsity().zeros == 1
