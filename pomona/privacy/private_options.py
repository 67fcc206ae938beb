"""The options of private steps: the methods, and what contradicts itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import require, unknown_name_error
from .budget import Budget
from .clipping_norms import Clipping
from .example_batches import Batch

METHODS = ("dpsgd", "random", "public", "gip", "datalens")
GROUPINGS = ("model", "parameter")
# What the layers compute in; None is the dtype of the model
PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
DENSE_METHODS = ("dpsgd", "datalens")  # whose index set holds all coordinates


def validate_options(
    budget: Budget,
    method: str,
    keep: float,
    group: int | None,
    grouping: str,
    clip: float,
    clipping: Clipping,
    micro: int,
    views: int,
    precision: str,
    public: tuple[Batch, Batch] | None,
) -> None:
    """Raise PomonaError for options of `PrivateStep` that are out of range or contradict each other."""
    if method not in METHODS:
        raise unknown_name_error("private method", method, METHODS)
    if precision not in PRECISIONS:
        raise unknown_name_error("precision", precision, PRECISIONS)
    if grouping not in GROUPINGS:
        raise unknown_name_error("grouping", grouping, GROUPINGS)
    require(
        grouping == "model" or group is not None,
        'grouping="parameter" needs the size of a group: give group, such as 256.',
    )
    require(0 < keep <= 1, f"keep is the share of coordinates that are kept, in (0, 1], got {keep:g}.")
    require(
        group is None or round(keep * group) >= 1,
        f"keep={keep:g} leaves none of a group of {group}: give a larger keep or group, or group=None.",
    )
    require(0 < clip < math.inf, f"clip must be above 0 and finite, got {clip:g}: without it there is no privacy.")
    require(
        method != "datalens" or not (clipping.layers or clipping.quantile),
        "the signs of datalens have the norm C by construction: leave out layers and quantile.",
    )
    require(micro >= 1 and views >= 1, f"micro and views must be 1 or more, got {micro} and {views}.")
    require(
        (budget.share > 0) == (method == "gip"),
        f"the budget reserves share={budget.share:g} of ε for index draws, and '{method}' "
        + ("needs one: give it a share above 0." if method == "gip" else "makes none that cost: set share to 0."),
    )
    require((public is None) == (method != "public"), "public data goes with method='public', and only with it.")


def require_same_settings(mine: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raise PomonaError unless a run has the settings with which it began."""
    other = [f"{key}: {mine.get(key)}, not {value}" for key, value in before.items() if mine.get(key) != value]
    require(
        not other,
        f"these steps began with another budget ({'; '.join(other[:3])}): what is spent cannot be moved to a new "
        "one, so continue with the old one or begin a new run.",
    )
