"""The format `onnx`, by torch's exporter, with sparse weights stored without their zeros.

A sparse weight is the output of the function `pomona.UnpackGaps`, whose body is made of standard operators. ONNX
Runtime evaluates it once when it loads the file, so that the network runs as fast as with dense weights. (ONNX's own
`sparse_initializer` takes eight bytes for each index, a gap takes one.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import PomonaError, require
from .example import Example, flatten_outputs
from .files import Loaded
from .gap_coding import encode_gaps
from .tracing import ignored_warnings, make_plain, match_inputs, trace

DOMAIN, FUNCTION = "pomona", "UnpackGaps"
MAX_BYTES = 2**31 - 1  # of a protobuf
REASON = "no weight has enough zeros to be smaller without them"


def write(model: nn.Module, example: Example, file: Path, *, dynamic_batch: bool = True, pack: bool = True) -> Loaded:
    """Write a network that stock ONNX Runtime runs; weights of packed layers are restored as those of dense ones are.

    `pack=False` stores dense weights, for readers without model-local functions, such as OpenVINO's.
    """
    proto = convert(model, example, dynamic_batch)
    packed = pack_weights(proto) if pack else None
    size = proto.ByteSize()
    require(size <= MAX_BYTES, f"the network takes {size:,} bytes, and an ONNX file holds {MAX_BYTES:,}.")
    file.write_bytes(proto.SerializeToString())
    session = start_session(file)
    names = [given.name for given in session.get_inputs()]

    def run(example: Example) -> list[Tensor]:
        return [torch.from_numpy(array) for array in session.run(None, match_inputs(names, example))]

    details = {"inputs": names, "outputs": [given.name for given in session.get_outputs()]}
    return Loaded(run, f"ONNX Runtime {version()}", packed, REASON, details, dynamic_batch=dynamic_batch)


def convert(model: nn.Module, example: Example, dynamic_batch: bool) -> Any:
    """Return the ONNX model of a network."""
    import_packages()
    program = trace(make_plain(model, example), example, dynamic_batch)
    outputs = list(flatten_outputs(example.call(model)))
    try:
        with quiet_exporter(), ignored_warnings():
            made = torch.onnx.export(program, dynamo=True, verbose=False, output_names=outputs)
    except torch.onnx.OnnxExporterError as error:
        raise PomonaError(f"torch.onnx cannot convert the network: {str(error).strip().splitlines()[-1]}.") from error
    proto = made.model_proto  # type: ignore[union-attr]
    strip_metadata(proto)
    return proto


def strip_metadata(proto: Any) -> None:
    """Remove the notes of the exporter, which name the files and lines of the network's source."""
    del proto.graph.metadata_props[:]
    for part in (*proto.graph.node, *proto.graph.initializer, *proto.graph.input, *proto.graph.value_info):
        part.doc_string = ""
        del part.metadata_props[:]


def pack_weights(proto: Any) -> int:
    """Store every initializer that becomes smaller by it as values and gaps; return their number."""
    from onnx import TensorProto, helper, numpy_helper

    numpy_types = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
    stored, nodes = [], []
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor) if tensor.data_type in numpy_types else None
        coded = None if array is None else encode_gaps(array)
        if array is None or coded is None:
            stored.append(tensor)
            continue
        parts = {"values": coded[0], "gaps": coded[1], "shape": np.array(array.shape, np.int64)}
        stored += [numpy_helper.from_array(part, f"{tensor.name}.{name}") for name, part in parts.items()]
        nodes.append(helper.make_node(FUNCTION, [f"{tensor.name}.{n}" for n in parts], [tensor.name], domain=DOMAIN))
    if nodes:
        opset = next(entry for entry in proto.opset_import if entry.domain == "")
        proto.functions.append(build_unpack_function(opset))
        proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        replace_items(proto.graph.initializer, stored)
        replace_items(proto.graph.node, [*nodes, *proto.graph.node])
    return len(nodes)


def build_unpack_function(opset: Any) -> Any:
    """Return the function that restores an array from its values, gaps and shape."""
    from onnx import TensorProto, helper

    node = helper.make_node
    body = [
        node("Constant", [], ["first"], value_int=0),
        node("Constant", [], ["one"], value_int=1),
        node("Cast", ["gaps"], ["distances"], to=TensorProto.INT64),
        node("CumSum", ["distances", "first"], ["ends"]),
        node("Sub", ["ends", "one"], ["positions"]),
        node("CastLike", ["first", "values"], ["zero"]),
        node("ReduceProd", ["shape"], ["size"], keepdims=1),
        node("Expand", ["zero", "size"], ["zeros"]),
        node("ScatterElements", ["zeros", "positions", "values"], ["flat"], axis=0),
        node("Reshape", ["flat", "shape"], ["weight"]),
    ]
    return helper.make_function(DOMAIN, FUNCTION, ["values", "gaps", "shape"], ["weight"], body, [opset])


def replace_items(repeated: Any, items: list[Any]) -> None:
    """Replace the items of a repeated field of a protobuf."""
    copies = list(items)
    del repeated[:]
    repeated.extend(copies)


def start_session(file: Path) -> Any:
    """Return ONNX Runtime's session of a file, on one thread of the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own classes of errors have no common base
        raise PomonaError(f"ONNX Runtime cannot load the network: {error}.") from error


def version() -> str:
    """Return the version of ONNX Runtime."""
    import onnxruntime

    return str(onnxruntime.__version__)


def import_packages() -> None:
    """Raise PomonaError where a package of the extra is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise PomonaError(f"the format onnx needs {error.name}: pip install 'pomona[onnx]'.") from error


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence the exporter's notes about packages that are not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
