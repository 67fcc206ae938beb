"""oneDNN is limited before torch is imported where AMX is advertised and refused."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from pomona import cpu_features
from pomona.cpu_features import LARGEST_ISA_WITHOUT_AMX, VARIABLE, describe_amx, is_amx_refused, limit_onednn

ROOT = Path(__file__).parents[1]
SAPPHIRE_RAPIDS = "processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\nbugs\t\t: none\n"
WITHOUT_AMX = "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16\nbugs\t\t: amx_tile\n"

# Ways in which the first import of torch comes about.
ENTRIES = [
    "import pomona, torch",
    "from pomona import DPF",
    "import pomona.lab",
    "from pomona.cli import main; main(['methods'])",
    "import pomona.__main__; pomona.__main__.main(['methods'])",
]
# Runs in a fresh interpreter that looks like a machine which refuses AMX, and stops at the first import of torch.
STOP_AT_TORCH = """
import builtins, ctypes, importlib.abc, os, sys

real_open = builtins.open
builtins.open = lambda file, *args, **options: real_open(
    os.environ["FAKE_CPUINFO"] if str(file) == "/proc/cpuinfo" else file, *args, **options
)

class Refusing:
    def __init__(self, name):
        self.syscall = lambda *arguments: -1

ctypes.CDLL = Refusing

class StopAtTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("at torch:", os.environ.get("ONEDNN_MAX_CPU_ISA"))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, StopAtTorch())
"""


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    """Return a /proc/cpuinfo that advertises AMX."""
    file = tmp_path / "cpuinfo"
    file.write_text(SAPPHIRE_RAPIDS)
    return file


@pytest.fixture(autouse=True)
def linux_x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be on the platform that has AMX."""
    monkeypatch.setattr(cpu_features, "is_linux_x86_64", lambda: True)


def test_amx_is_refused_where_it_is_advertised_and_not_granted(cpuinfo):
    assert is_amx_refused(cpuinfo, lambda: False)
    assert not is_amx_refused(cpuinfo, lambda: True)


def test_the_kernel_is_not_asked_where_amx_is_not_advertised(cpuinfo):
    cpuinfo.write_text(WITHOUT_AMX)
    assert not is_amx_refused(cpuinfo, lambda: pytest.fail("the system call was made"))


def test_a_missing_cpuinfo_has_no_flags(tmp_path):
    assert not is_amx_refused(tmp_path / "none", lambda: pytest.fail("the system call was made"))


def test_other_platforms_are_not_asked(cpuinfo, monkeypatch):
    monkeypatch.setattr(cpu_features, "is_linux_x86_64", lambda: False)
    assert not is_amx_refused(cpuinfo, lambda: pytest.fail("the system call was made"))
    assert describe_amx(cpuinfo, lambda: False) == "not advertised by the processor"


@pytest.mark.parametrize(("result", "granted"), [(0, True), (-1, False)])
def test_the_system_call(monkeypatch, result, granted):
    calls = []

    class Syscall:
        def __call__(self, *arguments):
            calls.append([argument.value for argument in arguments])
            return result

    class Library:
        def __init__(self, name):
            self.syscall = Syscall()

    monkeypatch.setattr(cpu_features.ctypes, "CDLL", Library)
    assert cpu_features.request_tile_data() is granted
    assert calls == [[158, 0x1023, 18]]


def test_the_limit_is_set_where_amx_is_refused():
    environ: dict[str, str] = {}
    with warnings.catch_warnings(action="error"):
        assert limit_onednn(environ, lambda: True, torch_is_loaded=False)
    assert environ == {VARIABLE: LARGEST_ISA_WITHOUT_AMX}


def test_the_limit_is_not_set_where_amx_is_granted_or_missing():
    environ: dict[str, str] = {}
    with warnings.catch_warnings(action="error"):
        assert not limit_onednn(environ, lambda: False, torch_is_loaded=True)
    assert environ == {}


@pytest.mark.parametrize("value", ["AVX2", "ALL", ""])
def test_the_users_own_value_stands(value):
    environ = {VARIABLE: value}
    with warnings.catch_warnings(action="error"):
        assert not limit_onednn(environ, lambda: pytest.fail("the processor was looked at"), torch_is_loaded=True)
    assert environ == {VARIABLE: value}


def test_a_warning_where_torch_was_first():
    environ: dict[str, str] = {}
    with pytest.warns(RuntimeWarning, match="Import pomona before torch, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
        limit_onednn(environ, lambda: True, torch_is_loaded=True)
    assert environ == {VARIABLE: LARGEST_ISA_WITHOUT_AMX}


def test_the_sentence_of_pomona_check(cpuinfo, monkeypatch):
    monkeypatch.setenv(VARIABLE, LARGEST_ISA_WITHOUT_AMX)
    assert describe_amx(cpuinfo, lambda: True) == "available"
    refused = describe_amx(cpuinfo, lambda: False)
    assert refused == "advertised by the processor, refused by the system; ONEDNN_MAX_CPU_ISA is AVX512_CORE_BF16"
    monkeypatch.delenv(VARIABLE)
    assert describe_amx(cpuinfo, lambda: False).endswith("ONEDNN_MAX_CPU_ISA is not set")


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="needs x86-64 Linux")
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("given", "expected"), [(None, LARGEST_ISA_WITHOUT_AMX), ("AVX2", "AVX2")])
def test_the_limit_is_there_before_torch_is_imported(cpuinfo, entry, given, expected):
    environ = {key: value for key, value in os.environ.items() if key != VARIABLE}
    environ |= {"FAKE_CPUINFO": str(cpuinfo), "PYTHONPATH": str(ROOT)} | ({VARIABLE: given} if given else {})
    command = [sys.executable, "-c", STOP_AT_TORCH + entry]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert result.stdout == f"at torch: {expected}\n"
