"""Reproduce Tables 1 to 3 and Figures 1 and 2 of Qian and Klabjan (2021), and write results/qian.json.

    python benchmarks/measure/qian_klabjan_tables.py         (half an hour; needs the data of Covertype and CIFAR-10)
    python benchmarks/pages/theory_page.py           writes the tables of docs/theory.md from the record

Table 1 and Figure 1 are of one network. --threads 1 makes a run repeatable on machines with other numbers of cores.
--networks FOLDER keeps the trained networks in a folder, each with the commit that trained it, and reads those that are
there already; the record names these commits.
Every mean of Tables 2 and 3 is checked: it must lie within four standard errors of the paper's (the standard errors
of both taken together, plus half a unit of the last printed digit).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from record_file import RESULTS, write_record
from safetensors import safe_open
from safetensors.torch import save_file

from pomona.lab.runs import environment
from pomona.theory import qian_tables

RECORD = RESULTS / "qian.json"
MAX_STANDARD_ERRORS = 4.0


TRAINED: dict[str, Callable[..., qian_tables.Network]] = {
    "covertype": qian_tables.train_on_covertype,
    "vgg16": qian_tables.train_on_cifar10,
}
NETWORK_OF_TABLE = {"qian-table1": "covertype", "qian-figure1": "covertype", "qian-figure2": "vgg16"}


def measure_tables(networks: Mapping[str, qian_tables.Network], seed: int = 0) -> dict[str, Any]:
    """Return all tables and figures. Raise SystemExit if a mean disagrees with the paper's."""
    tables = {}
    for name, make in qian_tables.TABLES.items():
        network = networks.get(NETWORK_OF_TABLE.get(name, ""))
        tables[name] = make(seed) if network is None else make(network=network)
        far = [
            cell for cell in tables[name]["cells"] if (qian_tables.standard_errors_off(cell) or 0) > MAX_STANDARD_ERRORS
        ]
        if far:
            raise SystemExit(f"{name}: {far[0]} is {qian_tables.standard_errors_off(far[0]):.1f} standard errors off.")
        print(f"{time.strftime('%H:%M:%S')} {name}: {len(tables[name]['cells'])} cells", flush=True)
    return tables


def get_network(name: str, folder: Path | None, seed: int = 0) -> tuple[qian_tables.Network, str]:
    """Return a trained network and the commit that trained it: from the folder if it is there, else trained now."""
    file = folder and folder / f"{name}.safetensors"
    if file and file.is_file():
        with safe_open(file, "pt") as stored:
            about = stored.metadata()
            weights = tuple(stored.get_tensor(key) for key in sorted(stored.keys()))
        return qian_tables.Network(about["name"], weights, about["origin"]), about["commit"]
    network, commit = TRAINED[name](seed, print_progress), str(environment.current_commit())
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        about = {"name": network.name, "origin": network.origin, "commit": commit}
        save_file({f"{k:02}": w.contiguous() for k, w in enumerate(network.weights, 1)}, file, about)
    return network, commit


def print_progress(done: int, total: int) -> None:
    """Print every tenth of the steps of a training."""
    if done * 10 // total > (done - 1) * 10 // total:
        print(f"{time.strftime('%H:%M:%S')} {done} of {total} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="threads of torch (default: all cores)")
    parser.add_argument("--networks", type=Path, metavar="FOLDER", help="where trained networks are kept")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    trained = {name: get_network(name, options.networks) for name in TRAINED}
    tables = measure_tables({name: network for name, (network, _) in trained.items()})
    commits = {name: commit for name, (_, commit) in trained.items()}
    write_record(RECORD, seed=0, threads=torch.get_num_threads(), networks=commits, tables=tables)


if __name__ == "__main__":
    main()
