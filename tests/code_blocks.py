"""Read the code blocks of Markdown pages, and run those in Python as a reader would: one after another.

An HTML comment before a block, which no reader sees, says what a test needs to know:

    <!-- setup                      code that runs before the block: the page's model, a stand-in for a large file
    model = ...
    -->
    <!-- file: my_pruning.py -->    the block is a file: it is written to the folder, not run
    <!-- compile only: reason -->   the block cannot run here: it is only compiled
    <!-- test: slow -->             anywhere: the page takes long
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent
from typing import Any

TOKEN = re.compile(r"<!--(?P<comment>.*?)-->|^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$", re.S | re.M)
COMMAND = re.compile(r"^(?:\$ )?pomona( .+)$", re.M)


@dataclass(frozen=True)
class Block:
    """A code block of a page, with what the comments before it say."""

    code: str
    language: str = ""
    setup: str = ""  # hidden code that runs first
    file: str = ""  # the name under which the block is written, instead of being run
    compile_only: bool = False
    shown: str | None = None  # the output on the page, right behind the block


def read_blocks(text: str) -> list[Block]:
    """Return the code blocks of a page in order. A block without a language right behind a Python one is its output."""
    blocks: list[Block] = []
    coming, end = Block(""), -1
    for token in TOKEN.finditer(text):
        if (comment := token["comment"]) is not None:
            coming = read_comment(comment, coming)
            continue
        code, language = dedent(token["code"]), token["language"]
        if not language and blocks and blocks[-1].language == "python" and not text[end : token.start()].strip():
            blocks[-1] = replace(blocks[-1], shown=code)
        else:
            blocks.append(replace(coming, code=code, language=language))
        coming, end = Block(""), token.end()
    return blocks


def read_comment(comment: str, coming: Block) -> Block:
    """Return the block to come with what an HTML comment says about it."""
    word, _, rest = comment.strip().partition("\n" if comment.strip().startswith("setup\n") else ":")
    match word:
        case "setup":
            return replace(coming, setup=coming.setup + rest + "\n")
        case "file":
            return replace(coming, file=rest.strip())
        case "compile only":
            return replace(coming, compile_only=True)
    return coming


def run_blocks(blocks: list[Block], name: str, folder: Path) -> dict[str, Any]:
    """Run the Python blocks of a page in one namespace, write its files to `folder`, and return the namespace.

    Raise AssertionError where what a block prints does not end with what the page shows: packages may report before it.
    """
    names: dict[str, Any] = {"__name__": name}
    for number, block in enumerate(blocks, 1):
        exec(compile_block(block.setup, f"{name}, setup of block {number}"), names)
        if block.file:
            (folder / block.file).write_text(block.code, encoding="utf-8")
        if block.language != "python":
            continue
        code = compile_block(block.code, f"{name}, block {number}")
        if block.file or block.compile_only:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        if block.shown is not None:
            assert printed.getvalue().endswith(block.shown), f"block {number} of {name} prints {printed.getvalue()!r}"
    return names


def compile_block(code: str, name: str) -> Any:
    """Compile code without the future statements of this module."""
    return compile(code, name, "exec", dont_inherit=True)


def read_commands(blocks: list[Block]) -> Iterator[str]:
    """Yield the arguments of every `pomona …` command in the blocks, without the remark behind it."""
    for block in blocks:
        if block.language in ("", "console", "sh", "bash", "shell"):
            for arguments in COMMAND.findall(block.code.replace("\\\n", " ")):
                yield re.split(r"\s{2,}|\s#", arguments.strip())[0]
