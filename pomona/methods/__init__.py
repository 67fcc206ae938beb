"""One file a method. `pm.DPF(**options)` is a pruner that holds a frozen record of the method."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from ..core.method import METHODS, Method, method
from ..core.pruner import Pruner
from ..registry import build_spec
from . import dpf, dsr, edge_popup, finetune, incremental, iterand, lottery, oneshot, rigl, sfp, snip, sparse_momentum
from . import random_mask as random
from . import sparse_evolutionary as set

__all__ = [
    "DPF",
    "DSR",
    "METHODS",
    "SET",
    "SFP",
    "SNIP",
    "EdgePopup",
    "Finetune",
    "Incremental",
    "IteRand",
    "Lottery",
    "Method",
    "OneShot",
    "Random",
    "RigL",
    "SparseMomentum",
    "constructor",
    "method",
    "pruner",
]


def pruner(choice: Any) -> Pruner:
    """A pruner from a method's record, or any other spelling of it: "dpf(sparsity=0.9)"."""
    record = METHODS.resolve(choice)
    return lottery.Rounds(record) if isinstance(record, lottery.Lottery) else Pruner(record)


def constructor(record: type[Method]) -> Callable[..., Pruner]:
    """The public face of a method: takes its options, gives a pruner."""

    def make(**options: Any) -> Pruner:
        return pruner(build_spec(record, "method", options))

    fields = [f for f in dataclasses.fields(record) if f.init]
    make.__name__ = make.__qualname__ = record.__name__
    make.__doc__ = record.__doc__
    make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in fields],
        return_annotation=Pruner,
    )
    return make


DPF = constructor(dpf.DPF)
DSR = constructor(dsr.DSR)
EdgePopup = constructor(edge_popup.EdgePopup)
Finetune = constructor(finetune.Finetune)
Incremental = constructor(incremental.Incremental)
IteRand = constructor(iterand.IteRand)
Lottery = constructor(lottery.Lottery)
OneShot = constructor(oneshot.OneShot)
Random = constructor(random.Random)
RigL = constructor(rigl.RigL)
SET = constructor(set.SET)
SFP = constructor(sfp.SFP)
SNIP = constructor(snip.SNIP)
SparseMomentum = constructor(sparse_momentum.SparseMomentum)
