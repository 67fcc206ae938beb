"""The command group `pomona bound`."""

from __future__ import annotations

import typer

from ..application import CommandGroup, app

bound = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode=None,
    help="Compute the bounds of the papers: errors, sparsities and widths, and a certificate for a trained network.",
)
app.add_typer(bound, name="bound")
