"""Convolutional networks that run in one native call: the steps of a traced model, their plan, and the model's forward.

`convert.py` turns the begin of a model's graph into steps, and `plan.py` puts them and their memory into the form that
`cpu/network_kernels.c` runs. `model_plans.py` keeps the plans of a model for several image shapes, `snapshot.py` tells
when it has changed, by one native call where it has not (`native_snapshot.py`), `gradients.py` has its gradients, and
`forward.py` gives it the forward that uses all of this.
"""

from __future__ import annotations

from .forward import PlannedForward, copy_without_plan, find_shape, is_planned, plan_copy, plan_network

__all__ = ["PlannedForward", "copy_without_plan", "find_shape", "is_planned", "plan_copy", "plan_network"]
