"""Sweeps: train a grid of recipes, in processes or concurrently on one GPU, and collect the results."""
