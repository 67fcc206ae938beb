"""Exact samples of the discrete Gaussian distribution, P(x) ∝ exp(−x² / (2σ²)) on the integers, for an integer σ².

The discrete Gaussian as noise is that of Canonne, Kamath and Steinke ("The discrete Gaussian for differential
privacy", NeurIPS 2020). Their sampler rejects one number at a time. This one samples all at once by rejection from a
step function (Ahrens, Computing 1995). The integers are divided into blocks of 2^p. A slot of a table names a block,
and the p next bits an integer x in it. The remaining bits are the height, a uniform number that is compared with the
acceptance probability c exp(−x²/(2σ²)) / n, where n is the number of the block's slots. Slots are counted such that
no probability exceeds 1, so the accepted integers have exactly the distribution that is asked for.

No result depends on a rounding error. A comparison is decided by integers that bound the probabilities of the block,
else by float64 with a margin that is far above its errors, else by decimal arithmetic and 192 further random bits.
Only the tails beyond 13σ are missing, of probability 1e−38.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..errors import require
from ..native import private as native

SLOT_BITS = 14
TAIL = 13  # standard deviations that the blocks reach
BLOCKS_PER_DEVIATION = 16  # at least, where σ is so large
MARGIN = 2.0**-30  # relative; the error of the float64 probabilities is below 2^−44
FURTHER_BITS = 192
MAX_VARIANCE = 1 << 68  # leaves 20 bits or more for the height
DIGITS = Context(prec=100)
REJECTED, ACCEPTED, CLOSE = 0, 1, 2  # verdicts on a proposal; `give_verdicts` computes with these numbers


@dataclass(frozen=True, eq=False)
class NoiseTable:
    """The step function for one variance: which block each slot names, and the probabilities within the blocks."""

    variance: int
    offset_bits: int  # p
    first_block: int
    scale: float  # c
    slots: Tensor  # (2^14,) int16: the block of each slot; the last block rejects all
    counts: Tensor  # n of each block, as float64
    limits: tuple[Tensor, Tensor]  # heights below the first are accepted, from the second on rejected

    @staticmethod
    @lru_cache(maxsize=16)
    def of(variance: int) -> NoiseTable:
        """Return the table of a variance, which is built once."""
        return build_table(variance)

    @property
    def height_bits(self) -> int:
        """Return the number of bits of a word that are the height."""
        return 64 - SLOT_BITS - self.offset_bits

    @property
    def acceptance_rate(self) -> float:
        """Return the expected share of accepted proposals."""
        return self.scale * math.sqrt(2 * math.pi * self.variance) / (1 << (SLOT_BITS + self.offset_bits))


def build_table(variance: int) -> NoiseTable:
    """Return the table of a variance: slots for each block by its largest probability, rounded up."""
    require(
        1 <= variance <= MAX_VARIANCE,
        f"the variance of discrete noise lies in 1 … 2^68 grid units², got {variance:g}: lower σ or the clipping norm.",
    )
    deviation = math.sqrt(variance)
    offset_bits = max(math.floor(math.log2(deviation / BLOCKS_PER_DEVIATION)), 0)
    width = 1 << offset_bits
    last = math.ceil(TAIL * deviation / width)
    start = np.arange(-last, last, dtype=np.float64) * width
    end = start + width - 1
    nearest, farthest = np.where(start >= 0, start, -end), np.where(start >= 0, end, -start)
    highest, lowest = (np.exp(-(x**2) / (2 * float(variance))) for x in (nearest, farthest))
    scale = largest_scale(highest)
    counts = slot_counts(highest, scale)
    slots = np.repeat(np.arange(len(counts) + 1), [*counts, (1 << SLOT_BITS) - counts.sum()])
    heights = 2.0 ** (64 - SLOT_BITS - offset_bits)
    accept_below = np.floor(heights * scale * lowest / counts * (1 - MARGIN))
    reject_from = np.ceil(np.minimum(heights * scale * highest / counts * (1 + MARGIN), heights))
    limits = tuple(torch.from_numpy(np.append(limit, 0.0).astype(np.int64)) for limit in (accept_below, reject_from))
    return NoiseTable(
        variance,
        offset_bits,
        -last,
        scale,
        torch.from_numpy(slots.astype(np.int16)),
        torch.from_numpy(np.append(counts, 1).astype(np.float64)),
        (limits[0], limits[1]),
    )


def slot_counts(highest: np.ndarray, scale: float) -> np.ndarray:
    """Return the slots of each block: at least scale · highest, and at least one."""
    return np.maximum(np.ceil(scale * highest * (1 + MARGIN)), 1).astype(np.int64)


def largest_scale(highest: np.ndarray) -> float:
    """Return the largest scale, within a thousandth, for which the blocks do not need more slots than there are."""
    low, high = 0.0, float(1 << SLOT_BITS)
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if slot_counts(highest, middle).sum() > 1 << SLOT_BITS else (middle, high)
    return low


def sample_discrete_gaussian(
    count: int, table: NoiseTable, draw: Callable[[int], Tensor], draw_integer: Callable[[int], int]
) -> Tensor:
    """Return int64 samples: the first `count` proposals, where the rejected ones are replaced by further ones in order.

    `draw` returns so many random words of 64 bits, `draw_integer` a random integer of so many bits.
    """
    spare = math.ceil(1.02 * count * (1 / table.acceptance_rate - 1) + 6 * math.sqrt(count))  # enough but for 1 in 10⁵
    proposals, accepted = propose(draw(count + spare), table, draw_integer)
    samples, missing = proposals[:count], (~accepted[:count]).nonzero().squeeze(1)
    further = proposals[count:][accepted[count:]]
    while True:
        samples[missing[: len(further)]] = further[: len(missing)]
        missing = missing[len(further) :]
        if not len(missing):
            return samples
        proposals, accepted = propose(draw(2 * len(missing)), table, draw_integer)
        further = proposals[accepted]


def propose(words: Tensor, table: NoiseTable, draw_integer: Callable[[int], int]) -> tuple[Tensor, Tensor]:
    """Return the integer that each word proposes, and whether it is accepted."""
    values, verdicts = propose_by_block(words, table)
    close = (verdicts == CLOSE).nonzero().squeeze(1)
    if len(close):
        verdicts[close] = compare_heights(words[close], values[close], table, draw_integer)
    return values, verdicts == ACCEPTED


def propose_by_block(words: Tensor, table: NoiseTable) -> tuple[Tensor, Tensor]:
    """Return the integer that each word proposes, and the verdict that the limits of its block give."""
    values, verdicts = torch.empty_like(words), torch.empty_like(words, dtype=torch.uint8)
    bits = SLOT_BITS, table.offset_bits
    if not native.propose_noise(words, table.slots, table.limits, bits, table.first_block, values, verdicts):
        block, height = split_words(words, table)
        offset = (words >> SLOT_BITS) & ((1 << table.offset_bits) - 1)
        torch.add(offset, block + table.first_block, alpha=1 << table.offset_bits, out=values)
        accept_below, reject_from = (limit.to(words.device)[block] for limit in table.limits)
        verdicts = give_verdicts(height < accept_below, height >= reject_from)
    return values, verdicts


def give_verdicts(is_accepted: Tensor, is_rejected: Tensor) -> Tensor:
    """Return the verdicts that two masks give; what is in neither is close."""
    return torch.full_like(is_accepted, CLOSE, dtype=torch.uint8).sub_(is_accepted.byte()).sub_(is_rejected.byte() * 2)


def split_words(words: Tensor, table: NoiseTable) -> tuple[Tensor, Tensor]:
    """Return the block that the slot of each word names, and the height."""
    block = table.slots.to(words.device)[words & ((1 << SLOT_BITS) - 1)].long()
    return block, (words >> (SLOT_BITS + table.offset_bits)) & ((1 << table.height_bits) - 1)


def compare_heights(words: Tensor, values: Tensor, table: NoiseTable, draw_integer: Callable[[int], int]) -> Tensor:
    """Return the verdict on each proposal by its probability, in float64 where that is certain and else in decimals."""
    block, height = split_words(words, table)
    counts = table.counts.to(words.device)[block]
    chance = torch.exp(values.double() ** 2 / (-2.0 * table.variance)) * (table.scale / counts)
    chance *= 2.0**table.height_bits
    verdicts = give_verdicts((height + 1) <= chance * (1 - MARGIN), height >= chance * (1 + MARGIN))
    for at in (verdicts == CLOSE).nonzero().squeeze(1).tolist():
        verdicts[at] = compare_exactly(int(height[at]), int(values[at]), int(counts[at]), table, draw_integer)
    return verdicts


def compare_exactly(height: int, value: int, count: int, table: NoiseTable, draw_integer: Callable[[int], int]) -> int:
    """Return the verdict on one proposal with further bits of its height, in decimal arithmetic of 100 digits."""
    exponent = DIGITS.divide(Decimal(-value * value), Decimal(2 * table.variance))
    chance = DIGITS.divide(DIGITS.multiply(DIGITS.exp(exponent), Decimal(table.scale)), Decimal(count))
    uniform = (height << FURTHER_BITS) + draw_integer(FURTHER_BITS)
    size = Decimal(1 << (table.height_bits + FURTHER_BITS))
    return ACCEPTED if Decimal(uniform) < DIGITS.multiply(chance, size) else REJECTED
