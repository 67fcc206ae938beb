"""The pruner's state as torch.distributed.checkpoint stores it: sharded tensors, and all plain values in one text.

A checkpoint is loaded into a state of the same keys. Those of plain values, such as the entries of the history, differ
between a new run and a saved one, so they are not keys here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import PomonaError
from .history import COLUMNS

PLAIN_KEY = "plain"
TENSOR_KEYS = ("masks", "latents", "flipped", "seen", "drawn", "gauges")


def pack_sharded(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its plain values in one text."""
    plain = {key: value for key, value in state.items() if key not in TENSOR_KEYS}
    columns = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in state["history"].items()}
    plain["history"] = columns
    return {PLAIN_KEY: json.dumps(plain), **{key: dict(state[key]) for key in TENSOR_KEYS if key in state}}


def unpack_sharded(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `pack_sharded` packed; another one as it is."""
    if PLAIN_KEY not in state:
        return dict(state)
    try:
        plain = json.loads(state[PLAIN_KEY])
        plain["history"] = read_columns(plain["history"], len(plain["shapes"]))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise PomonaError(
            f"the pruner's state is damaged: '{PLAIN_KEY}' cannot be read ({error}): use an earlier one."
        ) from error
    tensors = {key: dict(state.get(key, {})) for key in TENSOR_KEYS if key in state}
    empty: dict[str, Any] = {
        key: {} for key in ("masks", "latents", "flipped") if key not in state
    }  # a checkpoint drops empty ones
    return {**plain, **empty, **tensors}


def read_columns(columns: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the columns of a history as tensors, from lists of their numbers."""
    kinds = {int: torch.int64, float: torch.float64}
    read = {key: torch.tensor(columns[key], dtype=kinds[kind]) for key, kind in COLUMNS.items()}
    sparsities = torch.tensor(columns["layers"], dtype=torch.float64).view(len(read["step"]), layers)
    return {"count": columns["count"], **read, "layers": sparsities}
