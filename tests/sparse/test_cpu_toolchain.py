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
    assert toolchain.is_trusted(path)


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a library in a cache of its own, built from one function in a moment."""
    source = tmp_path / "kernels.c"
    source.write_text("int NAME(void) { return 42; }\n")
    monkeypatch.setattr(toolchain, "SOURCE", source)
    monkeypatch.setattr(toolchain, "FLAGS", ("-fPIC",))
    monkeypatch.setattr(backend, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    backend.load_cached_library()
    return toolchain.cached_library_path()


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
def test_a_library_that_was_changed_is_built_again(small_library: Path, damage: str, caplog) -> None:
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
    backend.load_cached_library()
    assert "compiling the CPU kernels" in caplog.text
    assert toolchain.is_trusted(small_library)
    assert small_library.stat().st_mode & toolchain.WRITABLE_BY_OTHERS == 0


@needs_compiler
def test_a_library_that_is_there_is_not_built_again(small_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "build_library", lambda _: pytest.fail("built again"))
    assert backend.load_cached_library().plain() == 42


@needs_compiler
def test_the_cache_is_the_users_alone(small_library: Path) -> None:
    folder = small_library.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    backend.load_cached_library()
    assert folder.stat().st_mode & 0o777 == 0o700


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder away")
def test_the_cache_of_another_user_is_refused(small_library: Path) -> None:
    os.chown(small_library, 12345, 12345)
    assert not toolchain.is_trusted(small_library)
    os.chown(small_library.parent, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        backend.load_cached_library()


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
