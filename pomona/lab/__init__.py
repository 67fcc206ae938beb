"""The laboratory: recipes, runs that can be resumed, sweeps of runs, and tables of their results.

recipe = Recipe.load("recipes/digits.toml", ["method.sparsity=0.95"])
summary = train(recipe, "runs/digits")
"""

from .recipes.recipe import Recipe
from .runs.environment import facts
from .runs.evaluate import accuracy, reestimate_batchnorm
from .runs.run import Interrupted, plan, train

__all__ = ["Interrupted", "Recipe", "accuracy", "facts", "plan", "reestimate_batchnorm", "train"]
