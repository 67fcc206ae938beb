"""What the scripts that write pages share: the records, where they were made, tables, and places to be filled in.

Such a script has PAGE, a file of docs/, and page(), the text that its records give.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "results", ROOT / "docs"
MISSING = "*Not measured yet.*"

Record = Mapping[str, Any]


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def records(pattern: str) -> list[dict[str, Any]]:
    """All of a name, like "overhead-*.json", in the order of their names."""
    return [read(path) for path in sorted(RESULTS.glob(pattern))]


def rows(pattern: str, key: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """What all records have under a key, each with its record."""
    return ((record, row) for record in records(pattern) for row in record.get(key, ()))


def machine(record: Record, device: str = "cuda") -> str:
    """The GPU, or the processor where there is none or another device was used."""
    gpus = record["machine"]["gpus"]
    return str(gpus[0]["name"] if gpus and device != "cpu" else record["machine"]["cpu"])


def made(record: Record) -> str:
    return f"`{record['command']}` at {record['commit']}"


def sources(kept: Iterable[Record]) -> str:
    """Where records come from."""
    lines = [f"- {machine(one)}, torch {one['versions']['torch']}: {made(one)}" for one in kept]
    return "\n".join(lines) or MISSING


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "|---") -> str:
    """A table; nothing measured where it has no row."""
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], rule * len(heads) + "|", *lines[1:]]) if lines[1:] else MISSING


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """A page with each part between its <!-- name --> and <!-- end -->."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (mark and end):
            raise SystemExit(f"docs/{page.name} has no <!-- {name} --> … <!-- end -->.")
        text = f"{before}{mark}{part.rstrip()}\n{end}{after}"
    return text


def write(page: Path, text: str) -> None:
    page.write_text(text, encoding="utf-8")
