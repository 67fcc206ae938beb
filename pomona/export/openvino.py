"""The format `openvino`: OpenVINO's intermediate representation, an .xml file and a .bin file beside it.

Sparse weights are stored as values and gaps, from which OpenVINO restores them when it compiles the network. Its CPU
plugin can also keep the weights of matrix products packed at run time (`CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE`), but
only 8-bit weights on processors with AMX, so that it is tried there and kept where it is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import PomonaError, require, unknown_name_error
from ..sparse.balanced_blocks import MIN_SPARSITY
from ..sparse.compression_report import TIMING_TOLERANCE
from .comparison import measure_latency
from .example import Example
from .files import Loaded, first_sentence
from .gap_coding import encode_gaps
from .tracing import ignored_warnings, make_plain, match_inputs, trace

DECOMPRESSION = "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE"
# Without the hint the plugin computes in bfloat16 where the processor can.
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
DTYPES = {torch.float32: False, torch.float16: True}  # whether constants are stored in half precision
REASON = "no weight has enough zeros to be smaller without them"


def write(
    model: nn.Module,
    example: Example,
    file: Path,
    *,
    dynamic_batch: bool = True,
    pack: bool = True,
    dtype: torch.dtype = torch.float32,
    seconds: float = 1.0,
) -> Loaded:
    """Write a network for OpenVINO. `dtype=torch.float16` stores half-precision weights; `pack=False` dense ones."""
    openvino = import_openvino()
    require(file.suffix == ".xml", f"an OpenVINO file ends in .xml, and its weights are beside it; got '{file.name}'.")
    if dtype not in DTYPES:
        raise unknown_name_error("dtype of OpenVINO weights", dtype, map(str, DTYPES))
    network = convert(make_plain(model, example), example, dynamic_batch)
    packed = pack_weights(network, half=DTYPES[dtype]) if pack else None
    openvino.save_model(network, file, compress_to_fp16=DTYPES[dtype])
    run = compile_file(file, {})
    details = {"sparse_decompression": "off: it needs a processor with AMX, and acts on 8-bit weights only"}
    if torch.cpu._is_amx_tile_supported():
        sparse = compile_file(file, {DECOMPRESSION: MIN_SPARSITY})
        times = measure_latency([lambda: run(example), lambda: sparse(example)], torch.device("cpu"), seconds)
        faster = times[0] > TIMING_TOLERANCE * times[1]
        run = sparse if faster else run
        outcome = f"on ({DECOMPRESSION}={MIN_SPARSITY})" if faster else "off: it is no faster here"
        details = {"sparse_decompression": f"{outcome}, {times[0] / times[1]:.2f}×"}
    runtime = f"OpenVINO {openvino.__version__.split('-')[0]}"
    return Loaded(run, runtime, packed, REASON, details, dynamic_batch=dynamic_batch, half=DTYPES[dtype])


def convert(model: nn.Module, example: Example, dynamic_batch: bool) -> Any:
    """Return the OpenVINO model of a network.

    Networks with recurrent layers are traced by TorchScript: OpenVINO unrolls those of an exported program into one
    product for each step, which is many times slower.
    """
    openvino = import_openvino()
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    program = None if recurrent else trace(model, example, dynamic_batch)
    try:
        with ignored_warnings():
            if program is not None:
                return openvino.convert_model(program)
            return openvino.convert_model(model, example_input=example.kwargs or example.args)
    except Exception as error:  # its own classes of errors have no common base
        raise PomonaError(f"OpenVINO cannot convert the network: {first_sentence(error)}.") from error


def pack_weights(network: Any, half: bool) -> int:
    """Store every constant that becomes smaller by it as values and gaps; return their number."""
    from openvino import opset13 as operators

    count = 0
    for node in network.get_ops():
        array = node.get_data() if node.get_type_name() == "Constant" else None
        if array is None or array.dtype != np.float32 or is_recurrent_weight(node):
            continue
        coded = encode_gaps(array.astype(np.float16) if half else array)
        if coded is None:
            continue
        values, gaps = coded
        first, size = operators.constant(np.int64(0)), operators.constant(np.array([array.size]))
        ends = operators.cum_sum(operators.convert(operators.constant(gaps), "i64"), first)
        positions = operators.subtract(ends, operators.constant(np.int64(1)))
        kept = operators.convert(operators.constant(values), "f32")
        zeros = operators.broadcast(operators.constant(np.float32(0)), size)
        flat = operators.scatter_elements_update(zeros, positions, kept, first)
        weight = operators.reshape(flat, operators.constant(np.array(array.shape)), False)
        node.output(0).replace(weight.output(0))
        count += 1
    return count


def is_recurrent_weight(constant: Any) -> bool:
    """Return whether a recurrent layer, whose weights OpenVINO wants as constants, reads a constant."""
    return any(
        given.get_node().get_type_name().endswith("Sequence") for given in constant.output(0).get_target_inputs()
    )


def compile_file(file: Path, properties: dict[str, Any]) -> Callable[[Example], list[Tensor]]:
    """Return a function that runs a file in OpenVINO, on one thread of the CPU."""
    compiled = import_openvino().Core().compile_model(file, "CPU", PROPERTIES | properties)
    names = [given.any_name for given in compiled.inputs]

    def run(example: Example) -> list[Tensor]:
        found = compiled(list(match_inputs(names, example).values()), share_inputs=True)
        return [torch.from_numpy(found[output]) for output in compiled.outputs]

    return run


def import_openvino() -> Any:
    """Return the package; raise PomonaError where it is missing."""
    try:
        import openvino
    except ImportError as error:
        raise PomonaError("the format openvino needs that package: pip install 'pomona[openvino]'.") from error
    return openvino
