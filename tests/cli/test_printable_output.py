"""Texts from files are printed without anything that a terminal obeys."""

from __future__ import annotations

import json

import pytest
from rich.table import Table

from pomona.cli import output

HOSTILE = "\x1b]0;title\x07\x9b31m\u202etxt"


@pytest.mark.parametrize(
    "show",
    [
        lambda: output.print_status(HOSTILE),
        lambda: output.print_note(HOSTILE),
        lambda: output.print_table(output.facts_table({HOSTILE: HOSTILE})),
        lambda: output.print_json({HOSTILE: [HOSTILE]}),
    ],
    ids=["status", "note", "table", "json"],
)
def test_no_escape_sequence_reaches_the_terminal(show, capsys):
    show()
    printed = "".join(capsys.readouterr())
    assert r"\u001b]0;title" in printed
    assert r"\u009b31m\u202etxt" in printed
    assert not set(printed) & set("\x1b\x07\x9b\u202e")


def test_json_stays_the_same_value_and_tables_their_layout(capsys):
    output.print_json({"text": HOSTILE})
    assert json.loads(capsys.readouterr().out) == {"text": HOSTILE}
    table = Table("a", "b")
    table.add_row("first\nsecond", "ü")
    output.print_table(table)
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 6
    assert "ü" in shown
