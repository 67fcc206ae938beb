"""Filling a table: train its missing runs, in an order that respects which run starts or learns from which."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from contextlib import closing
from pathlib import Path
from typing import Any

from pomona.errors import require

from ..runs.folder import read_summary
from ..runs.interruption import Interrupted
from ..sweeps import sweep
from ..sweeps.axes import SweepRun
from ..sweeps.run_store import (
    READ_ERRORS,
    RECORDS,
    RUNS,
    RunStore,
    StoredRun,
    without_finetune,
    write_record,
)
from .paper_table import PaperTable
from .table_run import TableRun, missing_parents

TABLE_RUNS = RUNS / "tables"  # one folder for all tables, since they share runs


def fill_table(
    table: PaperTable,
    out: str | Path = TABLE_RUNS,
    *,
    only_missing: bool = False,
    records: Path | None = None,
    on_result: sweep.ResultCallback | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train the missing runs of a table and return the comparison with the paper, with the failed runs.

    A run that starts from the weights or the mask of another, or learns from another, waits for it. With `records`, a
    record of each finished run is written to that folder. `on_result` and the other options are those of `sweep.sweep`.

    Raises:
        SweepInterrupted: on Ctrl-C, once the runs under way have written a checkpoint.
    """
    out = Path(out)
    store, runs = RunStore((RUNS, out)), table.runs()
    attempted: set[tuple[str, ...]] = set()  # each run is trained once, even if it fails
    failed: list[dict[str, str]] = []
    begun = sum(run.state(store) != "missing" for run in runs)
    require(out.is_dir() or not out.exists(), f"'{out}' is a file: give a folder for the runs with --out.")
    require(
        only_missing or not begun,
        f"{begun} of the {len(runs)} runs of {table.name} exist already: continue with --only-missing.",
    )
    write_table_records(table, store, records)
    try:
        while batch := trainable_runs(runs, store, out, attempted):
            attempted |= {run.key for run, _ in batch}
            with closing(sweep.train_runs([planned for _, planned in batch], **options)) as coming:
                for index, result in coming:
                    trained = batch[index][1]
                    if "error" in result:
                        failed.append({"name": trained.recipe.name, "folder": str(trained.folder), **result})
                    else:
                        store.add_run(stored := StoredRun(trained.recipe, trained.folder, result))
                        write_record(stored, records)
                    if on_result is not None:
                        on_result(count_complete(runs, store) + len(failed), len(runs), trained, result)
    except (Interrupted, KeyboardInterrupt) as stopped:
        raise sweep.SweepInterrupted(out, count_complete(runs, store), len(runs)) from stopped
    for failure in failed:
        store.add_folder(Path(failure["folder"]))  # another process may have trained and finished it
    return table.compare(store) | {"failed": [one for one in failed if read_summary(Path(one["folder"])) is None]}


def count_complete(runs: Sequence[TableRun], store: RunStore) -> int:
    """Return how many runs are complete."""
    return sum(run.find_covering_run(store) is not None for run in runs)


def trainable_runs(
    runs: Sequence[TableRun], store: RunStore, out: Path, attempted: Set[tuple[str, ...]] = frozenset()
) -> list[tuple[TableRun, SweepRun]]:
    """Return the runs that can be trained now, in the order of the queue.

    A run that starts or learns from another needs the other's weights, so a record of the other is not enough. It may
    learn from a run that is itself among those returned. A run that is the first part of a missing run with fine-tuning
    is not trained separately, unless another run needs it.
    """
    found: list[tuple[TableRun, SweepRun]] = []
    missing = [run for run in runs if run.find_covering_run(store) is None]
    needed = {parent.key for run in missing for parent in missing_parents(run, store)}
    finetuned = [run.recipe for run in missing if run.recipe.finetune.epochs and run.retraining is None]
    covered = {(without_finetune(recipe).fingerprint(),) for recipe in finetuned} - needed
    wanted = {one.key: one for run in missing for one in [*missing_parents(run, store), run]}
    for run in [run for key, run in wanted.items() if key not in covered | attempted]:
        try:
            trainable = run.to_sweep_run(store, out, {one.key: planned.folder for one, planned in found})
        except READ_ERRORS as error:
            warnings.warn(f"{run.name} cannot start from its parent run: {error}", stacklevel=2)
            continue
        if trainable is not None:
            found.append((run, trainable))
    return found


def write_table_records(table: PaperTable, store: RunStore, records: Path | None = RECORDS) -> list[Path]:
    """Write the records of a table's finished runs and return their files."""
    files = [write_record(run.find_covering_run(store), records) for run in table.runs()]
    return [file for file in dict.fromkeys(files) if file is not None]
