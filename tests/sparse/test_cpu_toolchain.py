"""The build of the C kernels: into the user's cache, and products without them where there is no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pomona.sparse.cpu import backend, toolchain

needs_compiler = pytest.mark.skipif(toolchain.find_compiler() is None, reason="needs a C compiler")

SCRIPT = """
import torch
from pomona.sparse import BalancedTensor
from pomona.sparse.cpu import backend
weight = torch.zeros(40, 64)
weight[:, ::16] = 1.0
packed = BalancedTensor.from_dense(weight, 32)
found = backend.load_library() is not None
print(found, backend.supported_instruction_sets()[0], packed.linear(torch.ones(1, 64)).sum().item())
"""


def run_script(**environment: str) -> list[str]:
    """Run SCRIPT in a new process with these environment variables; return the words it prints."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@needs_compiler
def test_the_library_is_built_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "FLAGS", ("-O0", *toolchain.FLAGS[1:]))  # faster to compile, and a different path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = toolchain.cached_library_path()
    assert path.parent == tmp_path / "pomona"
    assert toolchain.build_library(path) == path
    assert list(path.parent.iterdir()) == [path]  # no temporary files are left


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_compiler", lambda: sys.executable)  # not a compiler
    with pytest.raises(subprocess.SubprocessError):
        toolchain.build_library(tmp_path / "kernels.so")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    with pytest.raises(FileNotFoundError, match="no C compiler"):
        toolchain.build_library(tmp_path / "kernels.so")


def test_the_cached_path_depends_on_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    before = toolchain.cached_library_path()
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-DOTHER"))
    assert toolchain.cached_library_path() != before


def test_products_work_without_kernels(tmp_path: Path) -> None:
    assert run_script(POMONA_NATIVE="0")[::2] == ["False", "160.0"]


@needs_compiler
def test_a_compiler_that_fails_is_no_error(tmp_path: Path) -> None:
    if (toolchain.SOURCE.with_name(toolchain.LIBRARY_NAME)).exists():
        pytest.skip("the package brought its kernels along")
    assert run_script(CC="false", PATH="", XDG_CACHE_HOME=str(tmp_path))[::2] == ["False", "160.0"]


@pytest.mark.skipif(
    backend.load_library() is None or len(backend.supported_instruction_sets()) < 2,
    reason="needs a processor with levels",
)
def test_torchs_environment_variable_selects_the_instruction_set() -> None:
    assert run_script(ATEN_CPU_CAPABILITY="default") == ["True", "plain", "160.0"]
