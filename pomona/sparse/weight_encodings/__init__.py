"""Encodings of sparse weights in files: a weight as a few smaller tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import require, unknown_name_error
from . import csr, two_of_four


class Encoding(Protocol):
    """What a module of this package offers."""

    def encode(self, weight: Tensor) -> dict[str, Tensor] | None:
        """Return the parts of a weight by name, or None for a weight that the encoding cannot hold."""

    def decode(self, parts: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
        """Return the weight of the parts; raise PomonaError for parts that are not those of such a weight."""


ENCODINGS: dict[str, Encoding] = {"csr": csr, "2:4": two_of_four}


def encode_tensors(tensors: Mapping[str, Tensor], name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a state with every weight encoded that becomes smaller, and the description of those weights.

    The part P of a weight W is the tensor "W.P". Weights are floating-point tensors of at least two dimensions.
    """
    stored: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for key, tensor in tensors.items():
        is_weight = tensor.ndim > 1 and tensor.is_floating_point() and tensor.numel() > 0
        parts = ENCODINGS[name].encode(tensor) if is_weight else None
        if parts is None or sum(part.nbytes for part in parts.values()) >= tensor.nbytes:
            stored[key] = tensor
            continue
        stored |= {f"{key}.{part}": value for part, value in parts.items()}
        described[key] = {"encoding": name, "shape": list(tensor.shape), "parts": list(parts)}
    return stored, described


def decode_tensors(
    stored: Mapping[str, Tensor], described: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Return the state whose weights `encode_tensors` has encoded; `shapes` are those that the model expects.

    A shape is compared with the model's before anything of that size is made.
    """
    tensors = dict(stored)
    for key, entry in described.items():
        shape = torch.Size(entry["shape"])
        expected = shapes.get(key)
        require(expected is not None, f"the file has {key}, and the model has not.")
        require(shape == expected, f"the file has {key} as {tuple(shape)}, the model as {tuple(expected or ())}.")
        if entry["encoding"] not in ENCODINGS:
            raise unknown_name_error("encoding", entry["encoding"], ENCODINGS)
        parts = {part: tensors.pop(f"{key}.{part}") for part in entry["parts"]}
        tensors[key] = ENCODINGS[entry["encoding"]].decode(parts, shape)
    return tensors
