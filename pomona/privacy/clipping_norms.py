"""The norms to which examples are clipped: together or by layer, constant, on a ramp, or adapted to the gradients.

The gradient of an example is clipped to a joint norm C. With layers it is clipped to C_l in each layer, where the C_l²
add up to C², so the joint norm is still at most C and the noise is the same σC in every coordinate (McMahan et al.,
ICLR 2018). A norm that is fixed in advance for every step costs nothing: noise and sensitivity scale with it.

A norm that adapts follows a quantile γ of the examples' norms (Andrew et al., NeurIPS 2021): each step also releases
how many examples stay whole, and C ← C exp(−η (share − γ)). An example adds 1 to this count if it stays whole and −1
if it is clipped. Within 1/16 of C it adds something in between, so that a rounding error of a norm cannot move the
count by 2. In units of the grid the count has the sensitivity 2²¹, as the gradient has, so it gets discrete noise too.

Gradient and counts are one release. With noise of z times its sensitivity on each of L counts, and of σ′ on the
gradient, the vector over the noise has a sensitivity of √(1/σ′² + L/z²). It costs what a gradient with noise of σ costs
if 1/σ² = 1/σ′² + L/z². So the budget is solved for σ, and σ′, which is larger, follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import PomonaError, require
from ..registry import validate_type
from .budget import Budget
from .clipping import MAX_CLIP, MIN_CLIP, OTHER_ROWS, UNITS, GradientGrid
from .outer_products import RowGradients
from .product_sums import ProductShape, ProductSum
from .ramp import CONSTANT, Ramp, RampLike
from .random_source import Source

COUNT_UNITS = int(UNITS * (1 - OTHER_ROWS)) - 1  # of an example; the rest is for rounding and other rows' changes
COUNT_BAND = 1 / 16  # of C: from a norm so far below to one so far above, an example passes from whole to clipped
COUNT_NOISE = 1 / 20  # of the batch size, for a single count: the deviation that Andrew et al. (2021) propose
MIN_LAYER_SHARE = 1 / 64  # of the largest layer's norm: a smaller one would be lost in the rounding to the grid


@dataclass(frozen=True)
class Clipping:
    """How examples are clipped. By default the whole gradient has one norm, which is constant.

    Args:
        layers: whether each layer is clipped on its own: all with the same norm, or in given proportions by the name of
            the layer.
        ramp: the factor of the norms in each step.
        quantile: the share of examples that shall stay whole. The norms then adapt to it.
        rate: η, how fast norms adapt.
        count_noise: standard deviation of the noise of a count, in examples; by default a 20th of the batch size, times
            the root of the number of layers.
    """

    layers: bool | Mapping[str, float] = False
    ramp: RampLike = CONSTANT
    quantile: float | None = None
    rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ramp", Ramp.of(self.ramp))
        require(isinstance(self.layers, bool | Mapping), f"layers is true, false or proportions, got {self.layers!r}.")
        shares = self.layers.values() if isinstance(self.layers, Mapping) else ()
        require(
            all(isinstance(share, int | float) and 0 < share < math.inf for share in shares),
            f"the proportions of layers must be above 0 and finite, got {list(shares)}.",
        )
        require(
            self.quantile is None or 0 < self.quantile < 1,
            f"quantile is the share of examples that stay whole, in (0, 1), got {self.quantile}.",
        )
        require(
            self.quantile is None or self.factors.is_constant,
            "norms that adapt to a quantile have no ramp: leave out one of the two.",
        )
        require(0 < self.rate < math.inf, f"the rate of adaptive norms must be above 0, got {self.rate:g}.")
        require(
            self.count_noise is None or (self.quantile is not None and 0 < self.count_noise < math.inf),
            f"count_noise is for norms that adapt to a quantile, and above 0, got {self.count_noise}.",
        )

    @property
    def factors(self) -> Ramp:
        """Return the ramp."""
        assert isinstance(self.ramp, Ramp)
        return self.ramp

    @classmethod
    def of(cls, value: Clipping | Mapping[str, Any] | None) -> Clipping:
        """Return clipping options given as such, as their fields, or as None for the default."""
        if value is None or isinstance(value, Clipping):
            return value or cls()
        unknown = sorted(value.keys() - set(cls.__dataclass_fields__))
        require(
            not unknown,
            f"clipping has no option '{(unknown or [''])[0]}': it has {', '.join(cls.__dataclass_fields__)}.",
        )
        for key, hint in (("quantile", float | None), ("rate", float), ("count_noise", float | None)):
            validate_type(f"clipping.{key}", value.get(key, getattr(cls, key)), hint)
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """Return the options that are not the default, as values that JSON and TOML can hold."""
        values, default = asdict(self), asdict(Clipping())
        return {key: value for key, value in values.items() if value != default[key]}


@dataclass(frozen=True)
class LayerGrids:
    """The grids of layers that are clipped on their own, with one unit for all, and perhaps a count for each."""

    grids: tuple[GradientGrid, ...]
    parameters: tuple[int, ...]  # of each layer
    has_counts: bool

    def __post_init__(self) -> None:
        joint = sum(grid.units**2 for grid in self.grids)
        require(joint <= UNITS**2, f"the layers of an example have a joint norm of {math.isqrt(joint)} units.")

    @property
    def clip(self) -> float:
        """Return C, the joint norm."""
        return self.grids[0].clip

    def with_products(self, shapes: Sequence[ProductShape | None]) -> LayerGrids:
        """Return the grids for parameters of which some have outer products, by the shape of each or None."""
        rest = iter(shapes)
        own = [[next(rest) for _ in range(count)] for count in self.parameters]
        return replace(self, grids=tuple(grid.with_products(each) for grid, each in zip(self.grids, own, strict=True)))

    def units_of_parameters(self, count: int) -> list[int]:
        """Return the norm of an example in the layer of each parameter, in units."""
        return [grid.units for grid, own in zip(self.grids, self.parameters, strict=True) for _ in range(own)]

    def add_clipped(self, gradients: Sequence[RowGradients], total: Tensor, sums: Sequence[ProductSum] = ()) -> None:
        """Add the clipped gradients of all rows and the counts behind them, as `GradientGrid.add_clipped` does."""
        start = place = 0
        rest = iter(sums)
        size = sum(grid.size for grid in self.grids)
        for k, (grid, count) in enumerate(zip(self.grids, self.parameters, strict=True)):
            own = [next(rest) for _ in grid.products]
            squares = grid.add_clipped(gradients[start : start + count], total[place : place + grid.size], own)
            start, place = start + count, place + grid.size
            if self.has_counts:
                total[size + k] += count_whole(squares, grid.clip * grid.units / UNITS)

    def to_gradient(self, total: Tensor, divisor: float) -> Tensor:
        """Return a sum of units as a float64 gradient, divided by the batch size."""
        return self.grids[0].to_gradient(total, divisor)

    def noise_variance(self, sigma: float) -> int:
        """Return the variance of the noise in units², for a noise multiplier σ."""
        return self.grids[0].noise_variance(sigma)


def count_whole(squares: Tensor, clip: float) -> Tensor:
    """Return in units how many more examples of these squared norms stay whole than are clipped."""
    norms = torch.nan_to_num(squares, nan=math.inf).sqrt()
    return ((1 - norms / clip) / COUNT_BAND).clamp(-1, 1).mul(COUNT_UNITS).round().long().sum()


def gradient_noise(sigma: float, count_noise: float, counts: int) -> float:
    """Return σ′, the noise multiplier of a gradient that is released with counts, at the cost of σ for all together.

    `count_noise` is z, the noise of a count over its sensitivity.
    """
    rest = sigma**-2 - counts * count_noise**-2
    require(
        rest > 0,
        f"counts with noise of {count_noise / 2:g} examples cost more than σ={sigma:g} allows: set count_noise to "
        f"more than {sigma * math.sqrt(counts) / 2:.4g} examples.",
    )
    return rest**-0.5 * (1 + 1e-12)


class ClippingNorms:
    """The norms of the layers in the steps of a run, and the noise of what is released with them."""

    def __init__(self, clipping: Clipping, clip: float, sizes: Mapping[str, int], budget: Budget) -> None:
        """Set the norms of the first step.

        Args:
            clip: C, the joint norm.
            sizes: the coordinates of each parameter by name, in order.
        """
        self.clipping, self.budget = clipping, budget
        self.layers = group_by_layer(sizes) if clipping.layers else {"": list(sizes.values())}
        shares = layer_shares(clipping.layers, list(self.layers))
        self.norms = [clip * share / math.hypot(*shares) for share in shares]
        deviation = COUNT_NOISE * budget.batch_size * math.sqrt(len(shares))
        # An example adds ½ or −½ to a count of examples, so its noise is twice as large over the sensitivity.
        self.count_noise = 2 * (deviation if clipping.count_noise is None else clipping.count_noise)
        if self.counts:  # the largest σ leaves them the least
            largest = budget.sigma * max(budget.noise_ramp.start, budget.noise_ramp.end)
            gradient_noise(largest, self.count_noise, self.counts)

    @property
    def counts(self) -> int:
        """Return the number of counts that a step releases."""
        return 0 if self.clipping.quantile is None else len(self.layers)

    @property
    def is_variable(self) -> bool:
        """Return whether the norms change."""
        return bool(self.counts) or not self.clipping.factors.is_constant

    def by_layer(self) -> dict[str, float]:
        """Return the current norm of each layer by its name, without the factor of a ramp."""
        return dict(zip(self.layers, self.norms, strict=True))

    def grid(self, step: int) -> GradientGrid | LayerGrids:
        """Return the grid of a step, numbered from 0."""
        factor = self.clipping.factors(step, self.budget.steps)
        norms = [factor * norm for norm in self.norms]
        clip, sizes = math.hypot(*norms), list(self.layers.values())
        if len(sizes) == 1 and not self.counts:
            return GradientGrid(clip, sum(sizes[0]))
        units = [math.floor(UNITS * (1 - 1e-12) * norm / clip) if len(norms) > 1 else UNITS for norm in norms]
        grids = tuple(GradientGrid(clip, sum(size), own) for size, own in zip(sizes, units, strict=True))
        return LayerGrids(grids, tuple(len(size) for size in sizes), bool(self.counts))

    def draw_noise(self, source: Source, grid: GradientGrid | LayerGrids, size: int, sigma: float) -> Tensor:
        """Return noise for a gradient and its counts, which together cost what a gradient with noise of σ costs."""
        if not self.counts:
            return source.discrete_gaussian(size, grid.noise_variance(sigma))
        own = gradient_noise(sigma, self.count_noise, self.counts)
        noise = source.discrete_gaussian(size, grid.noise_variance(own))
        return torch.cat([noise, source.discrete_gaussian(self.counts, grid.noise_variance(self.count_noise))])

    def adapt(self, counts: Tensor) -> None:
        """Move the norms towards the quantile, from noisy counts in units."""
        if self.clipping.quantile is None:
            return
        moved = []
        for norm, count in zip(self.norms, counts.tolist(), strict=True):
            share = 0.5 + count / COUNT_UNITS / 2 / self.budget.batch_size
            moved.append(norm * math.exp(-self.clipping.rate * (share - self.clipping.quantile)))
        highest = min(max(max(moved), MIN_CLIP), MAX_CLIP / len(moved))
        self.norms = [highest * max(norm / max(moved), MIN_LAYER_SHARE) for norm in moved]


def group_by_layer(sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the sizes of parameters by the name of the module that has them, in order."""
    layers: dict[str, list[int]] = {}
    last = None
    for name, size in sizes.items():
        layer = name.rpartition(".")[0] or name
        require(layer == last or layer not in layers, f"the parameters of '{layer}' do not follow each other.")
        layers.setdefault(layer, []).append(size)
        last = layer
    return layers


def layer_shares(layers: bool | Mapping[str, float], names: list[str]) -> list[float]:
    """Return the proportions of the norms of layers."""
    if not isinstance(layers, Mapping):
        return [1.0] * len(names)
    wrong = sorted(layers.keys() ^ set(names))
    if wrong:
        raise PomonaError(f"the layers of this model are {', '.join(names)}; missing or unknown: {', '.join(wrong)}.")
    return [float(layers[name]) for name in names]
