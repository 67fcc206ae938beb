"""The engine: what is pruned, the masks, and the two hooks on the optimizer's step."""
