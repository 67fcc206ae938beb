"""One file a method. `pm.DPF(**options)` is a pruner that holds a frozen record of the method."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from ..core.method import METHODS, Method, method
from ..core.pruner import Pruner
from ..core.registry import build
from . import dpf, incremental, oneshot, random

__all__ = ["DPF", "METHODS", "Incremental", "Method", "OneShot", "Random", "constructor", "method", "pruner"]


def pruner(choice: Any) -> Pruner:
    """A pruner from a method's record, or any other spelling of it: "dpf(sparsity=0.9)"."""
    return Pruner(METHODS.make(choice))


def constructor(record: type[Method]) -> Callable[..., Pruner]:
    """The public face of a method: takes its options, gives a pruner."""

    def make(**options: Any) -> Pruner:
        return Pruner(build(record, "method", options))

    fields = [f for f in dataclasses.fields(record) if f.init]
    make.__name__ = make.__qualname__ = record.__name__
    make.__doc__ = record.__doc__
    make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in fields],
        return_annotation=Pruner,
    )
    return make


DPF = constructor(dpf.DPF)
Incremental = constructor(incremental.Incremental)
OneShot = constructor(oneshot.OneShot)
Random = constructor(random.Random)
