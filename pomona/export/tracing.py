"""The traced program of a network, from which torch-export, ONNX and OpenVINO files are written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import PomonaError
from ..sparse import decompress
from .example import Example
from .files import first_sentence

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def trace(model: nn.Module, example: Example, dynamic_batch: bool) -> ExportedProgram:
    """Return the program of a network for any number of samples, or for that of the example.

    Raise PomonaError where `torch.export` cannot follow the network.
    """
    if dynamic_batch:
        example = example.resize(max(2, example.batch))  # torch takes a dimension of 1 for a constant
    shapes = example.dynamic_shapes() if dynamic_batch else None
    try:
        with ignored_warnings():
            return torch.export.export(model, example.args, example.kwargs, dynamic_shapes=shapes)
    except Exception as error:  # whatever a network's own code raises
        advice = "; dynamic_batch=False fixes the number of samples" if dynamic_batch else ""
        raise PomonaError(f"torch.export cannot trace the network: {first_sentence(error)}{advice}.") from error


@contextmanager
def ignored_warnings() -> Iterator[None]:
    """Ignore the warnings of tracers, which are about the code of networks and of torch's own layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_plain(model: nn.Module, example: Example) -> nn.Module:
    """Return a copy of a network without packed layers, with weights of the dtype that the example's call needs."""
    plain = decompress(model)
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    dtypes += [t.dtype for t in example.tensors if t.is_floating_point()]
    return plain.to(dtypes[0]) if dtypes else plain.float()


def match_inputs(names: Sequence[str], example: Example) -> dict[str, Any]:
    """Return the example's tensors as arrays, by the names of a file's inputs."""
    arrays = example.map(lambda tensor: tensor.detach().cpu().numpy())
    if arrays.kwargs:
        return {name: arrays.kwargs[name] for name in names}
    tensors = [value for value, given in zip(arrays.args, example.args, strict=True) if isinstance(given, Tensor)]
    return dict(zip(names, tensors, strict=True))
