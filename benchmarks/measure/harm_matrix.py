"""Train every method on every pattern and six networks at 50, 90 and 98 %, and list the cells that end at chance.

    python benchmarks/measure/harm_matrix.py [--json FILE] [--processes N] [--only GLOB …] [--resume FILE] [--quick]

A cell is a method, a pattern, a network, a sparsity and a seed (harm_training.py), trained for eight epochs on
scikit-learn's digits by a plain loop. Ten classes make an accuracy of 10 % by chance. The verdict on a cell:

    chance    it ends below 20 %, whatever the reason
    harmed    it ends more than 15 points below dense training, one-shot pruning and fine-tuning of the same length
    refused   the library says in one sentence why the combination cannot work
    crashed   an error that is no refusal

The script fails if a cell crashed or ended at chance. Cells that would repeat another are left out: kernels of networks
without convolutions are single weights, 2:4 has one sparsity, and SRigL has a pattern of its own. `--resume` appends
each finished cell to a file of JSON lines, and skips the cells that it holds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from harm_networks import NETWORKS
from harm_training import BATCH, DENSE, EPOCHS, PATTERN_OPTIONS, REFERENCE, Cell, train_cell
from record_file import write_record

from pomona.lab.runs.environment import current_commit
from pomona.methods import METHODS
from pomona.patterns import PATTERNS

SPARSITIES = (0.5, 0.9, 0.98)
CHANCE_BELOW, HARMED_BELOW = 20.0, 15.0  # an accuracy in per cent, and points below the reference
OWN_PATTERN = {"srigl": "balanced"}  # one block for each row
QUICK = ("dense", "dpf", "edge_popup", "finetune", "lottery", "sfp", "snip")

Row = dict[str, Any]


def list_cells(seeds: Iterable[int] = (0,), epochs: int = EPOCHS) -> list[Cell]:
    """Return all cells of the matrix; the dense cells come first."""
    return [
        Cell(method, pattern, network, sparsity, seed, epochs)
        for seed in seeds
        for method, pattern, network, sparsity in list_combinations()
    ]


def list_combinations() -> Iterator[tuple[str, str, str, float]]:
    """Yield the method, pattern, network and sparsity of each cell."""
    for network in NETWORKS:
        yield DENSE, "unstructured", network, 0.0
    for method in METHODS:
        for pattern, options in PATTERN_OPTIONS.items():
            if OWN_PATTERN.get(method, pattern) != pattern:
                continue
            fixed = PATTERNS.resolve({"name": pattern, **options}).sparsity
            for network, info in NETWORKS.items():
                if pattern != "kernel" or info.has_kernels:
                    yield from ((method, pattern, network, s) for s in SPARSITIES if fixed in (None, s))


def list_quick_cells() -> list[Cell]:
    """Return a few cells that train in seconds, one for each way of training."""
    every = list_cells(epochs=2)
    return [c for c in every if c.method in QUICK and (c.pattern, c.network) == ("unstructured", "MLP")]


def use_one_thread() -> None:
    """Prepare a worker process: one thread, and interruption is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def train_cells(cells: Sequence[Cell], processes: int) -> Iterator[Row]:
    """Yield the rows of cells as they finish, in any order; one process trains in the order given."""
    if processes == 1:
        torch.set_num_threads(1)
        yield from map(train_cell, cells)
        return
    with multiprocessing.get_context("spawn").Pool(processes, use_one_thread) as pool:
        yield from pool.imap_unordered(train_cell, cells)


def read_finished(path: Path | None, head: Row) -> list[Row]:
    """Return the rows of an earlier, interrupted run; a new file starts with `head`, which an old one must have."""
    if path is None:
        return []
    if not path.exists():
        path.write_text(json.dumps(head) + "\n")
        return []
    found, *rows = map(json.loads, path.read_text().splitlines())
    if found != head:
        raise SystemExit(f"{path} was begun with {found}, not {head}: give --resume another file.")
    return rows


def cell_name(row: Row) -> str:
    """Return the name of a row's cell."""
    return Cell(*(row[key] for key in ("method", "pattern", "network", "sparsity", "seed"))).name


