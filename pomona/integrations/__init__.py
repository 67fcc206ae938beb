"""Callbacks that prune in the trainers of other libraries. Each module needs its library and is imported by name."""
