"""The command line: parses, calls the library, prints.

What a program wants goes to stdout, what a person is told on the way to stderr. Bad input is one
sentence and exit code 2, Ctrl-C is 130, anything unforeseen 1.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from pomona.errors import PomonaError, unknown_name_error
from pomona.version import __version__

RUNS = Path("runs")
DEMO = RUNS / "demo"


class Commands(TyperGroup):
    """The commands; a misspelt one is answered with the nearest."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None:
            raise unknown_name_error("command", cmd_name, self.list_commands(ctx))
        return command


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of a table.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="FOLDER", help="Look for data here, before $POMONA_DATA and the user's cache."),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    warnings.showwarning = lambda message, *_, **__: note(str(message))
    try:
        return int(app(arguments, prog_name="pomona", standalone_mode=False) or 0)
    except Exception as error:
        if os.environ.get("POMONA_TRACEBACK"):
            raise
        code, sentence = explain(error)
        say(f"error: {sentence}")
        return code


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and sentence for what went wrong."""
    if isinstance(error, PomonaError):
        return 2, str(error)
    if hasattr(error, "format_message"):  # the parser's own; typer has it from click or brings it along
        return 2, error.format_message()
    if isinstance(error, typer.Abort):
        return 130, "interrupted."
    reason = str(error).strip().split("\n")[0]
    what = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return 1, f"this should not happen ({what}); set POMONA_TRACEBACK=1 to see where it comes from."


def say(sentence: str) -> None:
    """Tell a person, on one line of stderr."""
    print(" ".join(sentence.split()), file=sys.stderr, flush=True)


def note(sentence: str) -> None:
    """Tell a person what is no error but should be known."""
    say(f"note: {sentence}")


def show(value: Any) -> None:
    """Print a table for a person."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(value)


def dump(value: Any) -> None:
    """Print a value for a program."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def facts(values: Mapping[str, Any]) -> Table:
    """Names and values, one a line."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for key, value in values.items():
        table.add_row(Text(key, style="bold"), Text(str(value)))
    return table


@app.callback(invoke_without_command=True)
def pomona(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Sparse neural networks: train them, compare ways to prune them, see what is left.

    Begin with `pomona demo`. Every command takes --json for a program, and --help.
    """
    if version:
        print(f"pomona {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
