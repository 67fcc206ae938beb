"""The wheel: one for every Python 3, with recipes, records and portable kernels, and as useful as the checkout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLES = ["dpf-first", "gip"]
SETUPTOOLS = int(importlib.metadata.version("setuptools").split(".")[0])
release_check = runpy.run_path(str(ROOT / ".ci" / "release_check.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of the checkout, built through its source distribution and without the network."""
    if SETUPTOOLS < 77:
        pytest.skip(f"setuptools {SETUPTOOLS} cannot build the package: it needs 77 or newer")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    environ = os.environ | {"POMONA_REPOSITORY": "https://example.org/pomona/"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environ, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """Return a folder with the unpacked wheel."""
    folder = wheel.parent / "installed"
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_pomona(place: Path, folder: Path, *words: str) -> str:
    """Return what a command prints in an empty folder, with the package of a checkout or of an unpacked wheel."""
    folder.mkdir(exist_ok=True)
    environ = os.environ | {"PYTHONPATH": str(place), "XDG_CACHE_HOME": str(folder / "cache"), "PATH": str(folder)}
    command = [sys.executable, "-m", "pomona", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_is_for_every_python_and_has_its_metadata(wheel, installed):
    assert release_check["WHEEL_NAME"].fullmatch(wheel.name)
    (metadata,) = installed.glob("*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    assert "Project-URL: Repository, https://example.org/pomona\n" in text
    assert "Classifier: Programming Language :: Python :: 3 :: Only\n" in text
    assert "Keywords: pytorch," in text


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_the_same_cells_as_in_the_checkout(installed, tmp_path, table):
    from_wheel, from_checkout = (
        json.loads(run_pomona(place, tmp_path / "empty", "table", table, "--json")) for place in (installed, ROOT)
    )
    assert from_wheel == from_checkout
    assert any(cell["mean"] is not None for cell in from_wheel["cells"])


@pytest.mark.slow
def test_commands_of_the_readme_find_their_recipes(installed, tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    recipes = set(re.findall(r"pomona train (?:recipes/)?([a-z][\w-]+?)(?:\.toml)?[ `]", readme))
    for recipe in recipes | {"digits-dpf", "recipes/digits-dpf.toml"}:
        code = f"from pomona.lab.recipes.bundled import find_recipe; print(find_recipe({recipe!r}))"
        environ = os.environ | {"PYTHONPATH": str(installed)}
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert str(installed / "pomona" / "bundled" / "recipes") in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="needs x86-64 Linux")
def test_the_kernels_run_on_any_processor_and_old_systems(wheel, installed, tmp_path):
    kernels = {"sparse/cpu/kernels.so": "rows", "native/step_kernels.so": "project_rows"}
    for file, function in (kernels | {"native/private_kernels.so": "chacha20"}).items():
        library = (installed / "pomona" / file).read_bytes()
        needed = {int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)}
        allowed = int(re.search(r"manylinux_2_(\d+)", wheel.name)[1])
        assert max(needed, default=0) <= allowed <= 28  # that of torch's wheels
        for name in ("plain", "avx2", "avx512"):
            assert f"pomona_{name}_{function}".encode() in library
    # Without a compiler, on a processor that torch is told has neither AVX2 nor AVX-512.
    code = (
        "from pomona.sparse.cpu.backend import load_library, supported_instruction_sets\n"
        "print(load_library()._name, *supported_instruction_sets())"
    )
    environ = {"PYTHONPATH": str(installed), "ATEN_CPU_CAPABILITY": "default", "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [str(installed / "pomona/sparse/cpu/kernels.so"), "plain"], done.stderr


def test_cells_are_counted():
    printed = json.dumps({"cells": [{"mean": 93.1}, {"mean": None}, {"mean": 0.0}]})
    assert release_check["count_cells"](printed) == (2, 3)


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("pomona-0.1.0-py3-none-manylinux_2_17_x86_64.whl", True),
        ("pomona-0.1.0-py3-none-any.whl", True),
        ("pomona-0.1.0-cp311-cp311-linux_x86_64.whl", False),
        ("pomona-0.1.0-py3-none-linux_x86_64.whl", False),
    ],
)
def test_the_names_of_wheels_that_may_be_released(name, fits):
    assert (release_check["WHEEL_NAME"].fullmatch(name) is not None) == fits
