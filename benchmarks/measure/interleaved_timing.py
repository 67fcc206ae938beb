"""Time several training loops in alternation, so that a slow phase of the machine affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
PRIVATE_WARM_UP = 8  # turns: a private step tests its model at the steps 1, 2, 4 and 8, and then seldom


def synchronize(device: str) -> None:
    """Wait until a CUDA device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_call(call: Callable[[], Any], device: str) -> float:
    """Return the seconds of one call, including the work that it starts on the device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def time_in_turns(
    loops: Mapping[Name, Callable[[], None]], turns: int, steps: int, device: str, warm_up: int = 1
) -> dict[Name, list[float]]:
    """Return the seconds per step of each loop for each turn.

    A call of a loop runs `steps` steps. The order of the loops is reversed from turn to turn. The first `warm_up` turns
    are not counted.
    """
    times: dict[Name, list[float]] = {name: [] for name in loops}
    for turn in range(turns + warm_up):
        for name in list(loops) if turn % 2 else reversed(list(loops)):
            seconds = time_call(loops[name], device)
            if turn >= warm_up:
                times[name].append(seconds / steps)
    return times
