"""Write the faults and the fuzzed inputs of results/chaos.json into docs/durability.md.

python benchmarks/pages/durability_page.py
"""

from __future__ import annotations

from collections.abc import Sequence

from page_helpers import (
    DOCS,
    NOT_MEASURED,
    Record,
    fill_page,
    format_sources,
    format_table,
    read_records,
    write_page,
)

PAGE = DOCS / "durability.md"
RECORD = "chaos.json"


def format_faults(records: Sequence[Record]) -> str:
    """Return how many faults of each kind were injected, survived and lost."""
    rows: list[list[str]] = []
    for record in records:
        faults = record["faults"]
        kinds = sorted(faults["kinds"].items(), key=lambda pair: (-pair[1], pair[0]))
        rows += [[kind, f"{count:,}"] for kind, count in kinds]
        totals = f"**{faults['injected']:,} injected, {faults['survived']:,} survived, {faults['lost']:,} lost**"
        rows.append([totals, f"in {faults['seconds'] / 60:.0f} minutes"])
    return format_table(["fault", "times"], rows)


def format_subjects(records: Sequence[Record]) -> str:
    """Return how many runs of each kind met the faults."""
    rows = [
        [kind, f"{counts['cases']:,}", f"{counts['faults']:,}", f"{counts['lost']:,}"]
        for record in records
        for kind, counts in record["faults"]["subjects"].items()
    ]
    return format_table(["what was harmed", "times begun", "faults", "lost"], rows)


def format_fuzz(records: Sequence[Record]) -> str:
    """Return what became of the inputs of each parser."""
    rows: list[list[str]] = []
    for record in records:
        fuzz = record.get("fuzz")
        if fuzz is None:
            continue
        totals = {"all": {key: fuzz[key] for key in ("inputs", "accepted", "refused", "failed")}}
        for name, one in {**fuzz["parsers"], **totals}.items():
            rows.append([name, *(f"{one[key]:,}" for key in ("inputs", "accepted", "refused", "failed"))])
    table = format_table(["parser", "inputs", "read", "refused with a sentence", "failed"], rows)
    return table if rows else NOT_MEASURED


def render() -> str:
    """Return the text of the page with its tables filled in."""
    records = read_records(RECORD)
    parts = {
        "faults": format_faults(records),
        "subjects": format_subjects(records),
        "sources": format_sources(records),
        "fuzz": format_fuzz(records),
    }
    return fill_page(PAGE, parts)


if __name__ == "__main__":
    write_page(PAGE, render())
