"""The test that gradients of a row depend on nothing else in its micro-batch, bit for bit where they have 16 bits.

The private sum assumes it (see `clipping`). In float32 without TF32, errors of kernels that choose another order of
their sums are within the margin. In 16 bits they would not be. So it is tested with the real model, shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import require
from .clipping import OTHER_ROWS, UNITS
from .example_batches import Batch, count_rows, map_tensors
from .outer_products import MixedGradients, OuterProducts, RowGradients

LARGE = 1e4  # the factor of some of the rows that replace others

AddClipped = Callable[[list[RowGradients]], Tensor]  # the integer sum of clipped gradients, from (rows, n) parts


def require_independent_rows(
    compute: Callable[[Batch, Batch], MixedGradients],
    inputs: Batch,
    targets: Batch,
    add_clipped: AddClipped | None = None,
    *,
    moves: bool = True,
    seed: int = 0,
    remedy: str,
) -> None:
    """Raise PomonaError unless gradients of rows are the same beside other rows and, with `moves`, at other places.

    The rows are random ones of the shapes and dtypes of `inputs` and `targets`, so that the outcome does not depend on
    the data. The test is exact without `add_clipped`; with it, rounding errors within the margin are allowed.
    """
    found = find_dependent_parameter(compute, inputs, targets, add_clipped, moves=moves, seed=seed)
    require(
        found is None,
        f"the gradient of '{found}' of an example depends on its place in the batch or on the other examples, which "
        f"the privacy of the sum does not allow: {remedy}.",
    )


def find_dependent_parameter(
    compute: Callable[[Batch, Batch], MixedGradients],
    inputs: Batch,
    targets: Batch,
    add_clipped: AddClipped | None = None,
    *,
    moves: bool = True,
    seed: int = 0,
) -> str | None:
    """Return the name of a parameter whose gradients of a row depend on the place or on the other rows, or None.

    Half of the rows stay the same. The others are replaced by random rows, of which a third are large and a third zero.
    If the test `moves` rows, those that stay the same move to other places. If not, a second pass replaces them, so
    that each row is replaced once.
    """
    rows = count_rows(inputs, targets)
    kept = rows // 2 + 1 if moves else (rows + 1) // 2
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    first, other = (map_tensors(lambda part: random_like(part, generator), (inputs, targets)) for _ in range(2))
    gradients = compute(*first)
    for places, replaced in [(order[:kept], order[kept:]), (order[kept:], order[:kept])][: 1 if moves else 2]:
        origin = torch.arange(kept) if moves else places
        mix = partial(mix_rows, origin=origin, places=places, replaced=replaced)
        before, after = take_rows(gradients, origin), take_rows(compute(*pytree.tree_map(mix, first, other)), places)
        different = [name for name, part in before.items() if not is_equal(part, after[name])]
        if different and (add_clipped is None or not is_within_margin(before, after, add_clipped)):
            return different[0]
    return None


def mix_rows(one: Tensor, two: Tensor, origin: Tensor, places: Tensor, replaced: Tensor) -> Tensor:
    """Return the rows of `one` from `origin` at `places`, and at the others rows of `two`, some large and some zero."""
    mixed = two.clone()
    if mixed.is_floating_point():
        mixed[replaced[::3]] *= LARGE
    mixed[replaced[1::3]] = 0
    mixed[places] = one[origin]
    return mixed


def take_rows(gradients: MixedGradients, places: Tensor) -> MixedGradients:
    """Return the gradients of the rows at some places, each of shape (rows, n) or as outer products."""
    found = {name: part[places.to(part.device)] for name, part in gradients.items()}
    return {name: part if isinstance(part, OuterProducts) else part[:, None].flatten(1) for name, part in found.items()}


def is_equal(one: RowGradients, other: RowGradients) -> bool:
    """Return whether two gradients are equal bit for bit, outer products in their factors."""
    return all(torch.equal(*pair) for pair in zip(factors(one), factors(other), strict=True))


def factors(part: RowGradients) -> tuple[Tensor, ...]:
    """Return the tensors that gradients are stored in."""
    return (part.outputs, part.inputs) if isinstance(part, OuterProducts) else (part,)


def is_within_margin(before: MixedGradients, after: MixedGradients, add_clipped: AddClipped) -> bool:
    """Return whether gradients of the same rows, (rows, n), differ by no more than the privacy of their sum allows.

    The integers of their sum, and each of the counts behind them, may differ by 2⁻¹⁰ of the clipping norm. So that
    the outcome does not depend on a large norm, the gradients themselves and their sum may differ by as much of the
    largest norm of a row. The gradients may be overwritten.
    """
    squares = moves = torch.zeros(())
    sums, size = 0.0, 0
    for name, part in before.items():
        finite = [[factor.isfinite() for factor in factors(each)] for each in (part, after[name])]
        if not all(map(torch.equal, *finite)):
            return False
        square, move, moved = measure_change(part, after[name])
        squares, moves = squares.to(square) + square, moves.to(move) + move
        sums, size = sums + moved, size + part.shape[1]
    limit = OTHER_ROWS**2 * float(squares.max())
    if sums > limit or float(moves.max()) > limit:
        return False
    sum_moved = (add_clipped(list(before.values())) - add_clipped(list(after.values()))).double() / UNITS
    return float(sum_moved[:size].norm()) <= OTHER_ROWS and bool((sum_moved[size:].abs() <= OTHER_ROWS).all())


def measure_change(one: RowGradients, other: RowGradients) -> tuple[Tensor, Tensor, float]:
    """Return the squared norm of each row of `one`, of its change to `other`, and of the sum of all changes."""
    ours, theirs = ([part.double().nan_to_num(0, 0, 0) for part in factors(each)] for each in (one, other))
    if isinstance(one, OuterProducts):
        before = OuterProducts(*ours)
        products = before.minus(OuterProducts(*theirs))
        return before.gram(), products.gram(), float(products.sum().square().sum())
    change = ours[0] - theirs[0]
    return ours[0].square().sum(1), change.square().sum(1), float(change.sum(0).square().sum())


def random_like(part: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal numbers of the shape and dtype of a tensor, or zeros and ones for one of integers."""
    if part.is_floating_point():
        return torch.randn(part.shape, generator=generator).to(part.device, part.dtype)
    return torch.randint(2, part.shape, generator=generator).to(part.device, part.dtype)
