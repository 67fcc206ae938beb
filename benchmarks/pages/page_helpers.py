"""Helpers for the scripts that write documentation pages: reading records, naming machines, tables, filling markers.

Each script in this folder has `PAGE`, the page it writes, and `render()`, which returns the page's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS, DOCS = ROOT / "results", ROOT / "docs"
NOT_MEASURED = "*Not measured yet.*"

Record = Mapping[str, Any]


def read_record(path: Path) -> dict[str, Any]:
    """Return the record at `path`."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def read_records(pattern: str) -> list[dict[str, Any]]:
    """Return the records in results/ whose file names match a pattern like "overhead-*.json", sorted by name."""
    return [read_record(path) for path in sorted(RESULTS.glob(pattern))]


def read_rows(pattern: str, key: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield each row under `key` of the records that match `pattern`, together with its record."""
    return ((record, row) for record in read_records(pattern) for row in record.get(key, ()))


def machine_name(record: Record, device: str = "cuda") -> str:
    """Return the name of the GPU, or of the CPU if the machine has no GPU or `device` is "cpu"."""
    gpus = record["machine"]["gpus"]
    return str(gpus[0]["name"] if gpus and device != "cpu" else record["machine"]["cpu"])


def format_command(record: Record) -> str:
    """Return the command that made a record, and its commit."""
    return f"`{record['command']}` at {record['commit']}"


def format_sources(records: Iterable[Record]) -> str:
    """Return a list of the machines, versions and commands that made `records`."""
    lines = [
        f"- {machine_name(record)}, torch {record['versions']['torch']}: {format_command(record)}" for record in records
    ]
    return "\n".join(lines) or NOT_MEASURED


def format_table(heads: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "|---") -> str:
    """Return a Markdown table, or NOT_MEASURED if there are no rows."""
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], rule * len(heads) + "|", *lines[1:]]) if lines[1:] else NOT_MEASURED


def fill_page(page: Path, parts: Mapping[str, str]) -> str:
    """Return the text of `page` with each part placed between its markers <!-- name --> and <!-- end -->."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (mark and end):
            raise SystemExit(f"docs/{page.name} has no <!-- {name} --> … <!-- end -->.")
        text = f"{before}{mark}{part.rstrip()}\n{end}{after}"
    return text


def write_page(page: Path, text: str) -> None:
    """Write `text` to a page or a drawing of docs/."""
    page.write_text(text, encoding="utf-8")
