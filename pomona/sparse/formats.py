"""The packed storage formats by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import PomonaError
from .bitmap import BitmapTensor
from .blocks import BlockTensor
from .format import BalancedTensor
from .gaps import GapTensor
from .packed_tensor import PackedTensor
from .quantized import QuantizedBalancedTensor
from .two_of_four import TwoOfFourTensor
from .unstructured import UnstructuredTensor

FORMATS: dict[str, type[PackedTensor]] = {
    packed.format_name: packed
    for packed in (
        BalancedTensor,
        UnstructuredTensor,
        TwoOfFourTensor,
        BlockTensor,
        GapTensor,
        BitmapTensor,
        QuantizedBalancedTensor,
    )
}


def find_format(metadata: Mapping[str, Any]) -> type[PackedTensor]:
    """Return the format that a file's metadata of a weight names; metadata without a name is of the first format."""
    name = metadata.get("format", BalancedTensor.format_name)
    if name not in FORMATS:
        raise PomonaError(f"the file has a weight in the format {name!r}, and this pomona has {', '.join(FORMATS)}.")
    return FORMATS[name]
