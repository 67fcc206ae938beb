"""The build of C libraries: into the user's cache, and PyTorch in their place where there is no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pomona.native import library, toolchain
from pomona.native.toolchain import PRIVATE_SOURCE, PRODUCT_SOURCE, STEP_SOURCE

needs_compiler = pytest.mark.skipif(toolchain.find_compiler() is None, reason="needs a C compiler")

SCRIPT = """
import torch
from pomona.masking import apply_mask
from pomona.native import library, step
from pomona.sparse import BalancedTensor
from pomona.sparse.cpu import backend
weight = torch.zeros(40, 64)
weight[:, ::16] = 1.0
packed = BalancedTensor.from_dense(weight, 32)
masked = torch.ones(8000)
apply_mask(masked, torch.arange(8000) < 5000, masked)
found = backend.load_library() is not None, step.load_kernel("mask") is not None
sums = packed.linear(torch.ones(1, 64)).sum().item(), masked.sum().item()
print(*found, library.supported_instruction_sets()[0], *sums)
"""


def run_script(**environment: str) -> list[str]:
    """Run SCRIPT in a new process with these environment variables; return the words it prints."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@needs_compiler
@pytest.mark.parametrize("source", [PRODUCT_SOURCE, STEP_SOURCE, PRIVATE_SOURCE], ids=lambda source: source.name)
def test_the_library_is_built_into_the_cache(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "FLAGS", ("-O0", *toolchain.FLAGS[1:]))  # faster to compile, and a different path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = toolchain.cached_library_path(source)
    assert path.parent == tmp_path / "pomona"
    assert toolchain.build_library(path, source) == path
    assert list(path.parent.iterdir()) == [path]  # no temporary files are left
    assert toolchain.is_trusted(path)


@pytest.mark.parametrize("source", toolchain.SOURCES, ids=lambda source: source.name)
def test_no_library_of_an_installation_hides_a_module(source: Path) -> None:
    """Python imports `network.so` in place of `network.py` beside it."""
    assert not toolchain.installed_library_path(source).with_suffix(".py").exists()


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a C file of one function, which is compiled in a moment into a cache of its own."""
    source = tmp_path / "small.c"
    source.write_text("int NAME(void) { return 42; }\n")
    monkeypatch.setattr(toolchain, "FLAGS", ("-fPIC",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return source


@pytest.fixture
def small_library(small_source: Path) -> Path:
    """Return the path of the library of that file, which is built."""
    library.load_cached_library(small_source)
    return toolchain.cached_library_path(small_source)


def replace_file(library: Path, contents: bytes) -> None:
    """Put a new file in the place of a library: this process has the old one in memory, and uses it when it ends."""
    other = library.with_name("other.so")
    other.write_bytes(contents)
    other.chmod(0o600)
    other.replace(library)


def plant(library: Path) -> None:
    """Replace a library by another one that works, as a stranger would who can write to the folder."""
    other = library.with_name("other.so")
    library.parent.joinpath("other.c").write_text("int plain(void) { return 13; }\n")
    subprocess.run([toolchain.find_compiler(), "-shared", "-o", other, other.with_suffix(".c")], check=True)
    other.replace(library)


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "changed", "planted", "writable"])
def test_a_library_that_was_changed_is_built_again(
    small_source: Path, small_library: Path, damage: str, caplog
) -> None:
    contents = small_library.read_bytes()
    caplog.clear()
    if damage == "truncated":
        replace_file(small_library, contents[: len(contents) // 2])
    elif damage == "changed":
        replace_file(small_library, contents[:200] + bytes([contents[200] ^ 1]) + contents[201:])
    elif damage == "planted":
        plant(small_library)
    else:
        small_library.chmod(0o777)
    assert not toolchain.is_trusted(small_library)
    library.load_cached_library(small_source)
    assert "compiling the CPU kernels" in caplog.text
    assert toolchain.is_trusted(small_library)
    assert small_library.stat().st_mode & toolchain.WRITABLE_BY_OTHERS == 0


@needs_compiler
def test_a_library_that_is_there_is_not_built_again(small_source: Path, small_library: Path, monkeypatch) -> None:
    monkeypatch.setattr(library, "build_library", lambda *_: pytest.fail("built again"))
    assert library.load_cached_library(small_source).plain() == 42


@needs_compiler
def test_the_cache_is_the_users_alone(small_source: Path, small_library: Path) -> None:
    folder = small_library.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    library.load_cached_library(small_source)
    assert folder.stat().st_mode & 0o777 == 0o700


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder away")
def test_the_cache_of_another_user_is_refused(small_source: Path, small_library: Path) -> None:
    os.chown(small_library, 12345, 12345)
    assert not toolchain.is_trusted(small_library)
    os.chown(small_library.parent, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        library.load_cached_library(small_source)


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_compiler", lambda: sys.executable)  # not a compiler
    with pytest.raises(subprocess.SubprocessError):
        toolchain.build_library(tmp_path / "step.so", STEP_SOURCE)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    with pytest.raises(FileNotFoundError, match="no C compiler"):
        toolchain.build_library(tmp_path / "step.so", STEP_SOURCE)


def test_the_cached_path_depends_on_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    before = toolchain.cached_library_path(STEP_SOURCE)
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-DOTHER"))
    assert toolchain.cached_library_path(STEP_SOURCE) != before
    assert toolchain.cached_library_path(PRODUCT_SOURCE).parent == before.parent


def test_everything_works_without_kernels(tmp_path: Path) -> None:
    words = run_script(POMONA_NATIVE="0")
    assert words[:2] + words[3:] == ["False", "False", "160.0", "5000.0"]


@needs_compiler
def test_a_compiler_that_fails_is_no_error(tmp_path: Path) -> None:
    if toolchain.installed_library_path(STEP_SOURCE).exists():
        pytest.skip("the package brought its kernels along")
    words = run_script(CC="false", PATH="", XDG_CACHE_HOME=str(tmp_path))
    assert words[:2] + words[3:] == ["False", "False", "160.0", "5000.0"]


@pytest.mark.skipif(
    library.load_library(PRODUCT_SOURCE) is None or len(library.supported_instruction_sets()) < 2,
    reason="needs a processor with levels",
)
def test_torchs_environment_variable_selects_the_instruction_set() -> None:
    assert run_script(ATEN_CPU_CAPABILITY="default") == ["True", "True", "plain", "160.0", "5000.0"]
