"""One-shot, incremental and random pruning, DPF, and the options and constructors of all methods."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from engine_helpers import TARGETS, Net, attach_to_network, is_identical, make_sgd, obeys_masks, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pomona as pm
from pomona.methods import METHODS, make_pruner


def list_update_steps(pruner: pm.Pruner) -> list[int]:
    """Return the steps of the mask updates."""
    return [entry["step"] for entry in pruner.history]


def copy_masks(pruner: pm.Pruner) -> dict[str, Tensor]:
    """Return copies of the masks."""
    return {name: mask.clone() for name, mask in pruner.masks().items()}


# ---- one-shot


@pytest.mark.parametrize(("at", "prune_step"), [(0.0, 0), (0.5, 10), (1.0, 20)])
def test_oneshot_prunes_once(at: float, prune_step: int) -> None:
    model, optimizer, pruner = attach_to_network(pm.OneShot(sparsity=0.75, at=at), total=20)
    dense = Net().double()
    plain = make_sgd(dense)
    for step in range(20):
        assert pruner.sparsity() == (0.75 if step >= prune_step and prune_step < 20 else 0.0)
        train(model, optimizer, [step])
        if step < prune_step - 1:  # until then the training is dense
            train(dense, plain, [step])
            assert is_identical(model.state_dict(), dense.state_dict())
    pruner.finish()
    assert list_update_steps(pruner) == [prune_step]
    assert obeys_masks(model, pruner)


def test_oneshot_keeps_the_largest_weights() -> None:
    model = Net().double()
    weights = torch.cat([model.get_parameter(name).detach().abs().flatten() for name in TARGETS])
    pruner = pm.OneShot(sparsity=0.9, allocation="global(floor=0)")
    pruner.attach(model, make_sgd(model))  # at = 0 needs no total_steps
    threshold = weights.sort(descending=True).values[len(weights) - round(0.9 * len(weights))]
    kept = torch.cat([m.flatten() for m in pruner.masks().values()])
    assert torch.equal(kept, weights > threshold)


# ---- incremental


def test_incremental_follows_its_schedule() -> None:
    model, optimizer, pruner = attach_to_network(
        pm.Incremental(sparsity=0.75, every=5, schedule=pm.Linear(until=1.0)), total=20
    )
    reached = []
    for step in range(20):
        reached.append(pruner.sparsity())
        train(model, optimizer, [step])
    assert reached[::5] == pytest.approx([0, 0.1875, 0.375, 0.5625], abs=1e-3)
    assert pruner.sparsity() == 0.75
    assert list_update_steps(pruner) == [0, 5, 10, 15, 20]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([pm.Unstructured(), pm.Balanced(block=4), pm.Block((2, 2)), pm.Kernel(), pm.Filter(), pm.NM(1, 4)]),
    st.sampled_from(["global", "uniform", "erk"]),
    st.integers(0, 999),
)
def test_incremental_never_keeps_a_pruned_weight_again(pattern: Any, allocation: str, seed: int) -> None:
    """Weights change arbitrarily between updates, and some kept weights are exactly zero."""
    if isinstance(pattern, pm.NM) and allocation == "erk":
        allocation = "uniform"
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Conv2d(4, 6, 1), nn.Linear(8, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pm.Incremental(sparsity=None if pattern.sparsity else 0.7, every=1, pattern=pattern, allocation=allocation)
    pruner.attach(model, optimizer, total_steps=12)
    before = copy_masks(pruner)
    for _ in range(12):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 5
        with torch.no_grad():
            for name in before:
                weight = model.get_parameter(name)
                weight *= torch.rand(weight.shape, generator=generator) > 0.3
        optimizer.step()
        now = copy_masks(pruner)
        assert not any((now[name] & ~before[name]).any() for name in now)
        before = now
    pruner.finish()


def test_incremental_keeps_no_pruned_filter_again_to_reach_the_count() -> None:
    """There are three filters of one weight and one of five; two kept and one pruned would make the count of three."""
    model = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(5, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[9.0], [8.0], [1.0]]))
        model[1].weight.fill_(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"pattern": pm.Filter(), "every": 1, "include": ["0", "1"], "schedule": pm.Linear(until=1.0)}
    pruner = pm.Incremental(sparsity=5 / 8, allocation="global(floor=0)", **options).attach(
        model, optimizer, total_steps=5
    )
    kept = []
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        kept.append([*pruner.masks()["0.weight"].flatten().int().tolist(), int(pruner.masks()["1.weight"].all())])
    # 7, 6, 5, 4 and 3 are asked for; units in order 9, 8, 4.5 (the five) and 1.
    assert kept == [[1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0]]


# ---- random


def test_random_is_reproducible_and_does_not_depend_on_the_weights() -> None:
    one, two = attach_to_network(pm.Random(sparsity=0.75)), attach_to_network(pm.Random(sparsity=0.75), seed=9)
    other = attach_to_network(pm.Random(sparsity=0.75, seed=1))
    assert is_identical(one[2].masks(), two[2].masks())
    assert not is_identical(one[2].masks(), other[2].masks())
    before = copy_masks(one[2])
    state = torch.get_rng_state()
    train(*one[:2], range(20))
    assert is_identical(one[2].masks(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert one[2].sparsity() == 0.75


def test_random_does_not_use_the_global_generator() -> None:
    model = Net()
    optimizer = make_sgd(model)
    state = torch.get_rng_state()
    pm.Random(sparsity=0.5).attach(model, optimizer)
    assert torch.equal(torch.get_rng_state(), state)


# ---- DPF


def test_dpf_updates_every_p_steps_until_its_mask_is_fixed() -> None:
    model, optimizer, pruner = attach_to_network(pm.DPF(sparsity=0.75, every=16, settle=0.1), total=100)
    for step in range(100):
        before = copy_masks(pruner)
        train(model, optimizer, [step])
        changed = not is_identical(before, pruner.masks())
        assert not changed or ((step + 1) % 16 == 0 and step + 1 <= 90)
    assert list_update_steps(pruner) == [0, 16, 32, 48, 64, 80]
    pruner.finish()
    assert list_update_steps(pruner) == [0, 16, 32, 48, 64, 80]


def test_dpf_without_settling_updates_until_the_last_step() -> None:
    model, optimizer, pruner = attach_to_network(pm.DPF(sparsity=0.75, every=10, settle=0.0), total=40)
    train(model, optimizer, range(40))
    assert list_update_steps(pruner) == [0, 10, 20, 30, 40]


def test_dpf_with_epochs_raises_the_sparsity_at_their_start() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.DPF(sparsity=0.75, every=4).attach(model, optimizer, total_steps=40, steps_per_epoch=10)
    train(model, optimizer, range(40))
    asked = {entry["step"]: entry["sparsity"] for entry in pruner.history}
    shares = [1 - (1 - min(epoch / 3, 1)) ** 3 for epoch in range(4)]
    assert asked == pytest.approx({step: 0.75 * shares[step // 10] for step in range(0, 37, 4)})


def test_dpf_keeps_pruned_weights_again() -> None:
    model, optimizer, pruner = attach_to_network(
        pm.DPF(sparsity=0.75, every=2, settle=0.0, schedule="constant"), total=40
    )
    before = copy_masks(pruner)
    train(model, optimizer, range(40))
    assert any((mask & ~before[name]).any() for name, mask in pruner.masks().items())
    assert pruner.sparsity() == 0.75


@pytest.mark.parametrize("make", [pm.DPF, pm.Incremental])
@pytest.mark.parametrize("total", [1, 3, 7, 16, 17, 30, 100])
@pytest.mark.parametrize("steps_per_epoch", [None, 6])
def test_the_final_sparsity_is_reached_by_training(make: Any, total: int, steps_per_epoch: int | None) -> None:
    """finish() warns where it has to prune the rest, and a warning fails the test."""
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = make(sparsity=0.75).attach(model, optimizer, total_steps=total, steps_per_epoch=steps_per_epoch)
    train(model, optimizer, range(total))
    assert pruner.sparsity() == 0.75
    pruner.finish()


def test_a_schedule_that_rises_after_the_mask_is_fixed_is_refused() -> None:
    with pytest.raises(pm.PomonaError, match=r"still rise \(until=0\.95\) when the mask is fixed at 0\.9"):
        pm.DPF(schedule=pm.Cubic(until=0.95))
    pm.DPF(schedule=pm.Cubic(until=0.95), settle=0.05)
    pm.DPF(schedule=pm.Cubic(until=0.9))


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsty": 0.5}, "unknown option of method 'dpf' 'sparsty': did you mean 'sparsity'"),
        ({"sparsity": 1.0}, r"must lie in \[0, 1\), got 1\.0"),
        ({"sparsity": -0.1}, r"must lie in \[0, 1\), got -0\.1"),
        ({"sparsity": float("nan")}, "must lie in"),
        ({"sparsity": "0.9"}, "sparsity takes float or nothing, got '0.9'"),
        ({"sparsity": True}, "sparsity takes float"),
        ({"every": 0}, "must be ≥ 1, got 0"),
        ({"every": 2.5}, "every takes int or nothing, got 2.5"),
        ({"settle": 1.0}, r"in \[0, 1\), got 1\.0"),
        ({"pattern": "filtr"}, "unknown pattern 'filtr': did you mean 'filter'"),
        ({"pattern": 3}, "3 is not a valid pattern"),
        ({"pattern": pm.NM(2, 4), "sparsity": 0.9}, "fixes the sparsity at 0.5, got 0.9"),
        ({"schedule": "cubics"}, "did you mean 'cubic'"),
        ({"include": 3}, "include"),
        ({"exclude": [3]}, "exclude"),
    ],
)
def test_invalid_options_of_dpf_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        pm.DPF(**options)


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(pm.PomonaError, match="unknown method 'dfp': did you mean 'dpf'"):
        make_pruner("dfp(sparsity=0.9)")


def test_a_pattern_that_fixes_the_sparsity_sets_it() -> None:
    assert pm.DPF(pattern=pm.NM(1, 4)).method.final_sparsity == 0.75
    assert pm.DPF(pattern=pm.NM(1, 4), sparsity=0.75).method.final_sparsity == 0.75
    assert pm.DPF().method.final_sparsity == 0.9


def test_a_method_may_be_given_as_a_dictionary_a_string_or_a_spec() -> None:
    method = pm.DPF(sparsity=0.8, pattern=pm.Balanced(block=4), include=["conv*"]).method
    spelt = {"name": "dpf", "sparsity": 0.8, "pattern": {"name": "balanced", "block": 4}, "include": "conv*"}
    assert make_pruner(spelt).method == method
    assert make_pruner("dpf(sparsity=0.8, pattern='balanced(block=4)', include='conv*')").method == method
    assert make_pruner(method).method is method


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_has_a_constructor(name: str) -> None:
    """`pm.DPF` and the other constructors have the method's docstring and options."""
    spec = METHODS[name]
    constructor = getattr(pm, spec.__name__)
    signature = inspect.signature(constructor)
    assert constructor.__doc__ == spec.__doc__
    assert spec.__doc__
    assert spec.paper
    by_name = {key for key, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert set(signature.parameters) - by_name == (set() if name == "finetune" else {"sparsity"})
    assert all(p.default is not p.empty for p in signature.parameters.values())
    assert isinstance(constructor(), pm.Pruner)
    assert {"include", "exclude"} <= set(signature.parameters)
    assert ("pattern" in signature.parameters) == (name != "srigl")  # its pattern is fixed
    with pytest.raises(pm.PomonaError, match="unknown option"):
        constructor(nonsense=1)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "finetune"])
