"""Convolutional networks that run in one native call: the steps of a traced model, their plan, and the model's forward.

`convert.py` turns the begin of a model's graph into steps, `plan.py` puts them and their memory into the form that
`cpu/network_kernels.c` runs, and `forward.py` gives a model the forward that uses it.
"""

from __future__ import annotations

from .forward import PlannedForward, copy_without_plan, is_planned, plan_copy, plan_network

__all__ = ["PlannedForward", "copy_without_plan", "is_planned", "plan_copy", "plan_network"]
