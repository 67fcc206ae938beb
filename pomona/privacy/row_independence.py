"""The test that gradients of a row depend on nothing else in its micro-batch, bit for bit, for smaller dtypes.

The private sum assumes it (see `clipping`). In float32 without TF32, errors of kernels that choose another order of
their sums are within the margin. In bfloat16 they would not be, so it is tested with the real model, shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import require
from .example_batches import Batch, count_rows, map_tensors
from .recorded_gradients import Gradients

ROUNDING = 1e-3  # of the largest norm of a row: far above the errors of kernels in float32


def require_independent_rows(
    compute: Callable[[Batch, Batch], Gradients], inputs: Batch, targets: Batch, is_exact: bool = True
) -> None:
    """Raise PomonaError unless gradients of rows are the same at other places and beside other rows.

    The rows are random ones of the shapes and dtypes of `inputs` and `targets`, so that the outcome does not depend on
    the data. Unless the test is exact, rounding errors are allowed, and it finds layers that mix the rows of a batch
    of this size.
    """
    found = find_dependent_parameter(compute, inputs, targets, 0.0 if is_exact else ROUNDING)
    remedy = 'leave precision="bfloat16" out' if is_exact else "remove the layer that mixes them"
    require(
        found is None,
        f"the gradient of '{found}' of an example depends on its place in the batch or on the other examples, which "
        f"the privacy of the sum does not allow: {remedy}.",
    )


def find_dependent_parameter(
    compute: Callable[[Batch, Batch], Gradients], inputs: Batch, targets: Batch, tolerance: float = 0.0
) -> str | None:
    """Return the name of a parameter whose gradients of a row depend on the place or on the other rows, or None.

    `tolerance` is the change that is allowed, over the largest norm of a row.
    """
    rows = count_rows(inputs, targets)
    kept = rows // 2 + 1
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(rows, generator=generator)
    first, other = (map_tensors(lambda part: random_like(part, generator), (inputs, targets)) for _ in range(2))

    def mix(one: Tensor, two: Tensor) -> Tensor:
        """Return the first rows of `one` at the places that `order` names, and rows of `two` and zeros elsewhere."""
        mixed = two.clone()
        mixed[order[kept:][::2]] = 0
        mixed[order[:kept]] = one[:kept]
        return mixed

    mixed = pytree.tree_map(mix, first, other)
    before, after = compute(*first), compute(*mixed)
    for name, gradients in before.items():
        one, two = gradients[:kept], after[name][order[:kept].to(gradients.device)]
        if torch.equal(one, two):
            continue
        norms, change = (part.double().nan_to_num().flatten(1).norm(dim=1) for part in (one, one - two))
        if bool((one.isfinite() != two.isfinite()).any()) or float(change.max()) > tolerance * float(norms.max()):
            return name
    return None


def random_like(part: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal numbers of the shape and dtype of a tensor, or zeros and ones for one of integers."""
    if part.is_floating_point():
        return torch.randn(part.shape, generator=generator).to(part.device, part.dtype)
    return torch.randint(2, part.shape, generator=generator).to(part.device, part.dtype)
