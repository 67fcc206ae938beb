"""Every Python block of README.md and docs/ runs as it stands there, and every `pomona` command exists."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from code_blocks import Block, read_blocks, read_commands, run_blocks

from pomona.cli import main
from pomona.compressors import COMPRESSORS
from pomona.errors import PomonaError
from pomona.methods import METHODS  # registers all of them, before a test stores what is registered
from pomona.patterns import PATTERNS
from pomona.schedules import SCHEDULES

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
# Pages whose code is run by a test that also checks what it computes.
RUN_ELSEWHERE = {
    "docs/integrations.md": "tests/integrations/test_integrations_page.py",
    "docs/convergence.md": "tests/theory/test_theory_convergence.py",
    "docs/privacy.md": "tests/benchmarks/test_privacy_page.py",
    "docs/theory.md": "tests/benchmarks/test_theory_page.py",
}


def read_page(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def pages_with(language: str) -> list[object]:
    """Return the pages that have a block in a language, with the slow ones marked."""
    found = []
    for page in PAGES:
        text = read_page(page)
        if any(block.language == language for block in read_blocks(text)):
            marks = [pytest.mark.slow] if "<!-- test: slow -->" in text else []
            found.append(pytest.param(page, marks=marks, id=page))
    return found


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a new folder from which modules can be imported, and forget what was registered or imported there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    registries = (METHODS, PATTERNS, SCHEDULES, COMPRESSORS)
    before = [dict(registry._specs) for registry in registries]
    try:
        yield tmp_path
    finally:
        for registry, specs in zip(registries, before, strict=True):
            registry._specs = specs
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[name]


@pytest.mark.parametrize("page", pages_with("python"))
def test_the_python_blocks_of_a_page_run(page: str, scratch: Path) -> None:
    if page in RUN_ELSEWHERE:
        assert Path(page).stem in read_page(RUN_ELSEWHERE[page])
        pytest.skip(f"run by {RUN_ELSEWHERE[page]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages; blocks say what they print, not what they warn about
        try:
            run_blocks(read_blocks(read_page(page)), Path(page).stem, scratch)
        except (ModuleNotFoundError, PomonaError) as error:
            if isinstance(error, PomonaError) and "pip install 'pomona[" not in str(error):
                raise
            if getattr(error, "name", "") and str(error.name).startswith("pomona"):
                raise
            pytest.skip(f"needs an extra: {error}")


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command and all of its options are known: `--help` is answered after the options are parsed."""
    for command in read_commands(read_blocks(read_page(page))):
        arguments = [word for word in shlex.split(command) if word not in ("|", ">")]
        if "--plugin" in arguments:  # a module of the reader
            del arguments[arguments.index("--plugin") : arguments.index("--plugin") + 2]
        assert main([*arguments, "--help"]) == 0, f"pomona {command}: {capsys.readouterr().err}"


def test_commands_that_do_not_exist_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits-dpf", "--epochs-of-mine", "3", "--help"]) != 0
    assert main(["polish", "--help"]) != 0


# ---- the reader of blocks


def test_blocks_have_the_output_and_the_comments_around_them() -> None:
    text = (
        "# Page\n\n<!-- setup\nx = 1\n-->\n```python\nprint(x)\n```\n\n```\n1\n```\n\nText.\n\n```\npomona table\n```\n"
        "<!-- file: a.toml -->\n\n```toml\nb = 2\n```\n<!-- compile only: needs CUDA -->\n```python\nboom()\n```\n"
    )
    assert read_blocks(text) == [
        Block("print(x)\n", "python", setup="x = 1\n", shown="1\n"),
        Block("pomona table\n"),
        Block("b = 2\n", "toml", file="a.toml"),
        Block("boom()\n", "python", compile_only=True),
    ]


def test_blocks_share_a_namespace_and_write_their_files(tmp_path: Path) -> None:
    blocks = [
        Block("y = x + 1\n", "python", setup="x = 1"),
        Block("z = y + 1\nprint(z)\n", "python", shown="3\n"),
        Block("raise SystemExit\n", "python", file="stop.py"),
        Block("raise SystemExit\n", "python", compile_only=True),
    ]
    assert run_blocks(blocks, "page", tmp_path)["z"] == 3
    assert (tmp_path / "stop.py").read_text() == "raise SystemExit\n"


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (Block("print(2)\n", "python", shown="3\n"), AssertionError),
        (Block("undefined\n", "python"), NameError),
        (Block("def f(:\n", "python", compile_only=True), SyntaxError),
    ],
)
def test_a_block_that_is_wrong_fails(block: Block, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error):
        run_blocks([block], "page", tmp_path)


def test_commands_lose_their_prompt_and_their_remarks() -> None:
    block = Block("$ pomona train a.toml --set x=1\npomona table  shows it\npomona data # lists\nmake demo\n")
    assert list(read_commands([block])) == ["train a.toml --set x=1", "table", "data"]
