"""The recipes and tables of the IteRand paper: settings, published figures and shared runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pomona.lab import Recipe
from pomona.lab.tables.definitions import load_table

RECIPES = Path(__file__).parents[2] / "recipes"
TABLES = [f"iterand-table{n}" for n in range(3, 11)] + ["iterand-figure1", "iterand-figure2", "iterand-options"]


@pytest.mark.parametrize("name", ["conv6", "resnet18", "resnet50", "imdb", "openlth", "digits"])
def test_recipes_train_only_scores(name: str) -> None:
    recipe = Recipe.load(RECIPES / f"iterand-{name}.toml")
    assert recipe.method["name"] == "iterand"
    assert recipe.model.get("affine", False) is False
    assert not getattr(recipe.optimizer, "nesterov", False)


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_well_formed(name: str) -> None:
    table = load_table(RECIPES / f"{name}.toml")
    for cell in table.cells:
        for run in cell.runs:
            method, model = run.recipe.method["name"], run.recipe.model
            assert method in ("iterand", "edge_popup", "dense", "lottery")
            assert model.get("affine", False) == (method in ("dense", "lottery") and "affine" in model)


def test_table_3_has_the_settings_and_figures_of_the_paper() -> None:
    table = load_table(RECIPES / "iterand-table3.toml")
    assert len(table.cells) == 3 * 4 * 5
    cells = {(e.label, e.column, e.runs[0].recipe.model["rho"]): e for e in table.cells}
    assert cells["Conv6", "IteRand SC", 1.0].paper == "88.80 ± 0.20"
    assert cells["Conv6", "edge-popup KU", 1.0].paper == "86.14 ± 0.37"
    assert cells["ResNet-18", "IteRand SC", 0.5].paper == "90.50 ± 0.36"
    assert cells["ResNet-34", "SGD KU", 2.0].paper == "95.33 ± 0.10"
    sparsities = {(e.label, e.column[:7]): e.runs[0].recipe.method.get("sparsity") for e in table.cells}
    assert {sparsities[label, "IteRand"] for label in ("ResNet-18", "ResNet-34")} == {0.6}
    assert sparsities["Conv6", "edge-po"] == 0.5
    rates = {(e.label, e.column): e.runs[0].recipe.optimizer.lr for e in table.cells}
    assert (rates["Conv6", "SGD KU"], rates["Conv6", "edge-popup SC"], rates["ResNet-18", "SGD KU"]) == (0.01, 0.3, 0.1)
    assert all(run.recipe.data.validation == 5000 for e in table.cells for run in e.runs)


def test_tables_share_their_runs() -> None:
    runs = {name: {run.key for run in load_table(RECIPES / f"{name}.toml").runs()} for name in TABLES}
    assert runs["iterand-table5"] <= runs["iterand-table3"]
    assert len(runs["iterand-table8"] & runs["iterand-table3"]) == 12
    assert len(runs["iterand-figure2"] & runs["iterand-figure1"]) == 4
