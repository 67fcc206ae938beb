"""A data loader whose batches are the Poisson samples of a private step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ..errors import require
from .example_batches import Batch, as_batch, map_tensors
from .private_step import PrivateStep
from .seeded_rows import SeededCollate, SeededRows


def poisson_loader(step: PrivateStep, dataset: Dataset[Any], **options: Any) -> Iterator[tuple[Batch, Batch]]:
    """Yield the inputs and targets of each step that is left, from a data set with a row for each example.

        for inputs, targets in pm.privacy.poisson_loader(step, dataset, num_workers=4):
            step(inputs, targets)

    `options` are those of a DataLoader that do not choose rows, such as `num_workers` and `collate_fn`. Rows are drawn
    and charged when a batch is yielded, though workers may have read them before. Within the data set's `__getitem__`
    the global generators of torch, NumPy and `random` are seeded for the step and the row, and within `collate_fn` for
    the step, from the key of `step`: augmentation that draws from them is secret and drawn again by a resumed run.
    """
    chosen = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & options.keys()
    require(not chosen, f"a private step draws its rows itself: leave out {', '.join(sorted(chosen))}.")
    count = len(dataset)  # type: ignore[arg-type]
    require(count == step.budget.rows, f"the budget is for {step.budget.rows} rows, and the data set has {count}.")
    upcoming = [rows.tolist() for rows in upcoming_rows(step)]
    # An empty sample cannot be collated: one row is read for its shape, and left out.
    first, key = step.source.step + 1, step.source.row_key()
    places = [[(number, row) for row in rows or [0]] for number, rows in enumerate(upcoming, first)]
    collate: Any = SeededCollate(options.pop("collate_fn", None) or default_collate, key, step.processes.rank)
    loader = DataLoader(SeededRows(dataset, key), batch_sampler=places, collate_fn=collate, **options)
    for rows, batch in zip(upcoming, loader, strict=True):
        drawn = step.draw()
        assert drawn.tolist() == rows
        step.is_loaded = True
        inputs, targets = batch
        inputs, targets = as_batch(inputs), as_batch(targets)
        yield (inputs, targets) if rows else tuple(map_tensors(lambda part: part[:0], (inputs, targets)))


def upcoming_rows(step: PrivateStep) -> Iterator[Tensor]:
    """Yield the rows that the next draws of a private step will return, without drawing them."""
    source, budget = step.source, step.budget
    for ahead in range(1, budget.steps - step.drawn + 1):
        yield step.processes.own_rows(source.sample_rows(source.step + ahead, budget.rows, budget.rate))
