"""Reproduce Tables 1 to 3 and Figures 1 and 2 of Qian and Klabjan (2021), and write results/qian.json.

    python benchmarks/measure/qian_klabjan_tables.py         (some minutes; needs the Covertype data)
    python benchmarks/pages/theory_page.py           writes the tables of docs/theory.md from the record

Every mean of Tables 2 and 3 is checked: it must lie within four standard errors of the paper's (the standard errors
of both taken together, plus half a unit of the last printed digit).
"""

from __future__ import annotations

import argparse
from typing import Any

from record_file import RESULTS, write_record

from pomona.theory import qian_tables

RECORD = RESULTS / "qian.json"
MAX_STANDARD_ERRORS = 4.0


def measure_tables(seed: int = 0) -> dict[str, Any]:
    """Return all tables and figures. Raise SystemExit if a mean disagrees with the paper's."""
    tables = {}
    for name, make in qian_tables.TABLES.items():
        tables[name] = make(seed)
        far = [
            cell for cell in tables[name]["cells"] if (qian_tables.standard_errors_off(cell) or 0) > MAX_STANDARD_ERRORS
        ]
        if far:
            raise SystemExit(f"{name}: {far[0]} is {qian_tables.standard_errors_off(far[0]):.1f} standard errors off.")
        print(f"{name}: {len(tables[name]['cells'])} cells", flush=True)
    return tables


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_record(RECORD, seed=0, tables=measure_tables())


if __name__ == "__main__":
    main()
