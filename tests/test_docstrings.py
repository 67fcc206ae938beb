"""Every public module, class and function of the package has a docstring whose first line makes sense alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "pomona").rglob("*.py"))

# A first line that begins like this refers to a neighbour.
DEPENDENT = ("The same", "As ", "Those", "And ", "Likewise", "Also ", "Ditto")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def find_public(node: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, Documented]]:
    """Yield a module or class and everything public in it, with dotted names.

    Left out are names with a leading underscore, overloads, and methods that override one of a base class: these
    inherit its docstring. A method of a class with bases is taken for such an override where it has no docstring.
    """
    yield name, node
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from find_public(child, f"{name}.{child.name}")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            inherits = isinstance(node, ast.ClassDef) and bool(node.bases) and ast.get_docstring(child) is None
            if not inherits and not has_decorator(child, "overload"):
                yield f"{name}.{child.name}", child


def has_decorator(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Return whether a function has a decorator whose dotted name ends in `name`."""
    return any(ast.unparse(decorator).split("(")[0].split(".")[-1] == name for decorator in function.decorator_list)


def name_of(path: Path) -> str:
    """Return the dotted name of a source file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_everything_public_is_documented(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    missing = [name for name, node in find_public(tree, name_of(path)) if not (ast.get_docstring(node) or "").strip()]
    assert missing == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_first_lines_make_sense_alone(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    first_lines = {
        f"{name_of(path)}:{node.body[0].lineno}": (ast.get_docstring(node) or "").split("\n")[0]
        for node in ast.walk(tree)
        if isinstance(node, Documented) and node.body
    }
    assert {place: line for place, line in first_lines.items() if line.startswith(DEPENDENT)} == {}
