"""The engine's step on a CPU by C kernels, each of which does in one pass what takes PyTorch several.

A function returns None or False where the kernels cannot do its work: without a compiler, on another device, for other
dtypes and layouts. The caller then computes the same bits with PyTorch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .library import load_library, supported_instruction_sets
from .toolchain import STEP_SOURCE

Array = NDArray[Any]
POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "mask": ([POINTER] * 3 + [INTEGER] * 5, None),
    "project_rows": ([POINTER] * 6 + [INTEGER] * 4, None),
    "bound_factors": ([POINTER] * 3 + [INTEGER] + [ctypes.c_double] * 3, INTEGER),
    "compare_masks": ([POINTER, POINTER, INTEGER, POINTER], None),
    "measure_magnitudes": ([POINTER] * 3 + [INTEGER], ctypes.c_float),
    "scale_by_mask": ([POINTER] * 2 + [INTEGER], None),
    "collect_between": ([POINTER, INTEGER, ctypes.c_float, ctypes.c_float, POINTER, POINTER], INTEGER),
    "mark_above": ([POINTER, INTEGER, ctypes.c_float, POINTER], INTEGER),
    "count_digits": ([POINTER] + [INTEGER] * 5 + [POINTER, INTEGER], None),
    "mark_keys": ([POINTER] + [INTEGER] * 3 + [POINTER, INTEGER], INTEGER),
    "mark_ties": ([POINTER] + [INTEGER] * 4 + [POINTER], None),
}
FLOAT_BYTES = 4
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a value that can be masked
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
SINGLE_THREAD_VALUES = 1 << 16  # values up to which waking other threads takes longer than they save
CACHED_VALUES = 1 << 20  # values up to which a result should stay in the cache
NORM_ERROR = 1e-3  # a bound on the relative error of a norm in float32, of torch and of the kernels
MAX_NORM_LENGTH = 1 << 17  # values of a row up to which that bound holds for any order of the sum


@cache
def load_kernel(name: str, instruction_set: str | None = None) -> Callable[..., Any] | None:
    """Return a function of step_kernels.c, for the best instruction set or the one named; None without a library."""
    library = load_library(STEP_SOURCE)
    if library is None:
        return None
    function = getattr(library, f"pomona_{instruction_set or supported_instruction_sets()[0]}_{name}")
    function.argtypes, function.restype = SIGNATURES[name]
    return function


def mask_values(
    values: Tensor, mask: Tensor, out: Tensor, fill: float = 0.0, instruction_set: str | None = None
) -> bool:
    """Write where(mask, values, fill) into `out`, which may be `values`; return False where the kernels cannot."""
    kernel = load_kernel("mask", instruction_set) if lie_alike(values, mask, out) else None
    if kernel is None or values.element_size() not in INTEGERS or values.is_complex():
        return False
    n, size = values.numel(), values.element_size()
    bits, streams, threads = bits_of(fill, values.dtype) if fill else 0, n > CACHED_VALUES, thread_count(n)
    kernel(values.data_ptr(), mask.data_ptr(), out.data_ptr(), n, size, bits, streams, threads)
    note_change(out)
    return True


def note_change(tensor: Tensor) -> None:
    """Give a tensor that was written to a new version, as PyTorch does; tensors of inference mode have none."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


@cache
def bits_of(value: float, dtype: torch.dtype) -> int:
    """Return the bits of a number as a signed integer."""
    number = torch.tensor(value, dtype=dtype, device="cpu")
    return int(number.view(INTEGERS[number.element_size()]))


