"""The noisy top-k of GIP (Yang et al., 2023): index sets drawn around the largest entries of a gradient.

Of d coordinates m are kept. Let I₀ be the m largest. A set I in which i entries of I₀ are replaced has the probability
e^{−2θi} / ψ(θ), and ψ is the same for every I₀. One draw is therefore ε-differentially private with
ε = 2θ min(m, d − m), whatever an example does to the gradient. Over groups the costs add. The properties of the draws
are computed in `pomona.theory.gip`.

Rounding errors do not weaken the guarantee. Those of the gradient only change which set is I₀, and the guarantee holds
for every I₀. The number of swapped entries is drawn by float64 probabilities, and where their errors could decide, by
decimal arithmetic and further random bits. The swapped entries are chosen by integers, and drawn again if two of these
are equal where it matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..errors import require
from ..patterns.selection import select_largest, select_largest_per_row
from ..theory import gip
from .discrete_gaussian import DIGITS, FURTHER_BITS
from .random_source import Purpose, Source

OUTSIDE_TOP = 1 << 62  # added to the 62-bit keys of the entries outside the top-k, so that they sort behind it
FALLBACK_GROUPS = (160, 192)  # of the authors, where their 256 does not divide the entries of a parameter
CDF_ERROR = 1e-9  # a bound on the error of the float64 distribution of swap counts


@dataclass(frozen=True)
class IndexMechanism:
    """A private top-k: it keeps approximately the largest entries of a gradient.

    Args:
        keep: the kept share as a float, or the kept count as an int.
        theta: θ of the mechanism. 0 draws at random; ∞ is the exact top-k, which is not private.
        epsilon: the ε that one draw may cost, in place of `theta`.
        group: entries of a group. Each group has a separate top-k with the same θ (the authors use 256). The last
            group may be shorter; an integer `keep` is the count of a full group. None is one group for all entries.
        leaves: the number of entries of each parameter, in their order. A group then lies within one parameter, as in
            the authors' code: it has `group` entries if they divide those of the parameter, else 160 or 192 if one of
            these does, else as many as make up equal groups but for the last. A group keeps at least one entry.
    """

    keep: float | int
    theta: float | None = None
    epsilon: float | None = None
    group: int | None = None
    leaves: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        is_share = isinstance(self.keep, float)
        require(
            0 < self.keep <= 1 if is_share else self.keep >= 1,
            f"keep is a share in (0, 1] as a float, or a count from 1 as an int, got {self.keep!r}.",
        )
        require(
            (self.theta is None) != (self.epsilon is None),
            "an index mechanism takes theta or epsilon: give exactly one of the two.",
        )
        for name, value in (("theta", self.theta), ("epsilon", self.epsilon)):
            require(value is None or value >= 0, f"{name} must not be negative, got {value}.")
        require(self.group is None or self.group >= 1, f"a group has 1 entry or more, got {self.group}.")
        require(self.leaves is None or is_share, f"with leaves, keep is a share as a float, got {self.keep!r}.")

    @torch.no_grad()
    def sample(self, gradient: Tensor, source: Source | None = None) -> Tensor:
        """Draw an index set and return it as a mask of the gradient's shape, true where an entry is kept."""
        source = source or Source(gradient.device)
        scores, masks, start = gradient.abs().flatten(), [], 0
        theta = self.theta_for(scores.numel())
        for count, size, kept in self.group_shapes(scores.numel()):
            part = scores[start : start + count * size].view(count, size)
            masks.append(sample_rows(part, kept, theta, source).flatten())
            start += count * size
        return (masks[0] if len(masks) == 1 else torch.cat(masks)).view(gradient.shape)

    def group_shapes(self, d: int) -> Iterator[tuple[int, int, int]]:
        """Yield (number of groups, entries of each, kept of each) for a vector of d: full groups, then the rest."""
        if self.leaves is not None:
            yield from self.leaf_shapes(d)
            return
        size = min(self.group or d, d)
        require(d > 0, "the gradient is empty: an index mechanism needs at least one entry.")
        share = self.keep if isinstance(self.keep, float) else self.keep / size
        require(share <= 1, f"keep={self.keep} is more than the {size} entries of a group: give at most {size}.")
        for count, entries in ((d // size, size), (1, d % size)):
            if count and entries:
                yield count, entries, round(share * entries)

    def leaf_shapes(self, d: int) -> Iterator[tuple[int, int, int]]:
        """Yield the same as `group_shapes`, with the groups of each parameter in turn."""
        assert self.leaves is not None
        require(sum(self.leaves) == d, f"the parameters have {sum(self.leaves)} entries, and the gradient has {d}.")
        for entries in self.leaves:
            size = leaf_group_size(entries, self.group or entries)
            for count, length in ((entries // size, size), (1, entries % size)):
                if count and length:
                    yield count, length, max(round(self.keep * length), 1)

    def groups(self, d: int) -> tuple[list[int], list[int]]:
        """Return the size of every group and the count it keeps, as `theory.gip` takes them."""
        shapes = [(size, kept) for count, size, kept in self.group_shapes(d) for _ in range(count)]
        return [size for size, _ in shapes], [kept for _, kept in shapes]

    def sensitivity(self, d: int) -> int:
        """Return the largest ‖I − I′‖₁ of two index sets of d entries: 2 Σ min(m, n − m) over the groups."""
        return sum(count * gip.sensitivity(size, kept) for count, size, kept in self.group_shapes(d))

    def theta_for(self, d: int) -> float:
        """Return θ for a vector of d entries; ∞ where only one index set exists, which costs nothing."""
        if self.epsilon is None:
            return self.theta or 0.0
        sensitivity = self.sensitivity(d)
        return self.epsilon / sensitivity if sensitivity else math.inf

    def cost(self, d: int) -> float:
        """Return the pure ε of one draw from d entries: 2θ Σ min(m, n − m) over the groups."""
        sensitivity = self.sensitivity(d)
        return self.theta_for(d) * sensitivity if sensitivity else 0.0

    def lost(self, d: int) -> float:
        """Return E[i] / m, the expected share of the true top-k that a draw misses; random sets miss 1 − m/d."""
        theta, shapes = self.theta_for(d), list(self.group_shapes(d))
        swapped = sum(count * gip.expected_swaps(theta, size, kept) for count, size, kept in shapes)
        return swapped / max(sum(count * kept for count, _, kept in shapes), 1)


def leaf_group_size(entries: int, group: int) -> int:
    """Return the entries of a group within a parameter: the first of the authors' sizes that divides it, or a part."""
    divisors = [size for size in (group, *FALLBACK_GROUPS) if size <= entries and entries % size == 0]
    return divisors[0] if divisors else math.ceil(entries / math.ceil(entries / group))


def sample_rows(scores: Tensor, kept: int, theta: float, source: Source) -> Tensor:
    """Draw one index set for each row of a score matrix and return the mask."""
    rows, size = scores.shape
    top = select_largest([scores], kept)[0] if rows == 1 else select_largest_per_row(scores, kept)
    if kept in (0, size) or math.isinf(theta):
        return top
    return swap_entries(top, kept, draw_swap_counts(theta, size, kept, rows, source), source)


def draw_swap_counts(theta: float, size: int, kept: int, rows: int, source: Source) -> Tensor:
    """Return how many entries each row swaps: i with probability P(i), drawn by inversion of the distribution.

    A number so close to a level of the float64 distribution that its error could matter is compared exactly.
    """
    start, levels = swap_count_cdf(theta, size, kept)
    edges = torch.from_numpy(levels).to(source.device)
    words = source.bits(rows, purpose=Purpose.SWAP_COUNTS)
    uniform = words.double() * 2.0**-63
    low, high = (torch.searchsorted(edges, uniform + shift, right=True) for shift in (-CDF_ERROR, CDF_ERROR))
    is_outside = (uniform < CDF_ERROR) | (uniform > 1 - CDF_ERROR)  # of the window of probable counts, perhaps
    counts = start + low
    for row in ((low != high) | is_outside).nonzero().squeeze(1).tolist():
        number = (int(words[row]) << FURTHER_BITS) + source.integer(FURTHER_BITS)
        counts[row] = invert_exactly(theta, size, kept, Fraction(number, 1 << (63 + FURTHER_BITS)))
    return counts


@lru_cache(maxsize=8)
def swap_count_cdf(theta: float, size: int, kept: int) -> tuple[int, np.ndarray]:
    """Return the first i with any mass, and P(i ≤ start + k) for each k but the last, where it is 1."""
    swaps = gip.swaps(theta, size, kept)
    return swaps.start, np.cumsum(swaps.p)[:-1]


@lru_cache(maxsize=4)
def exact_weights(theta: float, size: int, kept: int) -> tuple[list[Decimal], Decimal]:
    """Return C(m, i) C(n − m, i) e^{−2θi} for each i in decimals of 100 digits, and their sum."""
    decay, weights = DIGITS.exp(DIGITS.multiply(Decimal(-2), Decimal(theta))), [Decimal(1)]
    for i in range(min(kept, size - kept)):
        ratio = DIGITS.divide(Decimal((kept - i) * (size - kept - i)), Decimal((i + 1) ** 2))
        weights.append(DIGITS.multiply(DIGITS.multiply(weights[-1], ratio), decay))
    total = Decimal(0)
    for weight in weights:
        total = DIGITS.add(total, weight)
    return weights, total


def invert_exactly(theta: float, size: int, kept: int, uniform: Fraction) -> int:
    """Return the i with P(fewer than i) ≤ uniform < P(i or fewer), in decimals of 100 digits."""
    weights, total = exact_weights(theta, size, kept)
    wanted = DIGITS.divide(DIGITS.multiply(Decimal(uniform.numerator), total), Decimal(uniform.denominator))
    below = Decimal(0)
    for count, weight in enumerate(weights):
        below = DIGITS.add(below, weight)
        if wanted < below:
            return count
    return len(weights) - 1


def swap_entries(top: Tensor, kept: int, swapped: Tensor, source: Source) -> Tensor:
    """Replace `swapped` random entries of each row of a top-k mask by random entries outside of it.

    The entries are ordered by random keys, those of the top-k before the others. The positions from `swapped` to
    `kept + swapped` in this order are the new mask. If keys of 62 bits tie at its ends, so that it has another size,
    all keys are drawn again: which entries tie says nothing about the gradient.
    """
    while True:
        keys = source.bits(*top.shape).bitwise_right_shift_(1).add_(~top, alpha=OUTSIDE_TOP)
        first, last = order_statistics(keys, torch.stack([swapped, kept + swapped - 1], 1)).unbind(1)
        mask = (keys >= first[:, None]) & (keys <= last[:, None])
        if int(mask.sum()) == kept * len(top):
            return mask


def order_statistics(keys: Tensor, places: Tensor) -> Tensor:
    """Return the keys at the given places of each row in sorted order."""
    if keys.is_cuda:
        return keys.sort(dim=1).values.gather(1, places)
    # On a CPU, NumPy sorts and partitions much faster than torch.
    rows, wanted = keys.numpy(), places.numpy()
    ordered = np.partition(rows, wanted[0], axis=1) if len(rows) == 1 else np.sort(rows, axis=1)
    return torch.from_numpy(np.take_along_axis(ordered, wanted, 1))