def test_the_first_argument_is_the_sparsity(name: str) -> None:
    constructor = getattr(pm, METHODS[name].__name__)
    assert constructor(0.75).method == constructor(sparsity=0.75).method != constructor(0.7).method
    assert make_pruner(f"{name}(0.75)").method == constructor(0.75).method
    with pytest.raises(pm.PomonaError, match=f"method '{name}' takes only sparsity without a name, got 16 too"):
        constructor(0.75, 16)
    with pytest.raises(pm.PomonaError, match="got sparsity twice: 0.75 and 0.5"):
        constructor(0.75, sparsity=0.5)


def test_a_method_without_a_sparsity_says_so() -> None:
    with pytest.raises(pm.PomonaError, match=r"^Finetune takes no sparsity, got 0\.9: it keeps the zeros"):
        pm.Finetune(0.9)
    with pytest.raises(pm.PomonaError, match="method 'finetune' takes no option without a name, got 0.9 too"):
        make_pruner("finetune(0.9)")


@pytest.mark.parametrize(("text", "pattern"), [("2:4", pm.NM(2, 4)), ("balanced(8)", pm.Balanced(8))])
def test_a_method_takes_its_pattern_as_text(text: str, pattern: Any) -> None:
    assert pm.DPF(0.5, pattern=text).method == pm.DPF(0.5, pattern=pattern).method
    with pytest.raises(pm.PomonaError, match="unknown pattern 'blanced': did you mean 'balanced'"):
        pm.DPF(0.5, pattern="blanced(8)")


def test_the_signature_shows_the_defaults() -> None:
    defaults = {name: p.default for name, p in inspect.signature(pm.DPF).parameters.items()}
    assert (defaults["every"], defaults["settle"], defaults["schedule"]) == (None, 0.1, pm.Cubic())
    assert "schedule" not in inspect.signature(pm.OneShot).parameters
    assert "DPF" in repr(pm.DPF())
    assert "not attached" in repr(pm.DPF())
