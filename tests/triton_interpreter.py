"""Run the tests of Triton kernels in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None


def needs_interpreter(test: Callable[[], Any]) -> Callable[[], Any]:
    """Skip a test that runs other tests in the interpreter where those run directly or cannot run at all."""
    marks = (
        pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels are tested directly"),
        pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
        pytest.mark.skipif(
            np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="Triton's interpreter needs numpy < 2.4"
        ),
    )
    for mark in marks:
        test = mark(test)
    return test


def run_in_interpreter(file: str, name: str) -> None:
    """Run the tests of a file whose names match, in the interpreter; assert that all pass and none is skipped.

    They run in a new process because Triton reads TRITON_INTERPRET only when it is first imported.
    """
    command = [sys.executable, "-m", "pytest", file, "-k", name]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
