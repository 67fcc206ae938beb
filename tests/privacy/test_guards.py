"""Attack 7: misuse of a private step is refused in a sentence, and several processes take the step of one."""

from __future__ import annotations

import dataclasses
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from private_training import (
    ROWS,
    UncheckedBudget,
    flat_parameters,
    make_budget,
    make_data,
    make_network,
    make_step,
)
from torch import nn

from pomona.errors import PomonaError
from pomona.privacy import Budget, PrivateStep, Source, budget, gradient_recorder
from pomona.privacy.processes import Processes

# ---- rows


def test_rows_that_were_not_drawn_are_refused():
    x, y = make_data()
    model, step = make_step(data=(x, y))
    before, rows = flat_parameters(model), step.draw()
    others = torch.arange(ROWS)[~torch.isin(torch.arange(ROWS), rows)]
    swapped = rows.clone()
    swapped[0] = others[0]
    for inputs, targets in ((x[swapped], y[rows]), (x[rows.flip(0)], y[rows.flip(0)]), (x[rows] * 2, y[rows])):
        with pytest.raises(PomonaError, match="rows that are not the drawn ones"):
            step(inputs, targets)
    with pytest.raises(PomonaError, match="rows that are not the drawn ones"):
        step(x[rows], y[rows], swapped)
    assert torch.equal(flat_parameters(model), before)
    step(x[rows], y[rows])
    step.draw()
    step()  # it has the data
    assert step.steps_taken == 2


def test_changing_the_drawn_rows_changes_nothing():
    x, y = make_data()
    _, step = make_step()
    rows = step.draw()
    kept = rows.clone()
    rows.zero_()
    with pytest.raises(PomonaError, match="not the drawn ones"):
        step(x[rows], y[rows], rows)
    step(x[kept], y[kept], kept)


def test_data_of_another_size_and_missing_examples_are_refused():
    x, y = make_data()
    with pytest.raises(PomonaError, match="the budget is for 40 rows, and the data has another number"):
        make_step(data=(x[1:], y[1:]))
    _, step = make_step()
    rows = step.draw()
    with pytest.raises(PomonaError, match="a step needs inputs and targets"):
        step()
    with pytest.raises(PomonaError, match="same number of rows"):
        step(x[rows], y[rows][1:])
    with pytest.raises(PomonaError, match="tensors with a row for each example, got str"):
        step("rows", y[rows])


# ---- the optimizer


def test_foreign_steps_of_the_optimizer_are_refused():
    x, y = make_data()
    model, step = make_step()
    before = flat_parameters(model)
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(PomonaError, match=r"optimizer.step\(\) was called outside the private step"):
        step.optimizer.step()
    assert torch.equal(flat_parameters(model), before)
    rows = step.draw()
    step(x[rows], y[rows])  # a private step still works, and does not see the raw gradient
    with pytest.raises(PomonaError, match="outside the private step"):
        step.optimizer.step()


def test_parameters_that_are_added_later_are_refused():
    x, y = make_data()
    model, step = make_step()
    model.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    step.optimizer.add_param_group({"params": [model.extra]})
    rows = step.draw()
    with pytest.raises(PomonaError, match=r"have changed since the private step was made \('extra'\)"):
        step(x[rows], y[rows])


def test_raw_gradient_of_a_frozen_parameter_is_not_applied():
    x, y = make_data()
    model, step = make_step()
    frozen = model[0].bias
    nn.functional.cross_entropy(model(x), y).backward()
    frozen.requires_grad_(False)
    other = PrivateStep(model, step.optimizer, make_budget(), method="dpsgd")
    before, rows = frozen.clone(), other.draw()
    other(x[rows], y[rows])
    assert torch.equal(frozen, before)


# ---- the budget


def test_budgets_made_by_hand_are_verified(monkeypatch):
    pytest.importorskip("dp_accounting")
    honest = Budget(8.0, 1e-5, ROWS, 20, 8, 0.0, 1.2, 0.0, ((8, 8.0),))
    model = make_network()

    def make(budget):
        return PrivateStep(model, torch.optim.SGD(model.parameters(), 1.0), budget, method="dpsgd")

    make(honest)
    with pytest.raises(PomonaError, match="σ=1e-09 .* gives δ=1 at ε=2"):
        make(dataclasses.replace(honest, sigma=1e-9, epsilon=2.0, curve=((8, 2.0),)))
    for change in ({"steps": 80}, {"batch_size": 40}, {"delta": 1e-9}, {"curve": ((4, 0.1), (8, 8.0))}):
        with pytest.raises(PomonaError, match="solve the budget again"):
            make(dataclasses.replace(honest, **change))
    with pytest.raises(PomonaError, match="increasing steps"):
        make(dataclasses.replace(honest, curve=((8, 8.0), (4, 8.0))))
    monkeypatch.setattr(budget, "find_spec", lambda name: None)  # without the accountant, in closed form
    with pytest.raises(PomonaError, match="solve the budget again"):
        make(dataclasses.replace(honest, sigma=1e-9, epsilon=2.0, curve=((8, 2.0),)))
    make(honest)


# ---- processes


def train_in_process(rank: int, count: int, store: str, results, diverge: bool, ghost: bool) -> None:
    """Take the steps of a run as one of several processes, and report the weights or the error."""
    if ghost:  # in layers of any size
        gradient_recorder.are_products_cheaper = lambda *given, **named: True
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    x, y = make_data()
    model = make_network(seed=rank if diverge else 0)
    clipping = {"layers": True, "quantile": 0.5}  # its counts are added up too
    options = {"method": "dpsgd" if ghost else "gip", "keep": 0.5, "group": 50, "data": (x, y), "clipping": clipping}
    source = Source(seed=3 if rank == 0 else 99)  # the first one's key counts
    budget = make_budget(steps=3) if ghost else make_budget(steps=3, share=0.5, index=5.0)
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), 0.5), budget, source=source, **options)
    try:
        for rows in step:
            step(x[rows], y[rows])
        results.put((rank, flat_parameters(model).tolist()))
    except PomonaError as error:
        results.put((rank, str(error)))
    dist.destroy_process_group()


def run_processes(count: int, folder, diverge: bool = False, ghost: bool = False) -> list:
    """Return what each of several processes reports."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = str(folder / f"store{count}{diverge}")
    arguments = [(rank, count, store, results, diverge, ghost) for rank in range(count)]
    processes = [context.Process(target=train_in_process, args=each) for each in arguments]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=240) for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(count)]


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("ghost", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_several_processes_take_the_steps_of_one(tmp_path, ghost):
    (alone,) = run_processes(1, tmp_path, ghost=ghost)
    one, other, third = run_processes(3, tmp_path, ghost=ghost)
    assert one == other == third
    assert torch.allclose(torch.tensor(one), torch.tensor(alone), rtol=0, atol=1e-6)


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_processes_with_other_weights_are_refused(tmp_path):
    for message in run_processes(2, tmp_path, diverge=True):
        assert "the weights of process 1 are not those of process 0" in message


def test_model_in_a_parallel_wrapper_is_refused(monkeypatch):
    monkeypatch.setattr("pomona.privacy.processes.DistributedDataParallel", nn.Sequential)
    with pytest.raises(PomonaError, match="DistributedDataParallel adds gradients before they are clipped"):
        Processes(nn.Sequential())


def test_unchecked_budgets_of_tests_are_no_budgets_of_users():
    assert issubclass(UncheckedBudget, Budget)
    assert make_budget() != Budget(**{f.name: getattr(make_budget(), f.name) for f in dataclasses.fields(Budget)})
