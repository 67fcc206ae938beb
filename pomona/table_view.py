"""Objects that are shown as a table: as text, by rich, and as HTML in a notebook."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import ClassVar

from rich.console import Console
from rich.table import Column, Table

# Colors are those of the page, so that a table can be read on a light and on a dark one.
TABLE_STYLE = "border-collapse: collapse; color: inherit; background: none; font-variant-numeric: tabular-nums"
CELL_STYLE = "padding: 0.15em 0.7em; vertical-align: top; background: none"
LINE_STYLE = "1px solid currentColor"


class TableView:
    """Base of an object that is a table: `print` shows it as text, and a notebook as HTML."""

    text_width: ClassVar[int] = 140

    def __rich__(self) -> Table:
        """Return the table, as rich prints it."""
        raise NotImplementedError

    def __str__(self) -> str:
        return to_text(self.__rich__(), self.text_width)

    def _repr_html_(self) -> str:
        return to_html(self.__rich__())


def to_text(table: Table, width: int) -> str:
    """Return a table as plain text, at most `width` characters wide."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def to_html(table: Table) -> str:
    """Return a table as HTML that needs nothing else: all text is escaped, and styles are inline."""
    title = f"<caption style='text-align: left; {CELL_STYLE}'>{escape(str(table.title))}</caption>"
    head = html_row(table.columns, [column.header for column in table.columns], "th", f"border-bottom: {LINE_STYLE}")
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = "".join(html_row(table.columns, row, "td") for row in rows)
    foot = html_row(table.columns, [column.footer for column in table.columns], "td", f"border-top: {LINE_STYLE}")
    note = f"<div style='{CELL_STYLE}'>{escape(str(table.caption))}</div>"
    return (
        f"<div><table style='{TABLE_STYLE}'>{title if table.title else ''}<thead>{head}</thead><tbody>{body}</tbody>"
        f"{f'<tfoot>{foot}</tfoot>' if table.show_footer else ''}</table>{note if table.caption else ''}</div>"
    )


def html_row(columns: Sequence[Column], cells: Iterable[object], tag: str, style: str = "") -> str:
    """Return one row, with its cells aligned as their columns are."""
    row = ""
    for column, cell in zip(columns, cells, strict=True):
        align = "right" if column.justify == "right" else "left"
        text = escape(str(cell)).replace("\n", "<br>")
        row += f"<{tag} style='{CELL_STYLE}; text-align: {align}; {style}'>{text}</{tag}>"
    return f"<tr>{row}</tr>"
