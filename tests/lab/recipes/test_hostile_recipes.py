"""Recipes, settings, sweeps and tables of strangers: refused with one sentence before anything is built."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pomona.errors import PomonaError
from pomona.lab import Recipe
from pomona.lab.sweeps.axes import expand_runs
from pomona.lab.tables.definitions import load_table

SMALL: dict[str, Any] = {"data": "digits", "model": "mlp", "method": "dpf"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.hidden=[" + "1, " * 50_000 + "1]", "hidden takes at most 1,000 widths, got 50,001"),
        ("model.hidden=[" + "[" * 500 + "]" * 501, "nested more than 64 deep"),
        (".".join("a" * 9) + "=1", "has 9 parts, at most 8 are read"),
        ("seed=" + "9" * 5000, "the setting .* is damaged: Exceeds the limit"),
        ("method=dpf(" + "(" * 300, r"is not of the form name\(option=value"),
        ("method=dpf({[]: 1})", r"is not of the form name\(option=value"),
        ("method=" + "x(" * 20_000, r"is not of the form name\(option=value"),
        ("method.name=[]", "unknown method"),
        ("method.pattern={name = []}", "unknown pattern"),
        ("model.name=[1]", "model needs a name"),
        ("rate.milestones=[0.5, 'x']", "a milestone is a whole epoch"),
        ("optimizer.name=" + "x" * 100_000, "unknown optimizer"),
    ],
    ids=lambda value: value[:20],
)
def test_a_hostile_setting_is_refused_with_one_short_sentence(setting: str, message: str):
    start = time.process_time()
    with pytest.raises(PomonaError, match=message) as caught:
        Recipe.load(SMALL, [setting])
    assert len(str(caught.value)) < 2500
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a." * 50_000 + "a = 1", "is not valid TOML: it is nested more than 64 deep"),
        ("x = " + "[" * 10_000, "is not valid TOML: it is nested more than 64 deep"),
        ("#" * 300_000, "has 300,000 bytes, and at most 262,144 are read"),
        ("x = " + "9" * 5000, "is not valid TOML: Exceeds the limit"),
        ("\x00", "is not valid TOML"),
    ],
    ids=["keys", "lists", "size", "digits", "null"],
)
def test_a_hostile_file_is_refused_by_its_name(tmp_path: Path, text: str, message: str):
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(PomonaError, match=rf"recipe\.toml' {message}"):
        Recipe.load(file)


def test_a_sweep_and_a_table_have_limits(tmp_path: Path):
    axes = {f"data.{key}": list(range(100)) for key in "abc"}
    with pytest.raises(PomonaError, match="more than 100,000 combinations"):
        expand_runs(SMALL, axes, tmp_path)
    table = tmp_path / "table.toml"
    rows = ", ".join(f'"method.{key}" = {list(range(30))}' for key in "abcd")
    table.write_text(
        f'[columns]\ndense = {{ method = "dense" }}\n[[part]]\nlabel = "A"\nrows = {{ {rows} }}\n'
        'recipe = { data = "digits", model = "mlp" }\n'
    )
    with pytest.raises(PomonaError, match="more than 10,000 combinations"):
        load_table(table)
