"""Micro-batches of a fixed shape and kernels that are chosen by it, so that a row's gradient depends on the row.

A kernel may round the gradient of a row differently if the batch has another size, because libraries choose kernels
and the order of their sums by the shape. Adding one row would then change the gradients of all others. So a
micro-batch always has the same number of rows, a function of public numbers, and rows of zeros fill it up. TF32 is
off, because its kernels round differently at different places of a batch. What is then assumed of the kernels is
written in `clipping`; `benchmarks/measure/private_arithmetic.py` measures it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

SPARE_DEVIATIONS = 2.0  # of the sample size, for which there are rows without another micro-batch


def micro_batch_rows(rows: int, rate: float, micro: int) -> int:
    """Return the rows of each micro-batch: as few, of at most `micro`, as hold most samples together."""
    wanted = rows * rate + SPARE_DEVIATIONS * math.sqrt(rows * rate * (1 - rate))
    wanted = min(max(math.ceil(wanted - 1e-6), 1), rows)
    return math.ceil(wanted / math.ceil(wanted / micro))


@contextmanager
def repeatable_kernels() -> Iterator[None]:
    """Choose kernels by the shapes alone, deterministic ones of the full precision, within the block."""
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    precision, deterministic = torch.get_float32_matmul_precision(), cast("Any", torch.utils.deterministic)
    fills = deterministic.fill_uninitialized_memory
    cudnn = torch.backends.cudnn.flags(
        enabled=torch.backends.cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=False
    )
    with cudnn, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")  # where there is no deterministic kernel
        torch.use_deterministic_algorithms(True, warn_only=not was or warned)
        torch.set_float32_matmul_precision("highest")
        deterministic.fill_uninitialized_memory = False  # it only costs time
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was, warn_only=warned)
            torch.set_float32_matmul_precision(precision)
            deterministic.fill_uninitialized_memory = fills
