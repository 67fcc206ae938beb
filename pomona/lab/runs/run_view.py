"""A run as a table, for terminals and notebooks: what it trains, and the figures it has so far."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from pomona.registry import format_plain_data
from pomona.table_view import TableView

from ..recipes.recipe import Recipe

SHOWN_OPTIONS = ("sparsity", "pattern", "allocation")  # of the method
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


class RunView(TableView):
    """Base of a run that is shown as a table: the choices of its recipe, and its figures."""

    recipe: Recipe

    @property
    def status(self) -> str:
        """How far the run has come, in words, and where it is."""
        raise NotImplementedError

    @property
    def figures(self) -> Mapping[str, Any]:
        """The figures that the run has; those in `FIGURES` are shown."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.recipe.name}, {self.status}>"

    def __rich__(self) -> Table:
        method = {key: self.recipe.method[key] for key in SHOWN_OPTIONS if key in self.recipe.method}
        rows = {"data": self.recipe.data.name, "model": self.recipe.model["name"], "method": self.recipe.method["name"]}
        rows |= {f"method.{key}": format_plain_data(value, str) for key, value in method.items()}
        rows["seed"] = str(self.recipe.seed)
        found = {key: self.figures.get(key) for key in FIGURES}
        rows |= {key: FIGURES[key].format(value) for key, value in found.items() if value is not None}
        table = Table("run", self.recipe.name, title=self.status)
        for row in rows.items():
            table.add_row(*row)
        return table


class TrainingRunView(RunView):
    """The view of a run in training, whose figures are those of its last complete stage."""

    step: int
    total_steps: int
    folder: Path
    stage_results: list[dict[str, Any]]

    @property
    def status(self) -> str:
        return f"step {self.step} of {self.total_steps}, in {self.folder}"

    @property
    def figures(self) -> Mapping[str, Any]:
        return self.stage_results[-1] if self.stage_results else {}
