"""The GPUs of this machine, shared out to the processes of a sweep.

A process sees one GPU, by the environment variable CUDA_VISIBLE_DEVICES, so that a recipe for `cuda` needs no change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..recipes.recipe import Recipe

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as the variable names them: by index or by UUID."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def assignable_gpus(recipes: Sequence[Recipe]) -> list[str]:
    """Return the GPUs that processes may share out; none where a recipe is for the CPU or for one certain GPU."""
    anywhere = ("auto", "cuda") if torch.cuda.is_available() else ()
    return visible_gpus() if all(recipe.train.device in anywhere for recipe in recipes) else []


def use_gpu(name: str) -> None:
    """Let this process see one GPU only; CUDA must not have been used yet."""
    os.environ[VARIABLE] = name
