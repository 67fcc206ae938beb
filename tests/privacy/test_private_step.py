"""Private steps by hand: clipping, masks, noise, the budget, state, and bad options."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from private_training import (
    ROWS,
    NoiselessSource,
    assert_close_on_grid,
    flat_parameters,
    gradients_one_by_one,
    make_budget,
    make_data,
    make_network,
    make_step,
    mean_of_clipped,
)

from pomona.errors import PomonaError
from pomona.patterns.selection import select_largest_per_row
from pomona.privacy import METHODS, Exponential, PrivateStep, Source, gip

# ---- a step


def test_step_clips_each_example_and_divides_by_the_expected_size():
    model, step = make_step(noiseless=True, clip=0.5)
    (x, y), before = make_data(), flat_parameters(model)
    rows = step.draw()
    gradients = gradients_one_by_one(model, x[rows], y[rows])
    assert bool((gradients.norm(dim=1) > 0.5).any())
    loss = step(x[rows], y[rows])
    assert_close_on_grid(before - flat_parameters(model), mean_of_clipped(gradients, 0.5), 0.5)
    with torch.no_grad():
        assert float(loss) == pytest.approx(float(F.cross_entropy(make_network()(x[rows]), y[rows])))
    assert len(rows) != 20  # a Poisson sample has no fixed size


@pytest.mark.parametrize("method", ["dpsgd", "random", "gip"])
def test_result_does_not_depend_on_micro_batches(method):
    (x, y), ends = make_data(), []
    budget = make_budget(share=0.5, index=30.0) if method == "gip" else make_budget()
    for micro in (256, 7):
        model, step = make_step(budget=budget, method=method, keep=0.3, micro=micro, schedule="constant", group=50)
        for rows in step:
            step(x[rows], y[rows])
        ends.append(flat_parameters(model))
    assert torch.allclose(*ends, atol=1e-5)  # a rounding error of float64 may move an integer by one


def test_noise_has_its_deviation_and_is_added_to_kept_coordinates_only():
    budget = make_budget(steps=60, sigma=3.0)
    model, step = make_step(budget=budget, method="random", keep=0.25, schedule="constant", clip=2.0, group=None)
    x, changes = make_data()[0] * 0, []
    for rows in step:
        before = flat_parameters(model)
        step(x[rows], torch.zeros(len(rows), dtype=torch.int64))
        changes.append(flat_parameters(model) - before)
    moved = torch.stack(changes) != 0
    assert (moved.sum(1) == round(0.25 * step.size)).all()
    # Most of what moved is noise of σ C / B = 3·2/20; the biases also have a small gradient.
    weights = torch.stack(changes)[:, :108]
    assert float(weights[weights != 0].std()) == pytest.approx(0.3, rel=0.1)


def test_gip_with_large_theta_keeps_the_top_k_of_the_mean_gradient():
    budget = make_budget(share=0.5, index=1e6)
    (x, y) = make_data()
    model, step = make_step(budget=budget, method="gip", keep=0.2, schedule="constant", group=50, noiseless=True)
    rows, before = step.draw(), flat_parameters(model)
    gradients = gradients_one_by_one(model, x[rows], y[rows])
    total = gradients.sum(0)
    whole = len(total) // 50 * 50
    top = torch.cat(
        [
            select_largest_per_row(total[:whole].abs().view(-1, 50), 10).flatten(),
            select_largest_per_row(total[whole:].abs()[None], round(0.2 * (len(total) - whole)))[0],
        ]
    )
    step(x[rows], y[rows])
    # The mask comes first, the norm is of what is left.
    assert_close_on_grid(before - flat_parameters(model), mean_of_clipped(gradients * top, 1.0), 1.0)


def test_public_data_chooses_the_indices():
    x, y = make_data()
    public = make_data(seed=9)
    model, step = make_step(method="public", public=public, keep=0.1, schedule="constant", group=None, noiseless=True)
    grads = torch.autograd.grad(F.cross_entropy(model(public[0]), public[1]), list(model.parameters()))
    scores = torch.cat([g.flatten() for g in grads]).abs()
    top = scores >= scores.sort(descending=True).values[round(0.1 * len(scores)) - 1]
    rows, before = step.draw(), flat_parameters(model)
    step(x[rows], y[rows])
    assert not bool(((flat_parameters(model) != before) & ~top).any())
    assert step.lost() is None


def test_example_without_a_finite_gradient_counts_as_zero():
    model, step = make_step(noiseless=True)
    x, y = make_data()
    rows, before = step.draw(), flat_parameters(model)
    expected = mean_of_clipped(gradients_one_by_one(model, x[rows], y[rows])[1:], 1.0)
    x[rows[0]] = math.nan
    step.is_tested = True  # skip the validation of the model, which is not meant for NaN inputs
    step(x[rows], y[rows])
    assert_close_on_grid(before - flat_parameters(model), expected, 1.0)


def test_step_on_an_empty_sample_adds_noise_only():
    model, step = make_step(budget=make_budget(batch=1))
    x, y = make_data()
    step.source.poisson = lambda rows, rate: torch.zeros(0, dtype=torch.int64)  # type: ignore[method-assign]
    before, rows = flat_parameters(model), step.draw()
    assert float(step(x[rows], y[rows])) == 0
    assert bool((flat_parameters(model) != before).all())
    budget = make_budget(share=0.5, index=1.0, batch=1)
    model, step = make_step(budget=budget, method="gip", keep=0.5, schedule="constant")
    step.source.poisson = lambda rows, rate: torch.zeros(0, dtype=torch.int64)  # type: ignore[method-assign]
    before, rows = flat_parameters(model), step.draw()
    step(x[rows], y[rows])
    assert int((flat_parameters(model) != before).sum()) == sum(step.mechanism(0).groups(step.size)[1])


def test_schedule_reduces_the_kept_share():
    budget = make_budget(steps=100, share=0.5, index=1.0)
    linear = make_step(budget=budget, method="gip", keep=0.1)[1]
    assert [linear.kept_share(t) for t in (0, 50, 100)] == pytest.approx([1.0, 0.55, 0.1])
    exponential = make_step(budget=budget, method="gip", keep=0.1, schedule=Exponential())[1]
    # The authors' 99.9 − exp(log(99.9 − 10)·t/T) per cent.
    for t in (0, 30, 60, 99):
        assert 100 * exponential.kept_share(t) == pytest.approx(99.9 - math.exp(math.log(89.9) * t / 100), abs=0.2)
    assert make_step(budget=budget, method="gip", keep=0.1, schedule="constant")[1].kept_share(0) == pytest.approx(0.1)
    assert make_step()[1].kept_share() == 1.0
    facts = linear.facts()
    assert facts["lost"]["end"] <= facts["random_loses"]["end"]
    assert facts["random_loses"]["end"] == pytest.approx(1 - linear.kept_share(99), abs=0.01)


def test_adam_uses_the_private_gradient():
    x, y = make_data()
    model = make_network()
    step = PrivateStep(
        model,
        torch.optim.Adam(model.parameters(), 0.05),
        make_budget(),
        method="dpsgd",
        source=NoiselessSource(seed=1),
        clip=10.0,
    )
    first = F.cross_entropy(model(x), y)
    for rows in step:
        step(x[rows], y[rows])
    assert bool(F.cross_entropy(model(x), y) < first)
    assert step.steps_taken == 8
    assert all(p.grad is None for p in model.parameters())


# ---- the budget


def test_steps_stop_when_the_budget_is_spent():
    _, step = make_step()
    x, y = make_data()
    spent = []
    for rows in step:
        step(x[rows], y[rows])
        spent.append(step.spent)
    assert spent == [1.0] * 4 + [2.0] * 4
    with pytest.raises(PomonaError, match="the budget of ε=2 is spent after 8 steps"):
        step.draw()


def test_batches_that_were_not_drawn_are_refused():
    _, step = make_step()
    x, y = make_data()
    with pytest.raises(PomonaError, match="a step got 20 rows where none were drawn"):
        step(x[:20], y[:20])
    rows = step.draw()
    with pytest.raises(PomonaError, match="are no Poisson sample"):
        step(x[rows][:-1], y[rows][:-1])
    step(x[rows], y[rows])
    with pytest.raises(PomonaError, match="pass the rows of draw\\(\\), once each"):
        step(x[rows], y[rows])  # accumulation, or the same sample twice
    assert step.steps_taken == 1


def test_resumed_steps_equal_uninterrupted_ones():
    x, y = make_data()
    budget = make_budget(share=0.5, index=20.0)
    options = {"budget": budget, "method": "gip", "keep": 0.3, "group": 50}
    model, step = make_step(**options)
    state = weights = None
    for rows in step:
        step(x[rows], y[rows])
        if step.steps_taken == 3:
            state, weights = step.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    other, resumed = make_step(**options)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert resumed.spent == 1.0
    for rows in resumed:
        resumed(x[rows], y[rows])
    assert torch.equal(flat_parameters(model), flat_parameters(other))


def test_dropout_draws_from_the_source():
    """Its masks are replayed with the key, differ between keys, and leave torch's generator as it was."""
    (x, y), ends = make_data(), []
    for seed, torch_seed in ((1, 0), (1, 5), (2, 0)):
        model = make_network()
        model.insert(3, torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        step = PrivateStep(model, optimizer, make_budget(), method="dpsgd", source=NoiselessSource(seed=seed))
        step.source.poisson = lambda rows, rate: torch.arange(20)  # type: ignore[method-assign]
        torch.manual_seed(torch_seed)
        before = torch.get_rng_state()
        step(x[step.draw()], y[:20])
        assert torch.equal(torch.get_rng_state(), before)
        ends.append(flat_parameters(model))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_state_of_another_budget_or_method_is_refused():
    state = make_step()[1].state_dict()
    for other in (make_budget(sigma=0.5), dataclasses.replace(make_budget(), epsilon=3.0), make_budget(steps=9)):
        with pytest.raises(PomonaError, match="began with another budget"):
            make_step(budget=other)[1].load_state_dict(state)
    with pytest.raises(PomonaError, match="method: random, not dpsgd"):
        make_step(method="random", keep=0.5)[1].load_state_dict(state)


def test_gip_solves_its_budget():
    pytest.importorskip("dp_accounting")
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    target = {"rows": ROWS, "batch_size": 20, "epsilon": 4, "delta": 1e-5, "steps": 3}
    step = gip(model, optimizer, **target, share=0.05, keep=0.2, seed=1)
    assert step.budget.epsilon == 4
    assert step.budget.index > 0
    assert step.mechanism(2).cost(step.size) == pytest.approx(step.budget.index)
    dpsgd = gip(model, optimizer, **target, method="dpsgd")
    assert dpsgd.budget.index == 0.0
    assert dpsgd.budget.sigma < step.budget.sigma
    assert dpsgd.source.secure
    assert not step.source.secure
    assert not step.facts()["secure"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gap"}, "unknown private method 'gap': did you mean 'gip'"),
        ({"keep": 0.0}, "keep is the share"),
        ({"keep": 0.001}, "leaves none of a group of 256"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"clip": math.inf}, "no privacy"),
        ({"clip": 1e-9}, "clip must lie in 9.54e-07 … 1.05e\\+06 for exact sums"),
        ({"micro": 0}, "micro and views"),
        ({"method": "gip"}, "needs one"),
        ({"budget": make_budget(share=0.1, index=1.0)}, "makes none that cost"),
        ({"method": "public"}, "public data goes with"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(PomonaError, match=message):
        make_step(**options)


def test_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(make_network().parameters(), 0.1)
    with pytest.raises(PomonaError, match="of which 0 are the model's"):
        PrivateStep(make_network(), optimizer, make_budget(), method="dpsgd")


def test_frozen_parameters_do_not_change():
    model = make_network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    step = PrivateStep(
        model, torch.optim.SGD(model.parameters(), 0.1), make_budget(), method="dpsgd", source=Source(seed=0)
    )
    x, y = make_data()
    rows = step.draw()
    step(x[rows], y[rows])
    assert step.size == 12 + 54 * 5 + 5
    assert torch.equal(model[0].weight, before)


def test_step_stores_and_logs_no_gradient(caplog):
    _, step = make_step(budget=make_budget(share=0.5, index=1.0), method="gip", keep=0.5)
    x, y = make_data()
    rows = step.draw()
    step(x[rows], y[rows])
    tensors = [value for value in vars(step).values() if isinstance(value, torch.Tensor)]
    assert tensors == []
    assert caplog.text == ""
    assert METHODS == ("dpsgd", "random", "public", "gip", "datalens")


@pytest.mark.gpu
def test_step_on_a_gpu_equals_the_step_on_the_cpu():
    (x, y), ends = make_data(), []
    for device in ("cpu", "cuda"):
        model = make_network().to(device)
        step = PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), 1.0),
            make_budget(),
            method="dpsgd",
            source=NoiselessSource(device, seed=0),  # which draws the same rows on every device
        )
        rows = step.draw().cpu()
        step(x[rows].to(device), y[rows].to(device))
        ends.append(flat_parameters(model).cpu())
    assert torch.allclose(*ends, atol=1e-5)  # a rounding error of float64 may move an integer by one
