"""Weights and batches at the limits: NaN, all weights equal, empty batches, overflow in half precision."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from engine_cases import make_hard, make_soft, soft_and_hard
from engine_helpers import is_identical
from torch import nn

import pomona as pm
from pomona.methods import METHODS, make_pruner

NOT_HERE = ("lottery", "finetune", "sfp")  # of several rounds, of given zeros, of filters


def make_model(constant: float | None = None, bias: bool = True) -> nn.Sequential:
    """Return a network of three linear layers, with equal weights where a constant is given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias), nn.ReLU(), nn.Linear(12, 12, bias), nn.ReLU(), nn.Linear(12, 4, bias))
    if constant is not None:
        for parameter in model.parameters():
            nn.init.constant_(parameter, constant)
    return model


def count_pruned(pruner: pm.Pruner) -> int:
    """Return how many mask entries are false."""
    return sum(int((~mask).sum()) for mask in pruner.masks().values())


@soft_and_hard
def test_weights_that_become_nan_are_named_once_and_masks_keep_their_counts(kind) -> None:
    counts = []
    for bad_step in (None, 4):  # the masks are updated after step 4
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        pruner = kind(schedule="cubic").attach(model, optimizer, total_steps=40)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(1, 13):
                optimizer.zero_grad()
                model(torch.ones(2, 8)).sum().backward()
                if step == bad_step:
                    model[2].weight.grad.fill_(torch.nan)
                optimizer.step()
        found = [str(w.message) for w in caught if "NaN or inf" in str(w.message)]
        assert len(found) == (bad_step is not None)
        assert all(text.startswith("2.weight holds NaN or inf at step 4,") for text in found)
        assert pruner.step == 12
        counts.append(count_pruned(pruner))
    assert counts[0] == counts[1] > 0


def test_large_finite_weights_give_no_warning() -> None:
    model = make_model(1e30)  # the square of their norm overflows float32
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_soft().attach(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=40)
    assert not [w for w in caught if "NaN or inf" in str(w.message)]


@pytest.mark.parametrize("name", [n for n in METHODS if n not in NOT_HERE])
def test_equal_weights_are_pruned_to_the_exact_count(name: str) -> None:
    model = make_model(0.5, bias=METHODS[name].weights != "score")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pruner = make_pruner({"name": name, "sparsity": 0.5}).attach(model, optimizer, total_steps=4, steps_per_epoch=2)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 8), 1.0 + step)).sum().backward()
        optimizer.step()
    pruner.finish(max_batches=0)
    total = sum(mask.numel() for mask in pruner.masks().values())
    assert abs(count_pruned(pruner) - total / 2) <= len(pruner.masks())  # each layer may round
    assert all(bool(mask.any()) for mask in pruner.masks().values() if mask.ndim > 1)


def test_of_equal_weights_the_earlier_are_kept() -> None:
    model = make_model(0.5)
    pm.OneShot(0.5, include=["0.weight"]).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (model[0].weight.flatten() != 0).tolist() == [True] * 48 + [False] * 48


@soft_and_hard
def test_an_empty_batch_changes_nothing_and_is_counted(kind) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = kind().attach(model, optimizer, total_steps=40)
    before = copy.deepcopy((model.state_dict(), pruner.state_dict()["latents"], pruner.state_dict()["masks"]))
    for _ in range(5):  # with a mask update after the fourth
        optimizer.zero_grad()
        model(torch.empty(0, 8)).sum().backward()
        optimizer.step()
    assert pruner.step == 5
    assert is_identical(before[1:], (pruner.state_dict()["latents"], pruner.state_dict()["masks"]))
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("kind", [make_soft, make_hard])
def test_an_overflow_in_half_precision_leaves_the_dense_copies_whole(kind) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = kind().attach(model, optimizer, total_steps=40)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    skipped = 0
    for _ in range(40):
        before = copy.deepcopy((model.state_dict(), pruner.state_dict()))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(2, 8)).square().mean()
        scaler.scale(loss).backward()
        overflows = any(not bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            skipped += 1
            assert is_identical((model.state_dict(), pruner.state_dict()), before)
    assert 0 < skipped < 40
    assert pruner.step == 40 - skipped
    assert all(bool(torch.isfinite(t).all()) for t in pruner.state_dict()["latents"].values())
