"""Balanced weights of few bits: the values of the balanced format as int8 or int4 codes, with scales.

A value is its code times a scale. All values of a row in `span` adjacent blocks share one scale. Codes of 8 bits are
stored like any values. Codes of 4 bits are stored two in a byte: that of row i of a group in the low half, and that of
row i + 16 in the high half.

With `activations="int8"`, products round the inputs to 8 bits too: the largest magnitude of every vector becomes 127.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import PomonaError, require
from .format import LANES, BalancedTensor, unpack_matrix, validate_packed_shapes

# The types of codes by name, with their bits, and the columns that share a scale unless told otherwise; None for all.
VALUE_TYPES: dict[str, tuple[int, int | None]] = {"int8": (8, None), "int4": (4, 256)}
CODE_BITS = {torch.int8: 8, torch.uint8: 4}  # by the dtype in which they are stored
ACTIVATION_BITS: dict[str | None, int] = {None: 0, "int8": 8}  # to which products round inputs; 0 is not at all
INPUT_LEVELS = 127.0  # the largest magnitude of an input of 8 bits
NEAREST_STEPS = 2  # floats on each side of a step that are tried too, because a product with it was rounded


@dataclass(frozen=True, eq=False)
class QuantizedBalancedTensor(BalancedTensor):
    """A packed balanced matrix whose values are codes of 8 or 4 bits times a scale."""

    format_name = "balanced_quantized"
    part_names = ("values", "indices", "scales")

    scales: Tensor  # groups of rows × spans × 32, float32
    span: int  # blocks that share a scale
    activations: str | None = None  # "int8" where products round the inputs

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        known = self.activations in ACTIVATION_BITS
        require(known, f"activations are left as they are, None, or rounded to 'int8', got {self.activations!r}.")
        validate_quantized(self.values, self.indices, self.scales, *self.sizes)

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return CODE_BITS[self.values.dtype]

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:  # type: ignore[override]
        """The numbers of rows and columns, the width of a block, the blocks that share a scale, and bits of inputs."""
        return (*self.matrix, self.block, self.span, ACTIVATION_BITS[self.activations])

    @property
    def metadata(self) -> dict[str, Any]:
        """The format, the shape, the width of a block, the blocks that share a scale, and how inputs are rounded."""
        rounding = {} if self.activations is None else {"activations": self.activations}
        return {"format": self.format_name, **super().metadata, "span": self.span, **rounding}

    @classmethod
    def from_parts(cls, parts: Sequence[Tensor], metadata: Mapping[str, Any]) -> QuantizedBalancedTensor:
        values, indices, scales = parts
        described = torch.Size(metadata["shape"]), metadata["block"]
        return cls(values, indices, *described, scales, metadata["span"], metadata.get("activations"))

    @classmethod
    @torch.no_grad()
    def from_dense(
        cls,
        weight: Tensor,
        block: int,
        values: str = "int8",
        group: int | None = None,
        activations: str | None = None,
    ) -> QuantizedBalancedTensor:
        """Return a float32 weight in packed form, rounded to codes of 8 or 4 bits.

        Every `group` columns of a row, rounded up to whole blocks, share a scale: by default the row for int8, and 256
        columns for int4. The scale gives the largest magnitude the largest code, so that no value changes by more than
        half a scale. Weights that are multiples of one step already, as DPF's `Quantize` leaves them, are stored
        exactly. With `activations="int8"` products round every input vector to 8 bits, which is faster for many vectors
        on a CPU and changes an input by up to 0.4 % of the largest one of its vector. Raise PomonaError for other names
        of `values` and `activations`, another dtype, and weights that are not finite.
        """
        require(values in VALUE_TYPES, f"quantised values are {' or '.join(VALUE_TYPES)}, got {values!r}.")
        require(weight.dtype == torch.float32, f"only float32 is quantised, got {weight.dtype}: use weight.float().")
        finite = bool(weight.isfinite().all())
        require(finite, "a weight with an infinity or NaN has no scale: replace that value, or store floats.")
        require(group is None or group >= 1, f"a scale is for at least one column, got group={group}.")
        packed = BalancedTensor.from_dense(weight, block)
        bits, usual = VALUE_TYPES[values]
        columns = group or usual or packed.matrix[1]
        span = min(-(-columns // block), packed.values.shape[1])
        codes, scales = quantize(packed.values, bits, span)
        return cls(codes, packed.indices, packed.shape, block, scales, span, activations)

    @staticmethod
    def unpack(  # type: ignore[override]
        values: Tensor, indices: Tensor, scales: Tensor, rows: int, columns: int, block: int, span: int, bits: int = 0
    ) -> Tensor:
        return unpack_matrix(dequantize(values, scales, span), indices, rows, columns, block)

    def find_stored_values(self) -> Tensor:
        return unpack_codes(self.values) != 0

    def verify(self) -> QuantizedBalancedTensor:
        usable = bool((self.scales.isfinite() & (self.scales >= 0)).all())
        require(usable, "a scale of quantised values is negative, infinite or NaN.")
        super().verify()
        return self

    def to(self, *args: Any, **kwargs: Any) -> QuantizedBalancedTensor:
        """Return a copy on another device. Raise PomonaError for a dtype, which codes do not have."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        require(dtype is None, f"quantised values cannot become {dtype}: pack `dense()` in that dtype.")
        return self.from_parts([part.to(device) for part in self.parts], self.metadata)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape))
        rounded = "" if self.activations is None else f", {self.activations} activations"
        return (
            f"QuantizedBalancedTensor({shape}, {self.kept} of {self.block}, int{self.bits}, "
            f"{self.scales.numel():,} scales, {self.nbytes:,} bytes{rounded})"
        )


