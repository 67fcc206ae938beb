"""Pruning methods, one file each. `pm.DPF(0.9, …)` returns a pruner that holds a frozen record of the method."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from ..core.method import METHODS, Method, method
from ..core.pruner import Pruner
from ..errors import require
from ..registry import bind_arguments, build_spec, spec_options
from . import (
    acdc,
    dpf,
    dsr,
    edge_popup,
    feather,
    finetune,
    incremental,
    iterand,
    lottery,
    oneshot,
    random_mask,
    rigl,
    sfp,
    snip,
    sparse_evolutionary,
    sparse_momentum,
    srigl,
    st3,
)
from ._description import describe_method, summarize_method
from ._prune import prune
from .lottery import LotteryRounds

__all__ = [
    "ACDC",
    "DPF",
    "DSR",
    "METHODS",
    "SET",
    "SFP",
    "SNIP",
    "ST3",
    "EdgePopup",
    "Feather",
    "Finetune",
    "Incremental",
    "IteRand",
    "Lottery",
    "Method",
    "OneShot",
    "Random",
    "RigL",
    "SRigL",
    "SparseMomentum",
    "describe_method",
    "make_constructor",
    "make_pruner",
    "method",
    "prune",
    "summarize_method",
]

Options = ParamSpec("Options")


def make_pruner(choice: Any) -> Pruner:
    """Return a pruner for a method, given as its record or in any other spelling: "dpf(sparsity=0.9)"."""
    spec = METHODS.resolve(choice)
    return LotteryRounds(spec) if isinstance(spec, lottery.Lottery) else Pruner(spec)


def make_constructor(spec: Callable[Options, Method]) -> Callable[Options, Pruner]:
    """Return the public constructor of a method: it takes the sparsity and the method's options, returns a pruner.

    Type checkers and editors see the options of the method's dataclass.
    """
    assert isinstance(spec, type)

    def construct(*args: Options.args, **options: Options.kwargs) -> Pruner:
        require(
            not args or "sparsity" in spec_options(spec),
            f"{spec.__name__} takes no sparsity, got {args[0] if args else None!r}: it keeps the zeros that are there.",
        )
        return make_pruner(build_spec(spec, "method", bind_arguments(spec, "method", args, options)))

    construct.__name__ = construct.__qualname__ = spec.__name__
    construct.__doc__ = spec.__doc__
    construct.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [option.replace(annotation=inspect.Parameter.empty) for option in spec_options(spec).values()],
        return_annotation=Pruner,
    )
    return construct


def make_lottery_constructor(spec: Callable[Options, lottery.Lottery]) -> Callable[Options, LotteryRounds]:
    """Return the public constructor of the lottery, whose pruner trains in rounds."""
    return make_constructor(spec)  # type: ignore[return-value]


ACDC = make_constructor(acdc.ACDC)
DPF = make_constructor(dpf.DPF)
DSR = make_constructor(dsr.DSR)
EdgePopup = make_constructor(edge_popup.EdgePopup)
Feather = make_constructor(feather.Feather)
Finetune = make_constructor(finetune.Finetune)
Incremental = make_constructor(incremental.Incremental)
IteRand = make_constructor(iterand.IteRand)
Lottery = make_lottery_constructor(lottery.Lottery)
OneShot = make_constructor(oneshot.OneShot)
Random = make_constructor(random_mask.Random)
RigL = make_constructor(rigl.RigL)
SET = make_constructor(sparse_evolutionary.SET)
SFP = make_constructor(sfp.SFP)
SNIP = make_constructor(snip.SNIP)
SRigL = make_constructor(srigl.SRigL)
ST3 = make_constructor(st3.ST3)
SparseMomentum = make_constructor(sparse_momentum.SparseMomentum)
