"""Run tests with the oldest versions that pyproject.toml allows.

    python benchmarks/measure/minimum_versions.py [--keep FOLDER] [--torch] [TEST …]

A new environment gets exactly the minimum of every dependency, and everything else from the environment that runs this
script, so that the oldest direct dependencies meet the newest indirect ones. torch is large: its minimum is installed
with --torch only. pip needs an index. Without tests, those of TESTS are run; the exit code is that of pytest.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Tests that have failed with a version below the minimum, and some of every room.
TESTS = (
    "tests/cli/test_cli_application.py",  # typer with the newest click
    "tests/lab/runs/test_checkpoint.py",  # safetensors: empty tensors
    "tests/theory/test_gip_theory.py",  # scipy: the hypergeometric distribution
    "tests/sparse/test_packed_files.py",
    "tests/lab/recipes/test_recipe.py",
    "tests/lab/runs/test_resume.py",
    "tests/lab/sweeps/test_sweep.py",
    "tests/data/test_digits.py",
    "tests/patterns",
    "tests/test_table_view.py",
)


def minimum_versions(project: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """Return the lowest version of every dependency that a project names."""
    dependencies = tomllib.loads(project.read_text())["project"]["dependencies"]
    bounds = [re.fullmatch(r"([\w.-]+)>=([\w.]+)(,.*)?", text.replace(" ", "")) for text in dependencies]
    unbounded = [text for text, bound in zip(dependencies, bounds, strict=True) if bound is None]
    if unbounded:
        raise SystemExit(f"no minimum version: {', '.join(unbounded)}")
    return {bound[1]: bound[2] for bound in bounds if bound is not None}


def create_environment(folder: Path, versions: dict[str, str]) -> Path:
    """Make an environment with exactly these versions, and the present one behind them; return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    place = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    Path(place, "present.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pinned = [f"{name}=={version}" for name, version in versions.items()]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pinned], check=True)
    return python


def installed_versions(python: Path, names: list[str]) -> dict[str, str]:
    """Return the versions that an environment imports."""
    script = "import importlib.metadata as m, sys; print(*(m.version(name) for name in sys.argv[1:]))"
    found = subprocess.check_output([python, "-c", script, *names], text=True).split()
    return dict(zip(names, found, strict=True))


def main() -> int:
    """Create the environment, run the tests and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="create the environment here and leave it")
    parser.add_argument("--torch", action="store_true", help="install the minimum of torch too")
    parser.add_argument("tests", nargs="*", default=TESTS)
    arguments = parser.parse_args()
    versions = {name: version for name, version in minimum_versions().items() if name != "torch" or arguments.torch}
    with tempfile.TemporaryDirectory() as scratch:
        python = create_environment(arguments.keep or Path(scratch) / "environment", versions)
        found = installed_versions(python, list(versions))
        print(", ".join(f"{name} {version}" for name, version in found.items()), flush=True)
        wrong = [name for name, version in versions.items() if not f"{found[name]}.0.0".startswith(f"{version}.")]
        if wrong:
            raise SystemExit(f"another version is imported of {', '.join(wrong)}")
        command = [python, "-m", "pytest", "-m", "not slow", *arguments.tests]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode


if __name__ == "__main__":
    sys.exit(main())
