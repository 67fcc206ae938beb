"""How the kernels come to be: in the user's cache, once, and not at all where there is no compiler."""

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


def run(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@needs_compiler
def test_they_are_built_into_the_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "FLAGS", ("-O0", *toolchain.FLAGS[1:]))  # quicker, and another name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = toolchain.cached_library_path()
    assert place.parent == tmp_path / "pomona"
    assert toolchain.build_library(place) == place
    assert list(place.parent.iterdir()) == [place]  # and nothing of the work is left


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_compiler", lambda: sys.executable)  # understands no flag of a compiler
    with pytest.raises(subprocess.SubprocessError):
        toolchain.build_library(tmp_path / "kernels.so")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    with pytest.raises(FileNotFoundError, match="no C compiler"):
        toolchain.build_library(tmp_path / "kernels.so")


def test_the_name_tells_one_build_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    before = toolchain.cached_library_path()
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-DOTHER"))
    assert toolchain.cached_library_path() != before


def test_without_kernels_all_works(tmp_path: Path) -> None:
    assert run(POMONA_NATIVE="0")[::2] == ["False", "160.0"]


@needs_compiler
def test_a_compiler_that_fails_is_no_error(tmp_path: Path) -> None:
    if (toolchain.SOURCE.with_name(toolchain.LIBRARY_NAME)).exists():
        pytest.skip("the package brought its kernels along")
    assert run(CC="false", PATH="", XDG_CACHE_HOME=str(tmp_path))[::2] == ["False", "160.0"]


@pytest.mark.skipif(
    backend.load_library() is None or len(backend.supported_instruction_sets()) < 2,
    reason="needs a processor with levels",
)
def test_torchs_own_switch_chooses_the_level() -> None:
    assert run(ATEN_CPU_CAPABILITY="default") == ["True", "plain", "160.0"]
