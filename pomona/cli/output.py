"""How commands print: tables and sentences for a person, JSON for a program.

Results go to stdout. Progress, notes and errors go to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pomona.errors import escape_unprintable

WIDTH_WITHOUT_TERMINAL = 140  # columns of a table in a file or a pipe, unless $COLUMNS says otherwise


def print_status(sentence: str) -> None:
    """Print a sentence for a person on one line of stderr."""
    print(escape_unprintable(" ".join(sentence.split())), file=sys.stderr, flush=True)


def print_note(sentence: str) -> None:
    """Print a note on stderr: something that is not an error, and that the user should know."""
    print_status(f"note: {sentence}")


def print_table(value: Any) -> None:
    """Print a table, or anything else that rich can render, on stdout."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=WIDTH_WITHOUT_TERMINAL)
    console.print(Printable(value))


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    print(escape_unprintable(json.dumps(value, indent=2, ensure_ascii=False)))


class Printable:
    """What rich renders of a value, with every character escaped that a terminal would obey."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.value, options):
            yield segment if segment.control else Segment(escape_unprintable(segment.text), segment.style)


def facts_table(values: Mapping[str, Any]) -> Table:
    """Return a table of names and values, one pair per line."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for key, value in values.items():
        table.add_row(Text(key, style="bold"), Text(str(value)))
    return table
