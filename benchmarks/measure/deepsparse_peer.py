"""Run a sparse matrix product or a network in DeepSparse, in an environment of its own, for `deepsparse_process.py`.

    PYTHON benchmarks/measure/deepsparse_peer.py

PYTHON is that of an environment with `pip install deepsparse==1.8.0`, which needs Python 3.8 to 3.11 and other versions
of packages than Pomona. The script reads commands from its input, one JSON object a line, and answers each with one:

    {"weight": "w.npy", "batch": 8}      compile x (batch × columns) times the transposed weight, for one core
    {"model": "m.onnx", "shape": [8, 3]} compile the model of a file for inputs of a shape, for one core
    {"x": "x.npy", "y": "y.npy"}         multiply, and write the result
    {"cold": false}                      time one call, with warm or with emptied caches: {"seconds": 0.001}
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from deepsparse import Engine
from onnx import TensorProto, helper, numpy_helper

FLUSH_BYTES = 256 << 20  # more than almost any cache holds
WARMUP_CALLS = 8


def write_product(weight: str, batch: int, file: str) -> list[int]:
    """Write the product of a batch with the transposed matrix of a file as a model; return the shape of its input."""
    matrix = np.load(weight)
    rows, columns = matrix.shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, rows])],
        [numpy_helper.from_array(np.ascontiguousarray(matrix.T), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), file)
    return [batch, columns]


class Peer:
    """A model in DeepSparse, with the input on which it is timed."""

    def __init__(self, model: str, shape: list[int]) -> None:
        self.inputs = [np.random.default_rng(0).standard_normal(shape).astype(np.float32)]
        self.buffer = np.zeros(FLUSH_BYTES, np.uint8)
        self.engine = Engine(model, batch_size=None, num_cores=1)

    @classmethod
    def from_weight(cls, weight: str, batch: int) -> Peer:
        """Return the product with the matrix of a file."""
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "product.onnx")
            return cls(file, write_product(weight, batch, file))

    def multiply(self, x: str, y: str) -> dict[str, Any]:
        """Multiply the array in a file, and write the result to another one."""
        np.save(y, self.engine.run([np.load(x)])[0])
        return {}

    def time(self, cold: bool) -> dict[str, Any]:
        """Return the seconds of one call."""
        if cold:
            self.buffer.fill(0)
        else:
            for _ in range(WARMUP_CALLS):
                self.engine.run(self.inputs)
        start = time.perf_counter()
        self.engine.run(self.inputs)
        return {"seconds": time.perf_counter() - start}


def main() -> None:
    peer: Any = None
    answers, sys.stdout = sys.stdout, sys.stderr  # DeepSparse prints to its output
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "weight" in command:
                peer, answer = Peer.from_weight(**command), {}
            elif "model" in command:
                peer, answer = Peer(**command), {}
            else:
                answer = peer.multiply(**command) if "x" in command else peer.time(**command)
        except Exception as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