def judge(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, in the order of the matrix, with a verdict and the accuracy of the reference."""
    by_name = {cell_name(row): row for row in rows}
    order = {cell.name: position for position, cell in enumerate(list_cells(sorted({r["seed"] for r in rows})))}
    judged = []
    for name in sorted(by_name, key=lambda name: order.get(name, len(order))):
        row = by_name[name]
        reference = by_name.get(cell_name({**row, "method": REFERENCE}), {}).get("accuracy")
        judged.append({**row, "reference": reference, "verdict": verdict(row, reference)})
    return judged


def verdict(row: Row, reference: float | None) -> str:
    """Return whether a cell was refused, crashed, ended at chance, was harmed, or is "fine"."""
    if row["status"] != "trained":
        return str(row["status"])
    if row["accuracy"] < CHANCE_BELOW:
        return "chance"
    return "harmed" if reference is not None and row["accuracy"] < reference - HARMED_BELOW else "fine"


def shorten(row: Row) -> Row:
    """Return a row for the record, without what the settings or the verdict say, and without empty fields."""
    return {key: value for key, value in row.items() if key not in ("epochs", "status") and value not in (None, [])}


def describe_row(row: Row) -> str:
    """Return one line about a cell."""
    if row["status"] != "trained":
        return f"{cell_name(row):42} {row['status']}: {row['message']}"
    facts = [f"{row['accuracy']:5.1f} %"]
    if "reached" in row:
        facts += [
            f"reached {row['reached']:.3f}",
            f"least density {row['least_density']:.4f} in {row['thinnest_layer']}",
            f"{row['empty_layers']} empty layers, {row['empty_outputs']} of {row['outputs']} outputs",
            f"largest latent {row['largest_latent']:.3g}",
        ]
    return f"{cell_name(row):42} {', '.join(facts)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the cells, print what is harmed and write the record; fail where a cell crashed or ended at chance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count(), help="default: one for each core")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="train with seeds 0 to N − 1")
    parser.add_argument("--only", nargs="+", metavar="GLOB", help="cells such as 'dpf/filter/*' or '*/CNN/0.98/*'")
    parser.add_argument("--resume", type=Path, help="a file that takes finished cells, and whose cells are skipped")
    parser.add_argument("--quick", action="store_true", help="a few short cells, to see that the script runs")
    options = parser.parse_args(arguments)
    cells = list_quick_cells() if options.quick else list_cells(range(options.seeds))
    cells = [cell for cell in cells if any(fnmatchcase(cell.name, glob) for glob in options.only or ["*"])]
    head = {"commit": current_commit(), "epochs": sorted({cell.epochs for cell in cells})}
    rows = read_finished(options.resume, head)
    finished = {cell_name(row) for row in rows}
    missing = [cell for cell in cells if cell.name not in finished]
    print(f"{len(missing)} cells to train, {len(cells) - len(missing)} finished before", flush=True)
    try:
        for row in train_cells(missing, options.processes):
            rows.append(row)
            if verdict(row, None) in ("chance", "crashed"):
                print(describe_row(row), flush=True)
            if options.resume:
                with options.resume.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted after {len(rows)} cells; --resume continues where it was given.") from None
    rows = judge(rows)
    settings = {"epochs": head["epochs"], "batch": BATCH, "seeds": sorted({row["seed"] for row in rows})}
    settings["networks"] = {name: network.description for name, network in NETWORKS.items()}
    limits = {"chance_below": CHANCE_BELOW, "harmed_below_reference": HARMED_BELOW, "reference": REFERENCE}
    write_record(options.json, settings=settings, limits=limits, cells=[shorten(row) for row in rows])
    counts = Counter(row["verdict"] for row in rows)
    for row in rows:
        if row["verdict"] == "harmed":
            print(f"{describe_row(row)}, harmed: reference {row['reference']:.1f} %")
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))
    if counts["chance"] or counts["crashed"]:
        raise SystemExit(f"{counts['chance']} cells ended at chance and {counts['crashed']} crashed.")


if __name__ == "__main__":
    main()
