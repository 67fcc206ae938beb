"""The command group `pomona bound`."""

from __future__ import annotations

import typer

from ..application import CommandGroup, app

bound = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode=None,
    help="Compute the bounds of the papers, or certify a trained network.\n\nErrors, sparsities and widths by theorem.",
)
app.add_typer(bound, name="bound")
