"""Rendering of tables: rows and columns, one line per make_cell, and Markdown."""

from __future__ import annotations

import io

from rich.console import Console

from pomona.lab.tables import rendering
from pomona.lab.tables.paper_table import parse_paper_number


def print_text(grid, width: int = 200) -> str:
    """Return what rich prints at a width."""
    console = Console(file=io.StringIO(), width=width)
    console.print(grid)
    return console.file.getvalue()


def make_cell(label, row, column, mean, paper=None, std=None, runs=1):
    """Return a cell as a comparison with a paper has it."""
    value, _ = parse_paper_number(paper)
    known = {"model": "mlp", "method": "dpf", "sparsity": 0.5, "setting": {}, "paper": value, "paper_text": paper}
    return known | {"label": label, "row": row, "own": row, "column": column, "mean": mean, "std": std, "runs": runs}


CELLS = [
    make_cell("A", "50 %", "dense", 95.0, "95.10 ± 0.04"),
    make_cell("A", "50 %", "DPF", 91.234, "90.00", 0.5, 3),
    make_cell("A", "80 %", "DPF", None, "*", runs=0),
    make_cell("B", "80 %", "DPF", 80.0),
]


RESULT = {
    "title": "T",
    "paper": "P",
    "columns": ["dense", "DPF"],
    "across": False,
    "complete": 3,
    "runs": 9,
    "missing": 3,
    "cells": CELLS,
}


def test_our_result_is_above_the_paper():
    heads, rows = rendering.layout_table(RESULT)
    assert heads == ["", "", "dense", "DPF"]
    assert rows == [
        ["A", "50 %", "95.00 ×1\n95.10 ± 0.04 −0.10", "91.23 ± 0.50 ×3\n90.00 +1.23"],
        ["", "80 %", "", "–\n*"],
        ["B", "80 %", "", "80.00 ×1"],
    ]
    shown = print_text(rendering.render_table(RESULT))
    assert shown.startswith("T (P)\n")
    assert "3 of 4 cells complete, 3 of 9 runs missing" in shown
    assert shown.count("├") == 1  # between A and B


def test_a_table_that_is_too_wide_has_one_line_per_cell():
    wide = max(map(len, print_text(rendering.render_table(RESULT)).splitlines()))
    assert print_text(rendering.render_table(RESULT), wide) == print_text(rendering.render_table(RESULT))
    narrow = print_text(rendering.render_table(RESULT), wide - 1)
    assert "│ A     │ 50 % │ DPF    │ 91.23 ± 0.50 ×3 │        90.00 │      +1.23 │" in narrow
    assert "below it" not in narrow
    tight = print_text(
        rendering.render_table(RESULT | {"cells": [make_cell("ResNet-20", "50 %", "DPF", 91.234, "90.00", 0.5, 3)]}), 44
    )
    assert "91.23 ± 0.50 ×3" in tight
    assert "…" not in tight  # words are folded


def test_details_stand_between_our_result_and_the_paper():
    cell = CELLS[1] | {"fresh": 92.0, "best": 92.345}
    _, rows = rendering.layout_table(RESULT | {"cells": [CELLS[0], cell, CELLS[3] | {"best": 80.5}]})
    assert rows[0][3] == "91.23 ± 0.50 ×3\nfresh 92.00, best 92.34\n90.00 +1.23"
    assert rows[1][3] == "80.00 ×1\nbest 80.50"
    heads, rows = rendering.layout_lines([CELLS[0], cell], ())
    assert heads[-2:] == ["fresh statistics", "best epoch"]
    assert [row[-2:] for row in rows] == [["", ""], ["92.00", "92.34"]]
    shown = print_text(rendering.render_table(RESULT | {"cells": [cell]}))
    assert rendering.DETAILS_LEGEND in shown
    assert rendering.DETAILS_LEGEND not in print_text(rendering.render_table(RESULT))


def test_across_prints_columns_as_rows():
    heads, rows = rendering.layout_table(RESULT | {"across": True})
    assert heads == ["", "", "50 %", "80 %"]
    assert [row[:2] for row in rows] == [["A", "dense"], ["", "DPF"], ["B", "DPF"]]
    assert rows[1][2:] == ["91.23 ± 0.50 ×3\n90.00 +1.23", "–\n*"]


def test_with_further_measures_there_is_one_line_per_cell():
    heads, rows = rendering.layout_table(RESULT | {"show": ["cost"], "cells": [CELLS[1] | {"cost": 12.34}, CELLS[2]]})
    assert heads == ["model", "", "method", "ours", "paper", "difference", "cost, dense epochs"]
    assert rows[0] == ["A", "50 %", "DPF", "91.23 ± 0.50 ×3", "90.00", "+1.23", "12.3"]
    assert rows[1] == ["A", "80 %", "DPF", "–", "*", "", "–"]


def test_without_numbers_of_the_paper_their_columns_are_left_out():
    heads, rows = rendering.layout_table(RESULT | {"show": ["last"], "cells": [CELLS[3] | {"last": 79.5}]})
    assert heads == ["model", "", "method", "ours", "last weights"]
    assert rows == [["B", "80 %", "DPF", "80.00 ×1", "79.50"]]


def test_markdown_has_a_line_per_row():
    lines = rendering.render_markdown(RESULT).splitlines()
    assert "| A | 50 % | 95.00 ×1<br>95.10 ± 0.04 −0.10 | 91.23 ± 0.50 ×3<br>90.00 +1.23 |" in lines
    assert "| --- | --- | ---: | ---: |" in lines


def test_without_cells_only_title_and_notes_are_printed():
    nothing = {"title": "T", "paper": "", "notes": "Later.", "cells": []}
    assert print_text(rendering.render_table(nothing)) == "T\nLater.\nnothing was measured yet\n"
    assert rendering.render_markdown(nothing) == "\nLater.\n"


def test_vertical_bars_are_escaped_in_markdown():
    assert "| A\\|B | 80 % | 80.00 ×1 |" in rendering.render_markdown(RESULT | {"cells": [CELLS[3] | {"label": "A|B"}]})
