"""Comparison of a loaded file with the network that it was written from: outputs, and time on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PomonaError, require
from ..sparse.timing import median_seconds

TOLERANCE = 1e-4  # of float32 values, relative to the largest output
HALF_TOLERANCE = 2e-2  # of float16 and bfloat16 values
MIN_SCALE = 1e-3  # an output whose largest value is below this counts as one of this size


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one CPU thread and without gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def largest_difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Return the largest difference of any two outputs, relative to the largest value expected of the output.

    Equal infinities and NaNs at the same places are no difference. Outputs of other shapes are infinitely different.
    """
    shapes = [[tensor.shape for tensor in tensors] for tensors in (expected, actual)]
    if shapes[0] != shapes[1]:
        return float("inf")
    worst = 0.0
    for one, other in zip(expected, actual, strict=True):
        a, b = one.double().cpu(), other.double().cpu()
        finite = a[a.isfinite()]
        scale = max(MIN_SCALE, float(finite.abs().max())) if finite.numel() else 1.0
        same = (a == b) | (a.isnan() & b.isnan())
        apart = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
        worst = max(worst, float(apart.max()) / scale if apart.numel() else 0.0)
    return worst


def require_close(file: str, difference: float, tolerance: float) -> None:
    """Raise PomonaError where the outputs of a file differ by more than the tolerance."""
    require(
        difference <= tolerance,
        f"the outputs of '{file}' differ from the network's by {difference:.1e} of the largest output, more than the "
        f"tolerance {tolerance:g}: nothing was written; pass a larger tolerance= to accept it.",
    )


def require_equal_states(file: str, expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> None:
    """Raise PomonaError unless two states hold the same values; 0.0 and −0.0 are the same."""
    for name, tensor in expected.items():
        other = actual.get(name)
        if other is None or other.dtype != tensor.dtype or largest_difference([tensor], [other]) > 0:
            raise PomonaError(f"{name} in '{file}' is not the network's: nothing was written.")


def measure_latency(calls: Sequence[Callable[[], Any]], device: torch.device, seconds: float) -> list[float]:
    """Return the median seconds of each call, in turns, on one thread.

    On a CPU it is the processor time of the process, which other programs on the machine do not lengthen.
    """
    with one_thread():
        return median_seconds(calls, device, patience=seconds, clock=time.process_time)


def count_state_bytes(model: nn.Module) -> int:
    """Return the bytes of a network's state; weights under several names count once, as they are one tensor."""
    tensors = {(t.data_ptr(), t.shape, t.dtype) if t.numel() else id(t): t for t in model.state_dict().values()}
    return sum(tensor.nbytes for tensor in tensors.values())


def share_of_zeros(model: nn.Module) -> float:
    """Return the share of zeros among the weights: the floating-point parameters of two or more dimensions."""
    weights = [p for p in model.parameters() if p.ndim > 1 and p.is_floating_point()]
    total = sum(weight.numel() for weight in weights)
    return 1 - sum(int(weight.count_nonzero()) for weight in weights) / total if total else 0.0