def quantize(values: Tensor, bits: int, span: int) -> tuple[Tensor, Tensor]:
    """Return the codes of packed values, groups × blocks × kept × 32, and the scales of `span` blocks each."""
    groups, blocks, kept, _ = values.shape
    levels = 2 ** (bits - 1) - 1
    padded = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, -blocks % span))
    spans = padded.reshape(groups, padded.shape[1] // span, span * kept, LANES)
    step = find_common_step(values, bits)
    scales = spans.abs().amax(2) / levels if step is None else step.expand(groups, spans.shape[1], LANES)
    divisor = torch.where(scales > 0, scales, 1).unsqueeze(2)
    codes = (spans / divisor).round().clamp(-levels, levels).to(torch.int8)
    return pack_codes(codes.view_as(padded)[:, :blocks], bits), scales.contiguous()


def find_common_step(values: Tensor, bits: int) -> Tensor | None:
    """Return the step of which all values are multiples, by at most the largest code of so many bits; else None.

    The largest magnitude is that of the largest code of some number of bits, as it is after `pm.Quantize`. It was
    rounded when it was multiplied by the step, so that the floats nearest to its quotient are tried too.
    """
    nonzero = values[values != 0]
    for fewer in range(2, bits + 1) if len(nonzero) else ():
        levels = 2 ** (fewer - 1) - 1
        step = nonzero.abs().amax() / levels
        if bool(((nonzero / step).round() * step - nonzero).abs().amax() > step * 1e-3):
            continue
        around = step.view(torch.int32) + torch.arange(-NEAREST_STEPS, NEAREST_STEPS + 1, device=values.device)
        for candidate in around.clamp(min=1).to(torch.int32).view(torch.float32):
            if torch.equal((nonzero / candidate).round().clamp(-levels, levels) * candidate, nonzero):
                return candidate
    return None


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return int8 codes, … × 32, as they are stored: codes of 4 bits as bytes, … × 16."""
    if bits == 8:
        return codes.contiguous()
    low, high = (codes & 15).to(torch.uint8).chunk(2, -1)
    return (low | high << 4).contiguous()


def unpack_codes(stored: Tensor) -> Tensor:
    """Return the int8 codes, … × 32, that `pack_codes` stored."""
    if CODE_BITS[stored.dtype] == 8:
        return stored
    nibbles = torch.cat([stored & 15, stored >> 4], -1)
    return (nibbles ^ 8).to(torch.int8) - 8


def dequantize(stored: Tensor, scales: Tensor, span: int) -> Tensor:
    """Return the values of stored codes, groups × blocks × kept × 32, in float32."""
    per_block = scales.repeat_interleave(span, 1)[:, : stored.shape[1]]
    return unpack_codes(stored).float() * per_block.unsqueeze(2)


def round_activations(x: Tensor, transposed: bool) -> Tensor:
    """Return x with every vector rounded to 8 bits, in float32 or wider; vectors are rows, or transposed columns.

    A vector with an infinity or NaN is returned as it is.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    vectors = wide.flatten(0, -2) if transposed else wide.flatten(1)
    largest = vectors.abs().amax(0 if transposed else 1, keepdim=True)
    factor = torch.where(largest > 0, INPUT_LEVELS / largest, 0)
    rounded = (vectors * factor).round() * (largest / INPUT_LEVELS)
    usable = factor.isfinite() & largest.isfinite()
    return torch.where(usable, rounded, vectors).view(wide.shape)


def validate_quantized(
    values: Tensor, indices: Tensor, scales: Tensor, rows: int, columns: int, block: int, span: int, bits: int = 0
) -> None:
    """Raise PomonaError unless the tensors are those of a quantised balanced matrix of this size."""
    if values.ndim != 4 or values.dtype not in CODE_BITS or scales.dtype != torch.float32:
        raise PomonaError(
            "quantised values are four-dimensional and of int8, or uint8 for codes of 4 bits, and scales of float32; "
            f"got {values.ndim} dimensions of {values.dtype} and {scales.dtype}."
        )
    stored = LANES * CODE_BITS[values.dtype] // 8
    if values.shape[3] != stored:
        raise PomonaError(
            f"{LANES} codes of {CODE_BITS[values.dtype]} bits take {stored} bytes, got {values.shape[3]}."
        )
    shape = torch.Size((*values.shape[:3], LANES))
    validate_packed_shapes(shape, indices.shape, torch.float32, indices.dtype, rows, columns, block)
    groups, blocks = values.shape[:2]
    if not 1 <= span <= blocks or scales.shape != (groups, -(-blocks // span), LANES):
        raise PomonaError(
            f"scales for every {span} of {blocks} blocks do not fit: {groups} groups of rows need one scale for each "
            f"span and row, got {tuple(scales.shape)}."
        )
    if bits not in ACTIVATION_BITS.values():
        raise PomonaError(f"inputs are rounded to 8 bits, or not at all (0), got {bits}.")
    if not all(part.is_contiguous() and part.device == values.device for part in (values, indices, scales)):
        raise PomonaError("quantised values, indices and scales must be contiguous and on one device.")
