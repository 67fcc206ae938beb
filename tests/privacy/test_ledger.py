"""Ledgers: draws that are charged once, replays that must be the same, limits over runs, and the names of data sets."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from private_training import UncheckedBudget, flat_parameters, make_budget, make_data, make_network
from torch import nn
from torch.utils.data import TensorDataset

from pomona.errors import PomonaError
from pomona.privacy import Ledger, Pair, PrivateStep, Source, digest_rows, poisson_loader
from pomona.privacy.composition import total_epsilon
from pomona.privacy.ledger import digest_key, find_ledgers


def make_step(folder, *, budget=None, source=None, **options):
    """Return a network and its DP-SGD steps that are journalled in a folder."""
    model = make_network()
    ledger = Ledger(folder, make_data(), name="toy", run_name="test")
    source = source or Source()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    return model, PrivateStep(
        model, optimizer, budget or make_budget(), source=source, ledger=ledger, **{"method": "dpsgd", **options}
    )


def accounts(folder):
    """Return the accounts in a folder's only ledger, as they are on the disk."""
    (ledger,) = find_ledgers(folder)
    return list(ledger.accounts.values())


def test_draws_are_charged_whether_their_step_is_taken_or_not(tmp_path):
    """Attack 6: whoever draws until the sample is good pays for every draw."""
    _, step = make_step(tmp_path)
    x, y = make_data()
    taken = 0
    for rows in step:
        if len(rows) % 2:
            step(x[rows], y[rows], rows)
            taken += 1
    assert 0 < taken < 8
    assert step.drawn == 8
    assert step.spent == step.budget.epsilon
    with pytest.raises(PomonaError, match="spent after 8 steps"):
        step.draw()
    (account,) = accounts(tmp_path)
    assert len(account.released) == taken
    assert account.steps >= 7  # the last draw is entered with the next, if it was not taken


def test_examples_are_checked_with_a_ledger(tmp_path):
    """Attack 1: shuffled epochs, cut to the length of the samples, are no Poisson samples."""
    x, y = make_data()
    order = torch.randperm(len(x))
    _, step = make_step(tmp_path)
    rows = step.draw()
    pick = order[: len(rows)]
    with pytest.raises(PomonaError, match="must know which rows its examples are: pass them.*or set trust_rows=True"):
        step(x[pick], y[pick])
    with pytest.raises(PomonaError, match="rows that are not the drawn ones"):
        step(x[pick], y[pick], pick)
    step(x[rows], y[rows], rows)
    _, step = make_step(tmp_path, data=(x, y))
    rows = step.draw()
    pick = order[: len(rows)]
    with pytest.raises(PomonaError, match="rows that are not the drawn ones"):
        step(x[pick], y[pick])
    step(x[rows], y[rows])
    _, step = make_step(tmp_path)
    loader = poisson_loader(step, TensorDataset(x, y))
    step(*next(loader))
    rows = step.draw()  # not by the loader
    with pytest.raises(PomonaError, match="must know which rows its examples are"):
        step(x[rows], y[rows])
    _, step = make_step(tmp_path, trust_rows=True)
    rows = step.draw()
    step(x[rows], y[rows])


def test_step_is_on_the_disk_before_its_weights_change(tmp_path):
    model, step = make_step(tmp_path)
    (x, y), before, seen = make_data(), flat_parameters(make_network()), []

    def look(*arguments):
        seen.append((accounts(tmp_path)[0].steps, torch.equal(flat_parameters(model), before)))

    step.optimizer.register_step_pre_hook(look)
    rows = step.draw()
    step(x[rows], y[rows], rows)
    assert seen == [(1, True)]


