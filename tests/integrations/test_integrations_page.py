"""The code of docs/integrations.md runs and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
PYTHON_WITH_OUTPUT = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)


@pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore::Warning:accelerate")
def test_the_code_of_the_page_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", "lightning", "accelerate"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "integrations"}
    blocks = PYTHON_WITH_OUTPUT.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 6
    for code, shown in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        if shown:
            assert printed.getvalue() == shown
