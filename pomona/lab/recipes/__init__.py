"""Recipes: every setting that decides a run, the optimizers, and the files that ship with Pomona."""
