"""Stored recipes that lost their end: they are known as such, and never read as another recipe."""

from __future__ import annotations

import pytest

from pomona.errors import PomonaError
from pomona.lab import Recipe
from pomona.lab.recipes.private_recipe import PrivateRecipe
from pomona.lab.recipes.stored_text import CutRecipe, is_whole, mark_end

PRIVATE = {"name": "größe", "data": "digits", "model": "mlp(hidden=[8])", "private": {"epsilon": 8.0, "secure": True}}


def test_a_private_recipe_that_was_cut_anywhere_is_never_a_plain_one(tmp_path):
    file = tmp_path / "recipe.toml"
    whole = mark_end(PrivateRecipe.load(PRIVATE).to_toml())
    file.write_bytes(whole)
    assert is_whole(file)
    assert PrivateRecipe.load(file).private.epsilon == 8.0
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert not is_whole(file)
        for read in (Recipe.load, Recipe.load_stored, PrivateRecipe.load):
            with pytest.raises(CutRecipe, match=f"was cut off after {size} bytes: to go on, give the recipe"):
                read(file)


def test_recipes_without_the_marks_are_read(tmp_path):
    file = tmp_path / "recipe.toml"
    assert not is_whole(file)
    made = Recipe.load({"name": "recipe", "data": "digits", "model": "mlp"})
    file.write_text(made.to_toml())  # as earlier versions and users write it
    assert is_whole(file)
    assert Recipe.load(file) == made
    file.write_bytes(mark_end(made.to_toml()) + b"[sweep]\nseed = [0, 1]\n")  # a copy with more lines
    assert Recipe.load(file) == made
    file.write_bytes(b"[data\n")
    with pytest.raises(PomonaError, match="is not valid TOML"):
        Recipe.load(file)
