"""The result table of a sweep: rows, columns and the mark of the best mean."""

from __future__ import annotations

import io

from rich.console import Console

from pomona.lab.sweeps.result_table import column_label, format_cell, render_table, row_label


def print_text(grid) -> str:
    """Return what rich prints at a width of 160 columns."""
    console = Console(file=io.StringIO(), width=160)
    console.print(grid)
    return console.file.getvalue()


def make_cell(method, sparsity, mean, std=None, **setting):
    """Return a cell of a sweep, as far as the table reads it."""
    setting = {"data": "digits", "epochs": 3, "seeds": [0], **setting}
    return {"model": "mlp", "method": method, "sparsity": sparsity, "setting": setting, "mean": mean, "std": std}


def test_the_table_has_sparsities_in_rows_and_methods_in_columns():
    shown = print_text(
        render_table(
            [
                make_cell("dense", 0.0, 98.0),
                make_cell("oneshot", 0.8, 91.0, 0.5),
                make_cell("dpf", 0.8, 94.5),
                make_cell("dpf", 0.9, 90.0),
            ]
        )
    )
    head, first, second = (next(line for line in shown.splitlines() if key in line) for key in ("dpf", "80 %", "90 %"))
    assert "mlp on digits, accuracy in % · dense after 3 epochs: 98.00" in shown
    assert head.index("oneshot") < head.index("dpf")
    assert "91.00 ± 0.50" in first
    assert "★ 94.50" in first
    assert "–" in second
    assert "★ 90.00" in second


def test_many_methods_are_rows():
    methods = ["dpf", "dsr", "oneshot", "random", "rigl", "set", "snip"]
    shown = print_text(render_table([make_cell(m, s, 90.0 + k) for k, m in enumerate(methods) for s in (0.8, 0.9)]))
    head, last = (next(line for line in shown.splitlines() if key in line) for key in ("method", "snip"))
    assert head.index("80 %") < head.index("90 %")
    assert last.count("★ 96.00") == 2
    assert shown.count("★ 9") == 2


def test_options_of_a_method_are_columns_and_other_settings_are_rows():
    ways = [make_cell("oneshot", 0.8, 91.0, options={"at": at}) for at in (0.5, 1)]
    assert [column_label(c, ways) for c in ways] == ["oneshot(at=0.5)", "oneshot(at=1)"]
    assert column_label(ways[0], ways[:1]) == "oneshot"
    assert row_label(make_cell("dpf", 0.875, 1.0, **{"finetune.epochs": 60})) == "87.5 % finetune.epochs=60"


def test_the_lowest_perplexity_is_best():
    low, high = (make_cell("dpf", 0.8, mean, measure="perplexity") for mean in (20.0, 30.0))
    assert "★" in format_cell(low, [low, high])
    assert "★" not in format_cell(high, [low, high])
