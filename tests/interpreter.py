"""Triton's kernels where there is no GPU: in its interpreter."""

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
TRITON = importlib.util.find_spec("triton") is not None


def needed(test: Callable[[], Any]) -> Callable[[], Any]:
    """Marks a test that has others run in the interpreter, unless they run by themselves."""
    marks = (
        pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels are tested directly"),
        pytest.mark.skipif(not TRITON, reason="needs Triton"),
        pytest.mark.skipif(
            np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="Triton's interpreter needs numpy < 2.4"
        ),
    )
    for mark in marks:
        test = mark(test)
    return test


def interpret(file: str, name: str) -> None:
    """Those of a file's tests, in a process of their own: Triton reads the variable once, when it is first imported."""
    command = [sys.executable, "-m", "pytest", file, "-k", name]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
