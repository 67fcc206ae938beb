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


def require_independent_rows(compute: Callable[[Batch, Batch], Gradients], inputs: Batch, targets: Batch) -> None:
    """Raise PomonaError unless gradients of rows are the same at other places and beside other rows.

    The rows are random ones of the shapes and dtypes of `inputs` and `targets`, so that the outcome does not depend on
    the data.
    """
    found = find_dependent_parameter(compute, inputs, targets)
    require(
        found is None,
        f"with precision=\"bfloat16\" the gradient of '{found}' of an example depends on its place in the batch on "
        "this machine, which the privacy of the sum does not allow: leave the precision out.",
    )


def find_dependent_parameter(compute: Callable[[Batch, Batch], Gradients], inputs: Batch, targets: Batch) -> str | None:
    """Return the name of a parameter whose gradients of a row depend on the place or on the other rows, or None."""
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
        if not torch.equal(gradients[:kept], after[name][order[:kept].to(gradients.device)]):
            return name
    return None


def random_like(part: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal numbers of the shape and dtype of a tensor, or zeros and ones for one of integers."""
    if part.is_floating_point():
        return torch.randn(part.shape, generator=generator).to(part.device, part.dtype)
    return torch.randint(2, part.shape, generator=generator).to(part.device, part.dtype)
