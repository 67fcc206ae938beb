"""Build the C kernels into the package where there is a compiler; all metadata is in pyproject.toml."""

import runpy
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOM = "pomona/sparse/cpu"
toolchain = runpy.run_path(str(Path(__file__).parent / ROOM / "toolchain.py"))


class Build(build_py):
    def run(self):
        super().run()
        if self.editable_mode or toolchain["compiler"]() is None:
            return  # built on first use, or done by PyTorch
        try:
            toolchain["build"](Path(self.build_lib) / ROOM / toolchain["NAME"], check=False)
        except (OSError, subprocess.SubprocessError) as error:
            self.warn(f"the native kernels could not be built: {error}")


class Binary(Distribution):
    def has_ext_modules(self):
        return toolchain["compiler"]() is not None


setup(cmdclass={"build_py": Build}, distclass=Binary)
