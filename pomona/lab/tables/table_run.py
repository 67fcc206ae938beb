"""A run that a table needs: its recipe, the runs that it starts or learns from, and where it is found."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ..recipes.recipe import Recipe
from ..runs import retrain
from ..sweeps.axes import SweepRun, run_folder
from ..sweeps.run_store import RunStore, StoredRun


@dataclass(frozen=True)
class TableRun:
    """One run of a table; it may start from another run's weights, retrain its mask, or learn from its outputs."""

    recipe: Recipe  # of a retraining: the recipe of the run that found the mask
    parent: TableRun | None = None  # the run it starts from
    retraining: tuple[str, str] | None = None  # initial weights and budget, where the parent's mask is retrained
    teacher: TableRun | None = None  # the run it learns from

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
        """Return the recipe with the fingerprints of its parent and its teacher, and the parent's folder if known."""
        if self.retraining is not None:
            return self.recipe
        recipe = self.recipe
        if self.teacher is not None:
            learned_from = self.teacher.linked_recipe(store).fingerprint()
            recipe = replace(recipe, teacher=replace(recipe.teacher, fingerprint=learned_from))
        if self.parent is None:
            return recipe
        parent = self.parent.linked_recipe(store)
        folder = store.find_folder(parent)
        known = {} if folder is None else {"run": str(folder.resolve())}
        fingerprint = store.recorded_fingerprint(parent)
        return replace(recipe, origin=replace(recipe.origin, fingerprint=fingerprint, **known))

    def to_sweep_run(
        self, store: RunStore, out: Path, planned: Mapping[tuple[str, ...], Path] = MappingProxyType({})
    ) -> SweepRun | None:
        """Return the run to train, in its old folder or below `out`; None as long as its parent has no weights.

        `planned` has the folders, by key, of runs that are trained in the same sweep. Its teacher may be one of them.
        """
        recipe = self.linked_recipe(store)
        if self.parent is not None:
            parent = store.find_folder(self.parent.linked_recipe(store), complete=True)
            if parent is None:
                return None
            if self.retraining is not None:
                recipe, _ = retrain.prepare_retraining(parent, *self.retraining)
        if self.teacher is not None:
            trained = store.find_folder(self.teacher.linked_recipe(store), complete=True)
            folder = planned.get(self.teacher.key) if trained is None else trained
            if folder is None:
                return None
            recipe = replace(recipe, teacher=replace(recipe.teacher, run=str(folder.resolve())))
        return SweepRun(recipe, store.find_folder(recipe) or run_folder(out, recipe), {})


def missing_parents(run: TableRun, store: RunStore) -> list[TableRun]:
    """Return the runs that must be trained before a run, since their weights are not present."""
    return [
        needed
        for one in (run.parent, run.teacher)
        if one is not None and store.find_folder(one.linked_recipe(store), complete=True) is None
        for needed in [*missing_parents(one, store), one]
    ]
