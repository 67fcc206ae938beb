"""The public names of the package: imported when they are first used, complete, and the same for type checkers."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pomona as pm

SLOW_PACKAGES = ("torch", "numpy", "scipy", "sklearn")
ROOT = Path(pm.__file__).parents[1]


def run_python(code: str) -> str:
    """Return what a script prints in a new process."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imports_for_types() -> tuple[dict[str, str], set[str]]:
    """Return the names that the package imports for type checkers, with their module, and the modules among them."""
    tree = ast.parse(Path(pm.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    statements = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: node.module for node in statements if node.module for alias in node.names}
    return names, {alias.name for node in statements if node.module is None for alias in node.names}


def test_importing_the_package_imports_no_slow_package_and_dir_is_complete():
    code = f"""
import json, sys
import pomona as pm
listed = dir(pm)
print(json.dumps({{"listed": listed, "slow": [name for name in {SLOW_PACKAGES} if name in sys.modules]}}))
"""
    found = json.loads(run_python(code))
    assert found["slow"] == []
    assert set(found["listed"]) >= {*pm.__all__, "methods", "patterns", "sparse", "core"}


def test_a_name_is_imported_in_every_way():
    code = """
import sys
from pomona import DPF
import pomona as pm
assert DPF is pm.DPF and callable(pm.load) and pm.patterns.NM is pm.NM
assert pm.privacy.__name__ == "pomona.privacy"
from pomona import *
print(Pruner.__module__, len([name for name in pm.__all__ if name in globals()]))
"""
    assert run_python(code).split() == ["pomona.core.pruner", str(len(pm.__all__))]


def test_type_checkers_see_the_names_that_are_there():
    names, modules = imports_for_types()
    assert names == pm._MODULE_OF
    assert modules <= pm._MODULES
    assert sorted(pm.__all__) == sorted({*names, *modules, "PomonaError", "__version__"})
    for name in pm.__all__:
        assert getattr(pm, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pomona' has no attribute 'DFP'"):
        _ = pm.DFP


def test_a_module_does_not_take_the_name_of_a_public_function():
    pm.summary = ModuleType("pomona.summary")  # as the import of a module of this name does
    assert callable(pm.summary)
