"""`export`: a network as a file of any format, loaded back, compared and timed."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..core.targets import unwrap
from ..errors import PomonaError, require, unknown_name_error
from ..sparse import decompress
from . import balanced, csr, onnx, openvino, safetensors, ticket, torch_export, two_of_four
from .comparison import (
    HALF_TOLERANCE,
    TOLERANCE,
    count_state_bytes,
    largest_difference,
    measure_latency,
    one_thread,
    require_close,
    share_of_zeros,
)
from .example import Example, flatten_outputs
from .files import Loaded, partial_file
from .report import ExportReport


@dataclass(frozen=True)
class Format:
    """A file format: how it is written, and the name of its file in the folder of a run."""

    write: Callable[..., Loaded]
    file_name: str
    traced: bool = False  # whether the network is run on the example to write the file
    on_cpu: bool = False  # whether the runtime of the format is one for the CPU
    companions: tuple[str, ...] = ()  # suffixes of further files

    @property
    def options(self) -> list[str]:
        """The names of the options."""
        parameters = inspect.signature(self.write).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


FORMATS = {
    "onnx": Format(onnx.write, "model.onnx", traced=True, on_cpu=True),
    "torch-export": Format(torch_export.write, "model.pt2", traced=True),
    "safetensors": Format(safetensors.write, "state.safetensors"),
    "csr": Format(csr.write, "csr.safetensors"),
    "2:4": Format(two_of_four.write, "two-of-four.safetensors"),
    "balanced": Format(balanced.write, "balanced.safetensors"),
    "ticket": Format(ticket.write, "model.ticket"),
    "openvino": Format(openvino.write, "model.xml", traced=True, on_cpu=True, companions=(".bin",)),
}


def export(
    model: nn.Module,
    file: Path | str,
    format: str = "onnx",
    example: Any = None,
    *,
    tolerance: float | None = None,
    seconds: float = 1.0,
    note: Callable[[str], Any] | None = None,
    **options: Any,
) -> ExportReport:
    """Write a network to a file, load the file, compare it with the network, time both, and return the report.

    The file appears complete and checked, or not at all: PomonaError is raised where the outputs for the example differ
    by more than the tolerance, and where the format cannot hold the network. The model itself is left as it is.

    Args:
        format: "onnx", "torch-export", "safetensors", "csr", "2:4", "balanced", "ticket" or "openvino".
        example: a tensor, a tuple of arguments, a dict of keyword arguments or the shape of one sample. Formats that
            hold only the state also work without one; then values are compared, and nothing is timed.
        tolerance: the largest difference of outputs that is accepted, relative to the largest output. The default is
            1e-4, and 2e-2 where values are stored in half precision.
        seconds: the time for which the network and the file are timed, in turns.
        note: what is called with a sentence for each thing that was not gained; `warnings.warn` by default.
        options: those of the format. `architecture` names the network for `pm.load` (safetensors, csr, 2:4, balanced,
            ticket); `dynamic_batch=False` fixes the number of samples and `pack=False` stores zeros (onnx, openvino);
            `dtype` is the type of stored values (balanced, openvino); `policy` and `block` are those of `pm.compress`
            (balanced); `pruner` is the one that has drawn the weights (ticket).
    """
    if format not in FORMATS:
        raise unknown_name_error("format", format, FORMATS)
    chosen, path = FORMATS[format], Path(file)
    for option in options.keys() - set(chosen.options):
        taken = ", ".join(name for name in chosen.options if name != "seconds") or "none"
        raise PomonaError(f"the format {format} has no option {option}; its options: {taken}.")
    require(not chosen.traced or example is not None, f"the format {format} needs example=, an input of the network.")
    if "seconds" in chosen.options:
        options["seconds"] = seconds
    network, given = prepare(model, example, chosen.on_cpu)
    latency: dict[str, float] = {}
    with partial_file(path, *chosen.companions) as partial, one_thread():
        loaded = chosen.write(network, given, partial, **options)
        limit = tolerance if tolerance is not None else HALF_TOLERANCE if loaded.half else TOLERANCE
        difference = None
        if given is not None:
            difference = compare(network, loaded, given)
            require_close(str(path), difference, limit)
            calls = [lambda: given.call(network), lambda: loaded.run(given)]
            times = measure_latency(calls, given.device, seconds)
            latency = dict(zip(("before", "after"), times, strict=True))
        size = sum(part.stat().st_size for part in (partial, *map(partial.with_suffix, chosen.companions)))
    plain = decompress(network)
    report = ExportReport(
        format=format,
        file=str(path),
        bytes=size,
        state_bytes=count_state_bytes(plain),
        zeros=share_of_zeros(plain),
        packed=loaded.packed,
        difference=difference,
        tolerance=limit,
        runtime=loaded.runtime,
        batch=None if given is None else given.batch,
        latency=latency,
        details=loaded.details,
        compression=loaded.compression,
        reason=loaded.reason,
    )
    for sentence in report.warnings:
        warnings.warn(sentence, stacklevel=2) if note is None else note(sentence)
    return report


def prepare(model: nn.Module, example: Any, on_cpu: bool) -> tuple[nn.Module, Example | None]:
    """Return a copy of a network in evaluation mode and its example, both on the CPU where that is asked for.

    The copy of a Hugging Face network returns no cache of keys and values, which are no tensors.
    """
    network = copy.deepcopy(unwrap(model)).eval()
    given = None if example is None else Example.create(example, network)
    if getattr(getattr(network, "config", None), "use_cache", False):
        network.config.use_cache = False  # type: ignore[union-attr]
    if on_cpu:
        network, given = network.cpu(), given and given.to("cpu")
    return network, given


def compare(network: nn.Module, loaded: Loaded, example: Example) -> float:
    """Return the largest difference of a loaded file's outputs, also for one sample more where it takes any number."""
    examples = [example, example.resize(example.batch + 1)] if loaded.dynamic_batch else [example]
    return max(
        largest_difference(list(flatten_outputs(given.call(network)).values()), loaded.run(given)) for given in examples
    )
