"""Dense products in ONNX Runtime on one thread, in every type of values that it has for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

# The group sizes and accuracy levels of MatMulNBits: level 0 multiplies floats, level 4 rounds activations to 8 bits.
NBITS_GROUPS, NBITS_LEVELS = (32, 128), (0, 4)

Array = np.ndarray[Any, Any]
Product = Callable[[Array], Array]


def make_session(nodes: list[Any], weights: dict[str, Array], columns: int, rows: int) -> onnxruntime.InferenceSession:
    """Return a session on one thread for a graph from x (n × columns) to y (n × rows)."""
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", rows])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    onnx.checker.check_model(model)
    return open_session(model.SerializeToString())


def open_session(model: bytes) -> onnxruntime.InferenceSession:
    """Return a session of a model on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def make_product(nodes: list[Any], weights: dict[str, Array], columns: int, rows: int) -> Product:
    """Return the product of a graph as a function."""
    session = make_session(nodes, weights, columns, rows)
    return lambda x: session.run(None, {"x": x})[0]  # type: ignore[no-any-return]


def float_product(weight: Array) -> Product:
    """Return the product in float32."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return make_product(nodes, {"w": np.ascontiguousarray(weight.T)}, weight.shape[1], weight.shape[0])


def round_rows(weight: Array, signed: bool) -> tuple[Array, Array]:
    """Return the transposed codes of 8 bits of a weight, and the scale of each of its rows."""
    scales = (np.abs(weight).max(1) / 127).astype(np.float32)
    codes = np.round(weight / scales[:, None]).T
    return np.ascontiguousarray(codes.astype(np.int8) if signed else (codes + 128).astype(np.uint8)), scales


def dynamic_int8_product(weight: Array, signed: bool) -> Product:
    """Return the product of int8 or uint8 codes with activations that are rounded to 8 bits at every call."""
    codes, scales = round_rows(weight, signed)
    weights = {"w": codes, "scales": scales}
    if not signed:
        weights["zero"] = np.array(128, np.uint8)
    nodes = [helper.make_node("DynamicQuantizeMatMul", ["x", *weights], ["y"], domain="com.microsoft")]
    return make_product(nodes, weights, weight.shape[1], weight.shape[0])


def static_int8_product(weight: Array, x: Array) -> Product:
    """Return the product of int8 codes with activations of a range that is known before: that of x and of its product.

    The result is rounded to 8 bits too, as between the layers of a network that is quantised statically.
    """
    codes, scales = round_rows(weight, True)
    scale, y_scale = (np.float32(np.abs(array).max() / 127) for array in (x, x @ weight.T))
    zero = np.array(0, np.int8)
    weights = {"w": codes, "w_scale": scales, "w_zero": np.zeros(len(scales), np.int8)}
    weights |= {"x_scale": np.array(scale), "y_scale": np.array(y_scale), "zero": zero}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "zero"], ["codes"]),
        helper.make_node(
            "QLinearMatMul",
            ["codes", "x_scale", "zero", "w", "w_scale", "w_zero", "y_scale", "zero"],
            ["product"],
        ),
        helper.make_node("DequantizeLinear", ["product", "y_scale", "zero"], ["y"]),
    ]
    return make_product(nodes, weights, weight.shape[1], weight.shape[0])


def nbits_product(weight: Array, bits: int, group: int, level: int) -> Product:
    """Return the product of codes of 4 or 8 bits with a scale for each group of columns in a row, by `MatMulNBits`."""
    rows, columns = weight.shape
    groups = -(-columns // group)
    padded = np.pad(weight, ((0, 0), (0, groups * group - columns))).reshape(rows, groups, group)
    half = 2 ** (bits - 1)
    scales = np.abs(padded).max(2) / (half - 1)
    codes = (np.round(padded / np.where(scales > 0, scales, 1)[..., None]) + half).astype(np.uint8)
    packed = codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
    weights = {"w": np.ascontiguousarray(packed), "scales": scales.astype(np.float32)}
    options = {"K": columns, "N": rows, "bits": bits, "block_size": group, "accuracy_level": level}
    nodes = [helper.make_node("MatMulNBits", ["x", *weights], ["y"], domain="com.microsoft", **options)]
    return make_product(nodes, weights, columns, rows)


def dense_products(weight: Array, x: Array) -> dict[str, dict[str, Product]]:
    """Return every product of a weight: the name of its type of values, and the name of the way."""
    found: dict[str, dict[str, Product]] = {
        "float32": {"MatMul": float_product(weight)},
        "int8": {
            "DynamicQuantizeMatMul, int8": dynamic_int8_product(weight, True),
            "DynamicQuantizeMatMul, uint8": dynamic_int8_product(weight, False),
            "QLinearMatMul": static_int8_product(weight, x),
        },
        "int4": {},
    }
    for bits in (8, 4):
        for group in NBITS_GROUPS:
            for level in NBITS_LEVELS:
                if (bits, level) != (8, 0):  # which takes a hundred times as long as the others
                    way = f"MatMulNBits, groups of {group}, accuracy level {level}"
                    found[f"int{bits}"][way] = nbits_product(weight, bits, group, level)
    return found
