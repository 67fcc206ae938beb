"""A run that a table needs: its recipe, the run that it starts from, and where it is found."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from ..recipes.recipe import Recipe
from ..runs import retrain
from ..sweeps.axes import SweepRun, run_folder
from ..sweeps.run_store import RunStore, StoredRun


@dataclass(frozen=True)
class TableRun:
    """One run of a table; it may start from the weights of another run, or retrain the mask of another run."""

    recipe: Recipe  # of a retraining: the recipe of the run that found the mask
    parent: TableRun | None = None  # the run it starts from
    retraining: tuple[str, str] | None = None  # initial weights and budget, where the parent's mask is retrained

    @functools.cached_property
    def key(self) -> tuple[str, ...]:
        """A key that is equal for equal runs of different tables."""
        return self.recipe.fingerprint(), *(self.retraining or ())

    @property
    def name(self) -> str:
        """The name of the run."""
        return "-retrain-".join([self.recipe.name, *([self.retraining_name] if self.retraining else [])])

    @property
    def retraining_name(self) -> str:
        """The name of a kind of retraining: "init", "init-flops"."""
        start, budget = self.retraining or ("", "")
        return start + "-flops" * (budget == "flops")

    def find_covering_run(self, store: RunStore) -> StoredRun | None:
        """Return the finished run that contains this one: itself, or a run that continues with fine-tuning."""
        if self.retraining is not None:
            return store.retrained.get((store.recorded_fingerprint(self.recipe), self.retraining_name))
        return store.find_covering_run(self.linked_recipe(store))

    def find_result(self, store: RunStore) -> StoredRun | None:
        """Return the finished run; of a run that continues with fine-tuning the part before it."""
        run = self.find_covering_run(store)
        return run if run is None or self.retraining is not None else store.find_result(self.linked_recipe(store))

    def find_folder(self, store: RunStore) -> Path | None:
        """Return the folder in which the run is complete or was begun."""
        run = self.find_covering_run(store)
        if run is not None:
            return run.folder
        return None if self.retraining is not None else store.find_folder(self.linked_recipe(store))

    def state(self, store: RunStore) -> str:
        """Return "complete", "begun" or "missing"."""
        if self.find_covering_run(store) is not None:
            return "complete"
        return "missing" if self.find_folder(store) is None else "begun"

    def linked_recipe(self, store: RunStore) -> Recipe:
        """Return the recipe with the fingerprint of its parent, and the parent's folder where that is known."""
        if self.parent is None or self.retraining is not None:
            return self.recipe
        parent = self.parent.linked_recipe(store)
        folder = store.find_folder(parent)
        known = {} if folder is None else {"run": str(folder.resolve())}
        fingerprint = store.recorded_fingerprint(parent)
        return replace(self.recipe, origin=replace(self.recipe.origin, fingerprint=fingerprint, **known))

    def to_sweep_run(self, store: RunStore, out: Path) -> SweepRun | None:
        """Return the run to train, in its old folder or below `out`; None as long as its parent has no weights."""
        recipe = self.linked_recipe(store)
        if self.parent is not None:
            parent = store.find_folder(self.parent.linked_recipe(store), complete=True)
            if parent is None:
                return None
            if self.retraining is not None:
                recipe, _ = retrain.prepare_retraining(parent, *self.retraining)
        return SweepRun(recipe, store.find_folder(recipe) or run_folder(out, recipe), {})


def missing_parents(run: TableRun, store: RunStore) -> list[TableRun]:
    """Return the runs that must be trained before a run, since their weights are not present."""
    if run.parent is None or store.find_folder(run.parent.linked_recipe(store), complete=True) is not None:
        return []
    return [*missing_parents(run.parent, store), run.parent]