def project_rows(
    latent: Tensor,
    mask: Tensor,
    out: Tensor,
    calibration: Tensor | None = None,
    norms: Tensor | None = None,
    instruction_set: str | None = None,
) -> bool:
    """Write m ⊙ w, or with a calibration m ⊙ s · sign(w) · max(|w| − t, 0), into `out`; return False if impossible.

    A calibration has the scales s and the thresholds t, one for each output, with the other dimensions of size 1, or
    one for all weights. `norms` gets an estimate of the norm of each output's values.
    """
    kernel = load_kernel("project_rows", instruction_set) if lie_alike(latent, mask, out) else None
    if kernel is None or latent.dtype is not torch.float32 or not (calibration is None or is_float(calibration)):
        return False
    n = latent.numel()
    counts = {norms.numel()} if norms is not None else set()
    if calibration is not None:
        if not has_rows(latent, calibration.shape[1:]):
            return False
        counts.add(calibration[0].numel())
    if len(counts) > 1:
        return False  # one scale for all weights and norms of several outputs
    count = counts.pop() if counts else 1
    scales = None if calibration is None else calibration.data_ptr()
    thresholds = None if scales is None else scales + count * FLOAT_BYTES
    places = (latent.data_ptr(), mask.data_ptr(), out.data_ptr(), scales, thresholds)
    kernel(*places, None if norms is None else norms.data_ptr(), count, n // count, n > CACHED_VALUES, thread_count(n))
    note_change(out)
    return True


def bound_factors(norms: Tensor, weight_norms: Tensor, feedback: float, weak: float) -> tuple[Tensor, int] | None:
    """Return the factor of each output's gradient and how many are not 1, as `BoundedFeedback` defines them.

    `norms` are those of the gradients, and `weight_norms` the estimates of `project_rows`. Return None without kernels,
    and where the error of an estimate could decide whether an output is weak.
    """
    kernel = load_kernel("bound_factors")
    if kernel is None or not (is_float(norms) and is_float(weight_norms)):
        return None
    factors = torch.empty_like(norms)
    places = (tensor.data_ptr() for tensor in (norms, weight_norms, factors))
    count = kernel(*places, norms.numel(), feedback, weak, NORM_ERROR)
    return (factors, count) if count >= 0 else None


def is_float(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous float32 on the CPU."""
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


def count_changes(mask: Tensor, before: Tensor) -> tuple[int, int, int] | None:
    """Return how many entries are set in a mask, in the one before, and in just one of them; None if impossible."""
    kernel = load_kernel("compare_masks") if lie_alike(mask, mask, before) else None
    if kernel is None:
        return None
    counts = (ctypes.c_int64 * 3)()
    kernel(mask.data_ptr(), before.data_ptr(), mask.numel(), counts)
    return counts[0], counts[1], counts[2]


def measure_magnitudes(weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return |w| and the largest |w| off the mask, 0 where all are on it; None if impossible."""
    kernel = load_kernel("measure_magnitudes") if lie_alike(weight, mask, weight) else None
    if kernel is None or weight.dtype is not torch.float32:
        return None
    magnitude = torch.empty_like(weight, requires_grad=False)
    most = kernel(weight.data_ptr(), mask.data_ptr(), magnitude.data_ptr(), weight.numel())
    return magnitude, torch.tensor(most, dtype=torch.float32)


def scale_by_mask(values: Tensor, mask: Tensor) -> bool:
    """Multiply values by a mask in place; return False where the kernels cannot."""
    kernel = load_kernel("scale_by_mask") if lie_alike(values, mask, values) else None
    if kernel is None or values.dtype is not torch.float32:
        return False
    kernel(values.data_ptr(), mask.data_ptr(), values.numel())
    return True


def collect_between(values: Array, low: float, high: float, inside: Array) -> tuple[int, int] | None:
    """Collect the values in (low, high) at the front of `inside`; return their number and how many are below `high`.

    A NaN is above everything. Return None if impossible.
    """
    kernel = load_kernel("collect_between") if is_run(values) and is_run(inside) else None
    if kernel is None:
        return None
    below = ctypes.c_int64()
    found = kernel(values.ctypes.data, values.size, low, high, inside.ctypes.data, ctypes.byref(below))
    return found, below.value


def mark_above(values: Array, threshold: float, mask: Array) -> int | None:
    """Mark the values that are not at most a threshold in a mask and return their number; None if impossible."""
    kernel = load_kernel("mark_above") if is_run(values) and mask.flags.c_contiguous else None
    return None if kernel is None else kernel(values.ctypes.data, values.size, threshold, mask.ctypes.data)


def count_digits(
    values: Tensor,
    magnitudes: bool,
    shift: int,
    base: int,
    counts: Tensor,
    instruction_set: str | None = None,
) -> bool:
    """Add to the int64 `counts` how many keys have each digit (key >> shift) − base; return False if impossible.

    Keys are those of `patterns.counting_selection`, of |value| where `magnitudes` are ranked.
    """
    kernel = load_kernel("count_digits", instruction_set) if is_float(values) else None
    if kernel is None:
        return False
    n = values.numel()
    kernel(values.data_ptr(), n, kept_bits(magnitudes), shift, base, len(counts), counts.data_ptr(), thread_count(n))
    return True


def mark_keys(
    values: Tensor, magnitudes: bool, threshold: int, mask: Tensor, instruction_set: str | None = None
) -> int | None:
    """Mark the keys above a threshold in a mask and return how many equal it; None if impossible."""
    kernel = load_kernel("mark_keys", instruction_set) if is_float(values) and mask.is_contiguous() else None
    if kernel is None:
        return None
    n = values.numel()
    return kernel(values.data_ptr(), n, kept_bits(magnitudes), threshold, mask.data_ptr(), thread_count(n))


def mark_ties(
    values: Tensor, magnitudes: bool, threshold: int, quota: int, mask: Tensor, instruction_set: str | None = None
) -> bool:
    """Mark the first `quota` keys that equal a threshold; return False if impossible."""
    kernel = load_kernel("mark_ties", instruction_set) if is_float(values) and mask.is_contiguous() else None
    if kernel is None:
        return False
    kernel(values.data_ptr(), values.numel(), kept_bits(magnitudes), threshold, quota, mask.data_ptr())
    return True


def kept_bits(magnitudes: bool) -> int:
    """Return the bits of a score that are ranked: all, or all but the sign."""
    return 0x7FFF_FFFF if magnitudes else 0xFFFF_FFFF


def is_run(values: Array) -> bool:
    """Return whether an array is contiguous float32."""
    return bool(values.dtype == np.float32 and values.flags.c_contiguous)


def has_rows(weight: Tensor, shape: torch.Size) -> bool:
    """Return whether weights that share an entry of a tensor of this shape are contiguous, in the order of entries."""
    count = shape.numel()
    return count == 1 or (shape[0] == weight.shape[0] == count and weight.stride(0) * count == weight.numel())


def lie_alike(values: Tensor, mask: Tensor, out: Tensor) -> bool:
    """Return whether plain tensors on the CPU and their mask have entries at the same places, without gaps."""
    return (
        mask.dtype is torch.bool
        and mask.device.type == "cpu"
        and values.device == mask.device == out.device
        and values.dtype is out.dtype
        and values.shape == mask.shape == out.shape
        and values.stride() == mask.stride() == out.stride()
        and type(values) in PLAIN_TYPES
        and type(out) in PLAIN_TYPES
        and is_dense(values)
    )


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has no gaps, in whatever order its dimensions lie."""
    return tensor.numel() > 0 and (
        tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )


def thread_count(values: int) -> int:
    """Return the number of threads for a pass over so many values."""
    return torch.get_num_threads() if values > SINGLE_THREAD_VALUES else 1
