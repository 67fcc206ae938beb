"""AC/DC: compressed and dense phases in turn, against plain tensors."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import TARGETS, Net, attach_to_network, compute_loss, is_identical, make_sgd, save_and_load, train
from straight_through import prune_globally

import pomona as pm

TOTAL = 40  # with the default phases: compressed from step 2, 10, 18, 26 and 34, dense from 6, 14, 22 and 30


def train_reference(sparsity: float) -> Net:
    """Train with masks at the compressed phases; weights released by a dense phase start at zero, without momentum."""
    model = Net().double()
    optimizer = make_sgd(model)
    masks = {name: torch.ones_like(model.get_parameter(name), dtype=torch.bool) for name in TARGETS}
    for step in range(1, TOTAL + 1):
        optimizer.zero_grad()
        compute_loss(model, step - 1).backward()
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name).grad.mul_(mask)
        optimizer.step()
        dense = step < 2 or (step < 34 and (step - 2) // 4 % 2 == 1)
        weights = {name: model.get_parameter(name).detach() for name in TARGETS}
        if dense != (step - 1 < 2 or (step - 1 < 34 and (step - 3) // 4 % 2 == 1)):
            masks = prune_globally(weights, 0.0 if dense else sparsity)
        with torch.no_grad():
            for name, mask in masks.items():
                parameter = model.get_parameter(name)
                parameter.mul_(mask)
                optimizer.state[parameter]["momentum_buffer"].mul_(mask)
    return model


def test_acdc_matches_the_reference() -> None:
    model, optimizer, pruner = attach_to_network(pm.ACDC(sparsity=0.8, feedback=None), total=TOTAL)
    train(model, optimizer, range(TOTAL))
    expected = train_reference(0.8)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=1e-9, atol=1e-12)
    assert pruner.sparsity() == pytest.approx(0.8, abs=1e-3)


def test_the_phases_alternate_and_the_last_is_compressed() -> None:
    model, optimizer, pruner = attach_to_network(pm.ACDC(sparsity=0.8), total=TOTAL)
    train(model, optimizer, range(TOTAL))
    phases = [(entry["step"], entry["sparsity"]) for entry in pruner.history]
    assert phases == [(2, 0.8), (6, 0.0), (10, 0.8), (14, 0.0), (18, 0.8), (22, 0.0), (26, 0.8), (30, 0.0), (34, 0.8)]


def test_without_a_dense_start_the_model_is_pruned_at_attach() -> None:
    _, _, pruner = attach_to_network(pm.ACDC(sparsity=0.8, start=0.0), total=TOTAL)
    assert pruner.sparsity() == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("at", [5, 8, 20])
def test_a_resumed_run_of_acdc_is_bit_identical(at: int) -> None:
    model, optimizer, _ = attach_to_network(pm.ACDC(sparsity=0.8), total=TOTAL)
    train(model, optimizer, range(at))
    state = save_and_load({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(at, TOTAL))
    resumed, second, _ = attach_to_network(pm.ACDC(sparsity=0.8), total=TOTAL, seed=1)
    resumed.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    train(resumed, second, range(at, TOTAL))
    assert is_identical(model.state_dict(), resumed.state_dict())


@pytest.mark.parametrize("options", [{"start": 0.9}, {"until": 1.1}, {"phase": 0.0}, {"start": -0.1}])
def test_phases_that_do_not_fit_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(pm.PomonaError, match="0 ≤ start ≤ until ≤ 1 and phase > 0 are needed, got"):
        pm.ACDC(**options)
