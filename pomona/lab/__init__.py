"""The laboratory: recipes, runs that can be resumed, sweeps of runs, and tables of their results.

recipe = Recipe.load("recipes/digits.toml", ["method.sparsity=0.95"])
summary = train(recipe, "runs/digits")
"""

from .recipes.recipe import Recipe
from .runs.environment import describe_environment
from .runs.evaluate import accuracy, reestimate_batchnorm
from .runs.interruption import Interrupted
from .runs.train import describe_run, train

__all__ = ["Interrupted", "Recipe", "accuracy", "describe_environment", "describe_run", "reestimate_batchnorm", "train"]
