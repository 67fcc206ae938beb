"""DeepSparse in a process of its own, with the Python of an environment that has it (`deepsparse_peer.py`)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


class DeepSparse:
    """DeepSparse in a process of its own."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).with_name("deepsparse_peer.py")
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([python, str(script)], stdin=pipe, stdout=pipe, text=True)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Return the answer to a command; raise RuntimeError where DeepSparse fails."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "the process has ended"}')
        if "error" in answer:
            raise RuntimeError(f"DeepSparse: {answer['error']}")
        return answer

    def compile(self, weight: Tensor, x: Tensor) -> float:
        """Compile the product of a weight for the batch of x; return its error on x."""
        exact = x.double() @ weight.double().T
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "weight.npy")
            np.save(file, weight.numpy())
            self.ask(weight=file, batch=len(x))
        found = self.run(x).double()
        return float((found - exact).abs().max() / exact.abs().max())

    def compile_model(self, file: Path, x: Tensor) -> None:
        """Compile the model of an ONNX file for inputs of the shape of x."""
        self.ask(model=str(file), shape=list(x.shape))

    def run(self, x: Tensor) -> Tensor:
        """Return the first output of what was compiled last."""
        with tempfile.TemporaryDirectory() as folder:
            files = {name: str(Path(folder) / f"{name}.npy") for name in ("x", "y")}
            np.save(files["x"], x.numpy())
            self.ask(**files)
            return torch.from_numpy(np.load(files["y"]))

    def seconds(self, cold: bool) -> float:
        """Return the seconds of one call."""
        return self.ask(cold=cold)["seconds"]


@contextmanager
def start_deepsparse(python: str | None) -> Iterator[DeepSparse | None]:
    """Yield DeepSparse in the environment of a Python, or None without one, and end its process afterwards."""
    peer = None if python is None else DeepSparse(python)
    try:
        yield peer
    finally:
        if peer is not None:
            peer.process.stdin.close()  # type: ignore[union-attr]
            peer.process.wait(30)
