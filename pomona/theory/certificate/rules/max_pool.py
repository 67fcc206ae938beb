"""Rules for max pooling and the maximum over axes.

Forms on a max pool of images go back to the entry that is expected to be the largest of its window, with a remainder
for the others: none where that entry is the largest on all inputs, in both networks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..intervals import EPS, Interval, PairBounds
from ..linear_form import Form, Substitution, largest, rounding, row_sums
from ..steps import Step
from .calls import call
from .registry import Rule, register

MAXIMA = (
    "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "amax", "amin",
)  # fmt: skip
Selection = tuple[Tensor, Tensor, Interval, Tensor, Interval]


def maximum_bounds(step: Step, inputs: list[PairBounds]) -> PairBounds:
    """Return the bounds of a maximum or a minimum, whose gap is between the smallest and the largest one."""
    (x,) = inputs
    dense, pruned = (side.map(lambda end: call(step, [end], [])) for side in (x.dense, x.pruned))
    gap = Interval(-call(step, [-x.gap.low], []), call(step, [x.gap.high], []))
    if step.op == "amin":
        gap = Interval(call(step, [x.gap.low], []), -call(step, [-x.gap.high], []))
    return PairBounds(dense, pruned, gap).tighten()


def select(step: Step, inputs: list[PairBounds]) -> Selection:
    """Return the entry of each window that is expected to be the largest, and remainders for the gap and for pruned.

    Where a remainder is wider than the interval of the result, the interval takes its place, and nothing is selected.
    """
    (x,) = inputs
    result = maximum_bounds(step, inputs)
    positions = torch.arange(x.gap.low[0, 0].numel(), dtype=torch.float64, device=x.gap.low.device)
    positions = positions.view(1, 1, *x.gap.low.shape[2:])
    channels = x.gap.low.shape[1]
    lows, highs = (
        [windows(step, s.low) for s in (x.dense, x.pruned)],
        [windows(step, s.high) for s in (x.dense, x.pruned)],
    )
    chosen = (lows[0] + lows[1]).argmax(1, keepdim=True)
    places = windows(step, positions).expand(channels, -1, -1).gather(1, chosen).squeeze(1).long()
    excess = [excess_over(low, high, chosen).view(result.gap.low.shape) for low, high in zip(lows, highs, strict=True)]
    use_gap = excess[0] + excess[1] < result.gap.high - result.gap.low
    use_gap = use_gap | ((excess[0] == 0) & (excess[1] == 0))
    use_pruned = (excess[1] < result.pruned.high - result.pruned.low) | (excess[1] == 0)
    zero = torch.zeros_like(excess[1])
    gap = Interval(torch.where(use_gap, -excess[1], result.gap.low), torch.where(use_gap, excess[0], result.gap.high))
    pruned = Interval(
        torch.where(use_pruned, zero, result.pruned.low), torch.where(use_pruned, excess[1], result.pruned.high)
    )
    return places, use_gap, gap, use_pruned, pruned


def windows(step: Step, x: Tensor) -> Tensor:
    """Return the entries of each window of an image (1 × channels × height × width): channels × entries × windows."""
    kernel, stride, padding, dilation = window_settings(step)
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]), value=-torch.inf)
    # Unfolding multiplies nothing, so that infinities stay.
    return F.unfold(padded.transpose(0, 1), kernel, dilation=dilation, stride=stride)


def window_settings(step: Step) -> list[tuple[int, int]]:
    """Return the kernel, stride, padding and dilation of a max pool of images."""
    given: list[Any] = [*step.args[1:5], *[None] * (5 - len(step.args[:5]))]
    defaults = [None, given[0], 0, 1]
    settings = [value if value not in (None, []) else default for value, default in zip(given, defaults, strict=True)]
    return [(v, v) if isinstance(v, int) else (v[0], v[-1]) for v in settings]


def excess_over(low: Tensor, high: Tensor, chosen: Tensor) -> Tensor:
    """Return by how much another entry of a window can exceed the chosen one."""
    others = high.scatter(1, chosen, torch.full_like(chosen, -torch.inf, dtype=high.dtype)).amax(1)
    own = low.gather(1, chosen).squeeze(1)
    excess = (others - own).clamp(min=0)
    return torch.where(excess > 0, excess + EPS * (others.abs() + own.abs()), torch.zeros_like(excess))


def substitute(step: Step, form: Form, inputs: list[PairBounds], selection: Selection) -> Substitution:
    """Return forms on a max pool as forms on the selected entries."""
    places, use_gap, gap, use_pruned, pruned = selection
    (x,) = inputs
    constant = row_sums(largest(form.gap, gap) + largest(form.pruned, pruned))
    reach = row_sums(form.gap.abs() * gap.magnitude + form.pruned.abs() * pruned.magnitude)

    def scatter(rows: Tensor) -> Tensor:
        empty = rows.new_zeros(len(rows), places.shape[0], x.gap.low[0, 0].numel())
        spread = torch.scatter_add(empty, 2, places.expand(len(rows), -1, -1), rows.flatten(3).flatten(1, 2))
        return spread.view(len(rows), *x.gap.low.shape)

    result = Form(scatter(form.gap * use_gap), scatter(form.pruned * use_pruned))
    slack = rounding(Form(scatter(form.gap.abs()), scatter(form.pruned.abs())), x, 8)
    return Substitution([result], constant + slack + 2 * (form.gap[0].numel() + 8) * EPS * reach)


def pools_images(step: Step) -> bool:
    """Return whether a step is a max pool of one image with channels, whose windows are all inside the padded image."""
    rounds_up = step.kwargs.get("ceil_mode", step.args[5] if len(step.args) > 5 else False)
    return step.op == "max_pool2d" and len(step.shape) == 4 and step.shape[0] == 1 and not rounds_up and not step.kwargs


def selects_values(step: Step) -> bool:
    """Return whether a step is the maximum itself, not where it is."""
    return step.item in (None, 0)


register(Rule(maximum_bounds, relax=select, substitute_relaxed=substitute), "max_pool2d", when=pools_images)
register(Rule(maximum_bounds), *MAXIMA, when=selects_values)