def test_replayed_steps_cost_nothing_and_must_be_the_same(tmp_path):
    """Attack 5: steps after a checkpoint run again with the same noise, or not at all."""
    model, step = make_step(tmp_path)
    (x, y), state, weights = make_data(), None, None
    for rows in step:
        if step.drawn == 3:
            state, weights = step.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        step(x[rows], y[rows], rows)
    assert state["drawn"] == 2  # the third was drawn and not taken: it is drawn again

    other, resumed = make_step(tmp_path)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for rows in resumed:
        resumed(x[rows], y[rows], rows)
    assert torch.equal(flat_parameters(model), flat_parameters(other))
    (account,) = accounts(tmp_path)
    assert sorted(account.released) == list(range(1, 9))
    assert account.run == digest_key(step.source.key)

    forked, fork = make_step(tmp_path)  # from the initial weights
    fork.load_state_dict(state)
    rows = fork.draw()
    with pytest.raises(PomonaError, match="step 3 of this run was taken before with other weights"):
        fork(x[rows], y[rows], rows)
    assert torch.equal(flat_parameters(forked), flat_parameters(make_network()))

    forked, fork = make_step(tmp_path, loss=lambda output, target: -nn.functional.cross_entropy(output, target))
    forked.load_state_dict(weights)
    fork.load_state_dict(state)
    rows = fork.draw()
    with pytest.raises(PomonaError, match="step 3 of this run was taken before with other gradients"):
        fork(x[rows], y[rows], rows)
    with pytest.raises(PomonaError, match="clip: 2.0, not 1.0"):
        make_step(tmp_path, clip=2.0)[1].load_state_dict(state)


def test_checkpoint_newer_than_the_ledger_is_refused(tmp_path):
    _, step = make_step(tmp_path / "one")
    x, y = make_data()
    rows = step.draw()
    step(x[rows], y[rows], rows)
    with pytest.raises(PomonaError, match="lacks entries that this run has written"):
        make_step(tmp_path / "other")[1].load_state_dict(step.state_dict())


def test_key_with_another_budget_is_refused(tmp_path):
    _, step = make_step(tmp_path)
    step.draw()
    source = Source()
    source.key = step.source.key
    with pytest.raises(PomonaError, match="began with another budget"):
        make_step(tmp_path, budget=make_budget(sigma=2.0), source=source)[1].draw()


def test_runs_with_a_seed_are_noted_and_not_counted(tmp_path):
    _, step = make_step(tmp_path, source=Source(seed=1))
    x, y = make_data()
    for rows in step:
        step(x[rows], y[rows], rows)
    (ledger,) = find_ledgers(tmp_path)
    assert ledger.seeded.total() == 1
    assert not ledger.accounts


def test_limit_over_all_runs_is_kept(tmp_path):
    pytest.importorskip("dp_accounting")
    budget = UncheckedBudget(8.0, 1e-5, 40, 20, 8, 0.0, 2.0, 0.0, ((8, 8.0),))
    _, first = make_step(tmp_path, budget=budget)
    rows = first.draw()
    first(*(part[rows] for part in make_data()), rows)
    ledger = Ledger(tmp_path, make_data())
    two_runs = total_epsilon([{budget.pair: 16}], 1e-5)
    ledger.set_limit(two_runs * 1.001, 1e-5)
    make_step(tmp_path, budget=budget)[1].draw()
    with pytest.raises(PomonaError, match="'toy' would cost ε=.*end a run that will not go on"):
        make_step(tmp_path, budget=budget)[1].draw()
    ledger = Ledger(tmp_path, make_data())
    ledger.end(digest_key(first.source.key)[:6])  # one of its 8 steps was taken
    with pytest.raises(PomonaError, match="would cost"):
        make_step(tmp_path, budget=budget)[1].draw()
    make_step(tmp_path, budget=dataclasses.replace(budget, steps=7, curve=((7, 8.0),)))[1].draw()
    _, again = make_step(tmp_path, budget=budget)
    again.load_state_dict(first.state_dict())
    with pytest.raises(PomonaError, match="has ended"):
        again.draw()
    with pytest.raises(PomonaError, match="have already spent"):
        ledger.set_limit(0.1, 1e-5)


