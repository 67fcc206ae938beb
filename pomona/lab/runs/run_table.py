"""A run as a table: what it trains, and the figures it has so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from pomona.registry import format_option

from ..recipes.recipe import Recipe

# The figures of a summary or of a stage's result that are shown, with their formats; accuracies are in per cent.
FIGURES = {
    "accuracy": "{:.2f} %",
    "perplexity": "{:.2f}",
    "sparsity": "{:.2%}",
    "zeros": "{:.2%}",
    "params": "{:,}",
    "nonzeros": "{:,}",
    "macs": "{:,}",
    "macs_left": "{:,}",
    "epoch": "{}",
    "seconds": "{:,.0f}",
}


def run_table(recipe: Recipe, status: str, figures: Mapping[str, Any]) -> Table:
    """Return the choices of a recipe, and the figures that a run of it has."""
    method = {key: recipe.method[key] for key in ("sparsity", "pattern", "allocation") if key in recipe.method}
    choices = {"data": recipe.data.name, "model": recipe.model["name"], "method": recipe.method["name"]}
    choices |= {f"method.{key}": format_option(value) for key, value in method.items()} | {"seed": str(recipe.seed)}
    table = Table("run", recipe.name, title=status)
    for key, value in choices.items():
        table.add_row(key, value)
    for key, shown in FIGURES.items():
        if figures.get(key) is not None:
            table.add_row(key, shown.format(figures[key]))
    return table
