"""Reproduce Tables 1 to 3 and Figures 1 and 2 of Qian and Klabjan (2021), and write results/qian.json.

    python benchmarks/measure/qian_klabjan_tables.py         (half an hour; needs the data of Covertype and CIFAR-10)
    python benchmarks/pages/theory_page.py           writes the tables of docs/theory.md from the record

Table 1 and Figure 1 are of one network. --threads 1 makes a run repeatable on machines with other numbers of cores.
Every mean of Tables 2 and 3 is checked: it must lie within four standard errors of the paper's (the standard errors
of both taken together, plus half a unit of the last printed digit).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from record_file import RESULTS, write_record

from pomona.theory import qian_tables

RECORD = RESULTS / "qian.json"
MAX_STANDARD_ERRORS = 4.0


def measure_tables(seed: int = 0) -> dict[str, Any]:
    """Return all tables and figures. Raise SystemExit if a mean disagrees with the paper's."""
    covertype = qian_tables.train_on_covertype(seed, print_progress)
    vgg = qian_tables.train_on_cifar10(seed, print_progress)
    networks = {"qian-table1": covertype, "qian-figure1": covertype, "qian-figure2": vgg}
    tables = {}
    for name, make in qian_tables.TABLES.items():
        tables[name] = make(network=networks[name]) if name in networks else make(seed)
        far = [
            cell for cell in tables[name]["cells"] if (qian_tables.standard_errors_off(cell) or 0) > MAX_STANDARD_ERRORS
        ]
        if far:
            raise SystemExit(f"{name}: {far[0]} is {qian_tables.standard_errors_off(far[0]):.1f} standard errors off.")
        print(f"{name}: {len(tables[name]['cells'])} cells", flush=True)
    return tables


def print_progress(done: int, total: int) -> None:
    """Print every tenth of the steps of a training."""
    if done * 10 // total > (done - 1) * 10 // total:
        print(f"{time.strftime('%H:%M:%S')} {done} of {total} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="threads of torch (default: all cores)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    write_record(RECORD, seed=0, threads=torch.get_num_threads(), tables=measure_tables())


if __name__ == "__main__":
    main()