def test_limit_below_what_admitted_runs_may_reach_is_refused(tmp_path):
    pytest.importorskip("dp_accounting")
    budget = UncheckedBudget(8.0, 1e-5, 40, 20, 8, 0.0, 2.0, 0.0, ((8, 8.0),))
    _, step = make_step(tmp_path, budget=budget)
    rows = step.draw()
    step(*(part[rows] for part in make_data()), rows)
    ledger = Ledger(tmp_path, make_data())
    spent, planned = ledger.total(1e-5), ledger.total(1e-5, planned=True)
    assert spent < planned
    with pytest.raises(PomonaError, match="may still go on to ε=.*end those that will not go on"):
        ledger.set_limit((spent + planned) / 2, 1e-5)
    assert Ledger(tmp_path, make_data()).limit is None
    ledger.end(digest_key(step.source.key))
    ledger.set_limit((spent + planned) / 2, 1e-5)
    for delta in (0.0, 1.0, 2.0):
        with pytest.raises(PomonaError, match="δ must be"):
            ledger.set_limit(100.0, delta)


def test_run_that_has_ended_draws_no_more(tmp_path):
    """Its steps are free for other runs, also where its process still goes on."""
    (x, y), (model, step) = make_data(), make_step(tmp_path)
    rows = step.draw()
    step(x[rows], y[rows], rows)
    before, rows = flat_parameters(model), step.draw()
    Ledger(tmp_path, make_data()).end(digest_key(step.source.key))
    with pytest.raises(PomonaError, match="has ended: begin a new one"):
        step(x[rows], y[rows], rows)
    with pytest.raises(PomonaError, match="has ended: begin a new one"):
        step.draw()
    assert torch.equal(flat_parameters(model), before)
    assert [account.steps for account in accounts(tmp_path)] == [1]


def test_lost_journal_is_refused(tmp_path):
    _, step = make_step(tmp_path)
    step.draw()
    step.journal.ledger.path.unlink()
    for look in (lambda: make_step(tmp_path), lambda: find_ledgers(tmp_path), step.draw):
        with pytest.raises(PomonaError, match=r"it is missing and had 2 lines|it has lost lines"):
            look()


def test_other_form_of_the_same_rows_is_named(tmp_path):
    (x, y), first = make_data(), make_step(tmp_path)[1]
    first.draw()
    other = Ledger(tmp_path, (x.float(), y), name="toy")
    with pytest.warns(UserWarning, match="if it has the same rows in another form, the limit of one does not hold"):
        other.admit("ab" * 16, make_budget(), secure=True)
    other.admit("cd" * 16, make_budget(), secure=True)  # once for a ledger
    Ledger(tmp_path, (2 * x, y)).admit("ab" * 16, make_budget(), secure=True)  # a name is not asked for


def test_runs_are_composed_together():
    pytest.importorskip("dp_accounting")
    one, other = Pair(0.1, 1.2), Pair(0.02, 0.8, (0.1,))
    together = total_epsilon([{one: 50}, {other: 200}], 1e-5)
    alone = one.epsilon(50, 1e-5), other.epsilon(200, 1e-5)
    assert max(alone) < together < sum(alone)
    # A pair in two halves of another name: the shared grid costs less than 0.1 %.
    nearly = Pair(0.1, 1.2 * (1 + 1e-9))
    assert total_epsilon([{one: 25}, {nearly: 25}], 1e-5) == pytest.approx(alone[0], rel=1e-3)
    assert total_epsilon([{one: 25}, {nearly: 25}], 1e-5) >= alone[0] * (1 - 1e-6)
    assert total_epsilon([{}], 1e-5) == 0.0


def test_data_sets_are_known_by_their_rows():
    x, y = make_data()
    order = torch.randperm(len(x))
    assert digest_rows((x, y)) == digest_rows((x[order], y[order]))
    assert digest_rows((x, y)) != digest_rows((x[order], y))
    assert digest_rows((x, y)) != digest_rows((x[1:], y[1:]))
    changed = x.clone()
    changed[3, 0, 0, 0] += 1e-9
    assert digest_rows((x, y)) != digest_rows((changed, y))
    with pytest.raises(PomonaError, match="a row for each example"):
        digest_rows((x, y[1:]))
