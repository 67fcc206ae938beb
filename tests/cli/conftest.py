"""Fixtures of the tests of the command line: an empty working directory, and a function that runs a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from cli_helpers import SMALL_RECIPE, read_files

from pomona.cli import main


@pytest.fixture(autouse=True)
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory with a small recipe, where no data but the digits is found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POMONA_DATA", raising=False)
    monkeypatch.delenv("POMONA_TRACEBACK", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("small.toml").write_text(SMALL_RECIPE)
    return tmp_path


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]):
    """Return a function that runs a command and returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def assert_refused(run_command, work_folder: Path):
    """Return a function that asserts that a command exits with code 2 and one sentence, and writes nothing."""

    def check(arguments: Sequence[str], expected: str) -> None:
        before = read_files(work_folder)
        code, out, err = run_command(*arguments)
        assert (code, out) == (2, "")
        assert expected in err
        assert err.count("\n") == 1
        assert read_files(work_folder) == before

    return check
