"""Build what pyproject.toml cannot describe: the C kernels, the bundled recipes and records, and the wheel's tag.

The kernels are shared libraries that ctypes loads. They use no interface of Python and have every kernel for plain
x86-64, AVX2 and AVX-512, so that one wheel serves all Pythons and processors: its tag is py3-none-manylinux.
"""

import os
import re
import runpy
import shutil
import subprocess
import zipfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
BUNDLED = "pomona/bundled"  # where pomona/lab/recipes/bundled.py looks in an installation
toolchain = runpy.run_path(str(ROOT / "pomona/native/toolchain.py"))

OLDEST_GLIBC = 17  # of manylinux2014, 2.17, the oldest that torch's wheels have had
ARCHIVE_DATE = (2020, 1, 1, 0, 0, 0)  # so that the same records give the same archive


class Build(build_py):
    """Build the package with its kernels, recipes and records."""

    def run(self):
        super().run()
        if self.editable_mode:
            return  # a checkout has the recipes and records, and its kernels are built on first use
        bundle_files(Path(self.build_lib) / BUNDLED)
        if toolchain["find_compiler"]() is None:
            return  # done by PyTorch
        for source, library in zip(toolchain["SOURCES"], built_libraries(self.build_lib), strict=True):
            try:
                toolchain["build_library"](library, source, verify=False)
            except (OSError, subprocess.SubprocessError) as error:
                self.warn(f"the native kernels of {source.name} could not be built: {error}")


class Wheel(bdist_wheel):
    """Tag the wheel by what its libraries need: the C library of the system, and no version of Python."""

    def get_tag(self):
        _, _, platform = super().get_tag()
        libraries = list(filter(Path.is_file, built_libraries(self.get_finalized_command("build").build_lib)))
        if not libraries:
            return "py3", "none", "any" if self.root_is_pure else platform
        contents = b"".join(map(Path.read_bytes, libraries))
        versions = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", contents)]
        if platform.startswith("linux_") and versions:
            platform = platform.replace("linux_", f"manylinux_2_{max(OLDEST_GLIBC, *versions)}_", 1)
        return "py3", "none", platform


class Binary(Distribution):
    """A distribution that holds machine code where there is a compiler."""

    def has_ext_modules(self):
        return toolchain["find_compiler"]() is not None


def built_libraries(build_lib: str) -> list[Path]:
    """Return the paths of the libraries in a build folder, in the order of their sources."""
    installed = map(toolchain["installed_library_path"], toolchain["SOURCES"])
    return [Path(build_lib) / path.relative_to(ROOT) for path in installed]


def bundle_files(folder: Path) -> None:
    """Copy the recipes and the record of the private table into a folder, and pack the records of runs."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in [*sorted(ROOT.glob("recipes/*.toml")), ROOT / "results/private-cifar10.json"]:
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    with zipfile.ZipFile(folder / "results/runs.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for record in sorted(ROOT.glob("results/runs/*.json")):
            entry = zipfile.ZipInfo(record.name, ARCHIVE_DATE)
            archive.writestr(entry, record.read_bytes(), zipfile.ZIP_DEFLATED)


def project_urls() -> dict[str, str]:
    """Return the addresses of the project, from the repository that the release is built from; none if it is unknown.

    POMONA_REPOSITORY sets the repository. On GitHub it is the one whose workflow runs.
    """
    hosted = (
        "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}".format_map(os.environ) if "GITHUB_REPOSITORY" in os.environ else ""
    )
    repository = os.environ.get("POMONA_REPOSITORY", hosted).rstrip("/")
    if not repository:
        return {}
    places = {"Documentation": "blob/main/README.md", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
    return {"Repository": repository} | {name: f"{repository}/{place}" for name, place in places.items()}


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Binary, project_urls=project_urls())
