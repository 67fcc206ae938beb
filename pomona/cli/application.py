"""The command-line application: the group of commands, and exit codes for errors.

Bad input prints one sentence and exits with code 2, Ctrl-C exits with 130, an unexpected error with 1.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pomona.errors import PomonaError, unknown_name_error
from pomona.version import __version__

from .bad_values import describe_parser_error
from .output import print_note, print_status


class CommandGroup(TyperGroup):
    """A group of commands that answers an unknown command with the nearest known name."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name; raise PomonaError where there is none."""
        command = super().get_command(ctx, cmd_name)
        if command is None:
            raise unknown_name_error("command", cmd_name, self.list_commands(ctx))
        return command


app = typer.Typer(cls=CommandGroup, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    warnings.showwarning = lambda message, *_, **__: print_note(str(message))
    try:
        return int(app(arguments, prog_name="pomona", standalone_mode=False) or 0)
    except Exception as error:
        if os.environ.get("POMONA_TRACEBACK"):
            raise
        code, sentence = describe_error(error)
        print_status(f"error: {sentence}")
        return code


def add_plugins(modules: Sequence[str]) -> None:
    """Import the user's modules; the laboratory, which does it, is imported only where there are any."""
    if modules or os.environ.get("POMONA_PLUGINS"):
        from pomona.lab.recipes import plugins

        plugins.add_plugins(modules)


def describe_error(error: Exception) -> tuple[int, str]:
    """Return the exit code and the sentence for an exception."""
    if isinstance(error, PomonaError):
        return 2, str(error)
    if hasattr(error, "format_message"):  # an error of the argument parser
        return 2, describe_parser_error(error)
    if isinstance(error, typer.Abort):
        return 130, "interrupted."
    reason = str(error).strip().split("\n")[0]
    what = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return 1, f"unexpected error ({what}); set POMONA_TRACEBACK=1 to see the traceback."


@app.callback(invoke_without_command=True)
def pomona(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Import a module that registers methods, patterns or models; repeatable."),
    ] = None,
) -> None:
    """Train sparse neural networks, compare pruning methods and measure what remains.

    Start with `pomona demo`. Every command accepts --json for machine-readable output, and --help.
    """
    if version:
        print(f"pomona {__version__}")
        raise typer.Exit
    add_plugins(plugin or [])
    if context.invoked_subcommand is None:
        print(context.get_help())
