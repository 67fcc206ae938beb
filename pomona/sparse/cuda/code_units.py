"""The order in which code_gather.cu reads a balanced matrix of int4 or int8 codes: units of a few blocks of 32 rows.

The words of a row in a unit are those of its indices, of its codes, and of its scales, as code_gather.cu describes.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..format import LANES, unpack_indices
from ..quantized import unpack_codes

WORD_BITS = 32
LOAD_WORDS = 4  # of 16 bytes, which a lane loads at a time
MIN_INDEX_BITS = 4  # of an index in a unit
MAX_UNIT_BLOCKS = 32
MAX_UNIT_WORDS = 48  # of a lane, which it holds in registers
ARRANGED_GROUPS = 32  # groups of rows that are arranged at a time, which bounds the memory


class UnitLayout(NamedTuple):
    """The sizes of a unit; `macros` gives them to the kernel."""

    kept: int
    block: int
    code_bits: int
    unit_blocks: int
    scale_blocks: int  # blocks of a unit that share a scale

    @property
    def index_bits(self) -> int:
        """The bits of an index."""
        return max(MIN_INDEX_BITS, (self.block - 1).bit_length())

    @property
    def loads(self) -> int:
        """The loads of a lane and a unit."""
        survivors = self.unit_blocks * self.kept
        words = sum(-(-survivors // (WORD_BITS // bits)) for bits in (self.index_bits, self.code_bits))
        return -(-(words + self.unit_blocks // self.scale_blocks) // LOAD_WORDS)

    @property
    def macros(self) -> dict[str, int]:
        """The macros of code_gather.cu."""
        return {name.upper(): value for name, value in self._asdict().items()} | {"INDEX_BITS": self.index_bits}

    def slices(self, blocks: int) -> int:
        """Return the number of units of a group of rows with this many blocks."""
        return -(-blocks // self.unit_blocks)


def choose_layout(kept: int, block: int, code_bits: int, blocks: int, span: int) -> UnitLayout:
    """Return the layout that takes the fewest bytes; of equal ones that with the largest units."""
    sizes = [size for shift in range(6) if (size := MAX_UNIT_BLOCKS >> shift) < 2 * blocks]
    layouts = [make_layout(kept, block, code_bits, size, blocks, span) for size in sizes]
    fitting = [layout for layout in layouts if layout.loads * LOAD_WORDS <= MAX_UNIT_WORDS] or layouts[-1:]
    return min(fitting, key=lambda layout: layout.slices(blocks) * layout.loads)


def make_layout(kept: int, block: int, code_bits: int, unit_blocks: int, blocks: int, span: int) -> UnitLayout:
    """Return the layout with units of this many blocks; a scale of all blocks is repeated in each unit."""
    scale_blocks = unit_blocks if span >= blocks else gcd(span, unit_blocks)
    return UnitLayout(kept, block, code_bits, unit_blocks, scale_blocks)


@torch.no_grad()
def arrange_units(values: Tensor, indices: Tensor, scales: Tensor, block: int, span: int, layout: UnitLayout) -> Tensor:
    """Return the words of all units, groups × slices × loads × 32 × 4, of a quantised matrix."""
    (groups, blocks), slices = values.shape[:2], layout.slices(values.shape[1])
    first_blocks = torch.arange(0, slices * layout.unit_blocks, layout.scale_blocks, device=values.device)
    own_spans = (first_blocks // span).clamp(max=scales.shape[1] - 1)
    units = torch.empty(groups, slices, layout.loads, LANES, LOAD_WORDS, dtype=torch.int32, device=values.device)
    for first in range(0, groups, ARRANGED_GROUPS):
        some = slice(first, first + ARRANGED_GROUPS)
        missing = slices * layout.unit_blocks - blocks
        codes, index = (
            pad(part, (0, 0, 0, 0, 0, missing)).view(len(part), slices, -1, LANES)
            for part in (unpack_codes(values[some]).long(), unpack_indices(indices[some], layout.kept, block))
        )
        own_scales = scales[some][:, own_spans].view(len(codes), slices, -1, LANES)
        words = [
            pack_words(index, layout.index_bits),
            pack_words(codes + (1 << layout.code_bits - 1), layout.code_bits),
            own_scales.view(torch.int32),
        ]
        joined = torch.cat(words, 2)
        joined = pad(joined, (0, 0, 0, layout.loads * LOAD_WORDS - joined.shape[2]))
        units[some] = joined.view(len(codes), slices, layout.loads, LOAD_WORDS, LANES).transpose(3, 4)
    return units


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers, … × count × 32, in as few words as hold them: … × words × 32."""
    per_word = WORD_BITS // bits
    padded = pad(numbers, (0, 0, 0, -numbers.shape[-2] % per_word)).unflatten(-2, (-1, per_word))
    shifts = torch.arange(0, bits * per_word, bits, device=numbers.device).view(-1, 1)
    words = (padded << shifts).sum(-2)
    return (words - (words >> WORD_BITS - 1 << WORD_BITS)).to(torch.int32)
