"""The commands and the code of docs/report.md run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pomona.cli import main

pytest.importorskip("plotly")
PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")


def test_the_commands_and_the_code_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ pomona (.+)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)) == 0, capsys.readouterr().err
    capsys.readouterr()
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == shown
    assert sorted(file.name for file in tmp_path.glob("*.html")) == ["first.html", "report.html", "reported.html"]


def test_the_pictures_of_the_page_are_there():
    names = re.findall(r"!\[[^]]+\]\((.+?)\)", PAGE)
    assert names == ["report.png", "report-dark.png"]
    assert all((Path(__file__).parents[2] / "docs" / name).read_bytes().startswith(b"\x89PNG") for name in names)
