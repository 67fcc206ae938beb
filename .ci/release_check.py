"""Check a release: build it, install the wheel where there is nothing else, and run it in an empty folder.

    python .ci/release_check.py [--python PATH …]

Builds the source distribution and from it the wheel, runs `twine check --strict` on both, and installs the wheel with
the versions of constraints.txt into a new environment of the oldest supported Python and of the newest one that is
installed and that the pinned torch has a wheel for. There the installed package must print its version, run the demo,
use the kernels of the wheel without a compiler, and show as many cells of a table as the checkout does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TABLE = "dpf-first"
OLDEST_MINOR, NEWEST_MINOR = 11, 20  # Python 3.11 to the last version that is looked for
WHEEL_NAME = re.compile(r"pomona-[\w.]+-py3-none-(manylinux_\d+_\d+_\w+|macosx_\w+|any)\.whl")


def run(*command: str | Path, cwd: Path = ROOT, **environ: str) -> str:
    """Run a command, without this process's PYTHONPATH, and return what it prints; exit with its error if it fails."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    print("$", *(Path(word).name if Path(word).is_absolute() else word for word in command), flush=True)
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean | environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"release-check: exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def require(condition: bool, message: str) -> None:
    """Exit with a message unless the condition holds."""
    if not condition:
        sys.exit(f"release-check: {message}")


def build_release() -> Path:
    """Build the source distribution and the wheel, check both, and return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ".")
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    (wheel,) = DIST.glob("*.whl")
    require(WHEEL_NAME.fullmatch(wheel.name) is not None, f"{wheel.name} is not a wheel for every Python 3.")
    return wheel


def pinned_torch() -> str:
    """Return the version of torch in constraints.txt."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    return pinned[1]


def supported_minors(torch: str) -> list[int]:
    """Return the minor versions of Python 3 for which the package index has a wheel of this torch."""
    found = []
    for minor in range(OLDEST_MINOR, NEWEST_MINOR + 1):
        options = ["--python-version", f"3.{minor}", "--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "index", "versions", "torch", *options]
        listed = subprocess.run(command, capture_output=True, text=True).stdout
        if torch in re.findall(r"[\w.+]+", listed):
            found.append(minor)
    return found


def find_pythons(minors: list[int]) -> dict[int, str]:
    """Return the installed interpreters of these versions: of this process, on the PATH, and of pyenv."""
    found: dict[int, str] = {sys.version_info.minor: sys.executable} if sys.version_info.minor in minors else {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in minors:
        name = f"python3.{minor}"
        places = [shutil.which(name), *map(str, sorted(pyenv.glob(f"3.{minor}.*/bin/{name}")))]
        for place in filter(None, places):
            if minor not in found and can_make_environments(place):
                found[minor] = place
    return found


def can_make_environments(python: str) -> bool:
    """Return whether an interpreter runs, which a shim of pyenv may not, and has what `venv` needs."""
    return subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0


def count_cells(printed: str) -> tuple[int, int]:
    """Return how many cells of a table printed as JSON have a result, and how many there are."""
    cells = json.loads(printed)["cells"]
    return sum(cell["mean"] is not None for cell in cells), len(cells)


def check_installed(python: str, wheel: Path, folder: Path, expected: tuple[int, int]) -> None:
    """Install the wheel into a new environment in a folder, and run it in an empty one."""
    environment, empty = folder / "environment", folder / "empty"
    empty.mkdir()
    run(python, "-m", "venv", environment)
    scripts = environment / "bin"
    run(scripts / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel, cwd=empty)
    version = run(scripts / "pomona", "--version", cwd=empty).strip()
    require(version.split()[-1] in wheel.name, f"{wheel.name} installs {version}.")
    # No compiler is found in this PATH, so native kernels are those of the wheel.
    place = {"PATH": str(scripts), "XDG_CACHE_HOME": str(folder / "cache"), "CC": "no-compiler"}
    checked = json.loads(run(scripts / "pomona", "check", "--json", cwd=empty, **place))
    native = checked["kernels"]["native"]
    require(native is not None or wheel.name.endswith("-any.whl"), f"the kernels of {wheel.name} cannot be loaded.")
    run(scripts / "pomona", "demo", "--quick", cwd=empty, **place)
    shown = count_cells(run(scripts / "pomona", "table", TABLE, "--json", cwd=empty, **place))
    require(shown == expected, f"{TABLE} shows {shown[0]} of {shown[1]} cells, in the checkout {expected[0]}.")
    versions = checked["versions"]
    print(
        f"Python {versions['python']} with torch {versions['torch']}: {version}, demo, kernels {native}, {TABLE} with "
        f"{shown[0]} of {shown[1]} cells, as in the checkout."
    )


def main() -> None:
    """Build, check and install a release."""
    parser = argparse.ArgumentParser(description="Build a release, install its wheel and run it in an empty folder.")
    parser.add_argument("--python", action="append", help="check this interpreter instead of those found; repeatable")
    arguments = parser.parse_args()
    wheel = build_release()
    torch = pinned_torch()
    minors = supported_minors(torch)
    found = find_pythons(minors)
    chosen = arguments.python or [found[minor] for minor in sorted({min(found), max(found)})]
    missing = [f"3.{minor}" for minor in minors if minor not in found]
    print(f"torch {torch} has wheels for Python {', '.join(f'3.{minor}' for minor in minors)}.")
    if missing:
        print(f"NOT INSTALLED HERE, NOT CHECKED: Python {', '.join(missing)}.")
    table = (sys.executable, "-m", "pomona", "table", TABLE, "--json")
    with tempfile.TemporaryDirectory() as folder:
        expected = count_cells(run(*table, cwd=Path(folder), PYTHONPATH=str(ROOT)))
        newest = ("--python-version", f"3.{max(minors)}", "--only-binary", ":all:", "--target", folder)
        run(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", *newest, wheel)
        print(f"{wheel.name} is accepted by Python 3.{max(minors)}.")
        for number, python in enumerate(chosen):
            inner = Path(folder) / str(number)
            inner.mkdir()
            check_installed(python, wheel, inner, expected)


if __name__ == "__main__":
    main()
