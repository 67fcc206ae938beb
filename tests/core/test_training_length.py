"""The length of training, found from a loader and a number of epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_helpers import Net, is_identical, make_sgd, train
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import pomona as pm
from pomona.core.attachment import find_length


class Stream(IterableDataset):
    """Numbers without an end."""

    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


def make_loader(rows: int = 10, batch: int = 4, **options: Any) -> DataLoader:
    """Return a loader of `rows` numbers."""
    return DataLoader(TensorDataset(torch.arange(rows)), batch_size=batch, **options)


def test_a_loader_tells_the_steps_by_hand() -> None:
    model = Net()
    loader = make_loader()  # 4, 4 and 2 rows
    pruner = pm.DPF(0.9).attach(model, make_sgd(model), loader=loader, epochs=10)
    assert (pruner.steps_per_epoch, pruner.total) == (3, 30)
    assert "step 0 of 30" in repr(pruner)


@pytest.mark.parametrize(
    ("options", "total", "per_epoch"),
    [
        ({"loader": make_loader(), "epochs": 10}, 30, 3),
        ({"loader": make_loader(drop_last=True), "epochs": 10}, 20, 2),
        ({"loader": make_loader(), "total_steps": 7}, 7, 3),
        ({"loader": make_loader()}, None, 3),
        ({"steps_per_epoch": 5, "epochs": 4}, 20, 5),
        ({"loader": [0] * 6, "epochs": 1}, 6, 6),
        ({"total_steps": 7}, 7, None),
    ],
)
def test_lengths(options: dict[str, Any], total: int | None, per_epoch: int | None) -> None:
    given_options = {"total_steps": None, "steps_per_epoch": None, "loader": None, "epochs": None, **options}
    assert find_length(**given_options) == (total, per_epoch)


@given(st.integers(1, 200), st.integers(1, 50), st.booleans(), st.integers(1, 9))
def test_the_steps_are_the_batches_that_a_loop_sees(rows: int, batch: int, drop_last: bool, epochs: int) -> None:
    loader = make_loader(rows, min(batch, rows), drop_last=drop_last)
    total, per_epoch = find_length(None, None, loader, epochs)
    assert per_epoch == sum(1 for _ in loader)
    assert total == sum(1 for _ in range(epochs) for _ in loader)


def test_a_loader_trains_as_the_numbers_do() -> None:
    states = []
    for options in ({"loader": make_loader(), "epochs": 4}, {"total_steps": 12, "steps_per_epoch": 3}):
        model = Net().double()
        optimizer = make_sgd(model)
        pruner = pm.SET(0.75).attach(model, optimizer, **options)  # updates once an epoch
        train(model, optimizer, range(12))
        assert [entry["step"] for entry in pruner.history][:3] == [0, 3, 6]
        states.append(model.state_dict())
    assert is_identical(*states)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loader": DataLoader(Stream()), "epochs": 2}, "^the loader, a DataLoader, does not know its length: give "),
        ({"loader": iter([1]), "epochs": 2}, "^the loader, a list_iterator, does not know its length: give "),
        ({"loader": [], "epochs": 2}, "^the loader, a list, has no batches"),
        ({"epochs": 2}, "^epochs=2 is a length of training only with loader= or steps_per_epoch="),
        ({"loader": [0], "epochs": 0}, "^epochs counts passes over the data and must be ≥ 1, got 0"),
        ({"loader": [0], "epochs": 1.5}, "^epochs counts passes over the data and must be ≥ 1, got 1.5"),
        ({"loader": [0], "epochs": 2, "total_steps": 9}, "^total_steps=9 and epochs=2 both tell the length"),
        ({"loader": [0], "steps_per_epoch": 3}, "^steps_per_epoch=3 and loader= both tell the length of an epoch"),
        ({"loader": [0]}, "^dpf needs total_steps"),
    ],
)
def test_what_tells_no_length_is_refused(options: dict[str, Any], message: str) -> None:
    model = Net()
    attach: Callable[..., Any] = pm.DPF(0.9).attach
    with pytest.raises(pm.PomonaError, match=message):
        attach(model, make_sgd(model), **options)
