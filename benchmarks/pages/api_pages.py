"""Write the pages of the API reference, which Sphinx fills from the docstrings.

The pages are part of the site and not of the repository: see site_source.py. A room whose package has `__all__` has one
page with these names. Everything is described once: what `import pomona as pm` has on the first page, the rest in
its room.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Sequence
from types import ModuleType

import pomona
from pomona.core.method import METHODS

# The rooms that users program with, in the order of the reference.
ROOMS = {
    "pomona": "`import pomona as pm`",
    "pomona.core.method": "Methods: the base class",
    "pomona.core.targets": "Targets: what is pruned",
    "pomona.patterns": "Patterns",
    "pomona.schedules": "Schedules",
    "pomona.allocation": "Allocation",
    "pomona.compressors": "Compressors",
    "pomona.scores": "Scores",
    "pomona.sparse": "Packed and shrunk networks",
    "pomona.export": "Export",
    "pomona.integrations": "Integrations",
    "pomona.models": "Models",
    "pomona.data": "Data",
    "pomona.lab": "The laboratory",
    "pomona.lab.sweeps.sweep": "Sweeps",
    "pomona.report": "Report",
    "pomona.privacy": "Private training",
    "pomona.theory": "Theory",
    "pomona.registry": "Registries",
    "pomona.errors": "Errors",
}


# The headings of the first page, by the room in which a name is defined.
FRONT = {
    "methods": "Methods",
    "core": "Pruners and targets",
    "patterns": "Patterns",
    "schedules": "Schedules",
    "compressors": "Compressors",
    "sparse": "Packed and shrunk networks, files",
    "export": "Export",
    "models": "Models",
    "errors": "Errors",
}
SECTIONS = ("Args:", "Returns:", "Raises:", "Yields:", "Note:")  # of a docstring, read by Sphinx's napoleon
ALIGNED = re.compile(r"\S {3,}\S")  # columns


def render_pages() -> dict[str, str]:
    """Return the pages of the reference by file name, in reStructuredText, with the index."""
    rooms = {room: title for room, title in ROOMS.items() if importlib.util.find_spec(room)}
    pages = {f"{room}.rst": render_room(room, title) for room, title in rooms.items() if room != "pomona"}
    entries = "\n".join(f"   {room}" for room in rooms)
    text = "From the docstrings of the package. Public names are never renamed."
    index = f"{headline('API')}\n{text}\n\n.. toctree::\n   :maxdepth: 1\n\n{entries}\n"
    return {"index.rst": index, "pomona.rst": render_front(ROOMS["pomona"])} | pages


def headline(text: str, line: str = "=") -> str:
    """Return a title with the line below it, and code in it as literals."""
    text = re.sub("`([^`]*)`", r"``\1``", text)
    return f"{text}\n{line * len(text)}\n"


def render_front(title: str) -> str:
    """Return the page of the names of `import pomona as pm`, under headings by what they are."""
    parts = [headline(title), ".. currentmodule:: pomona\n"]
    names: dict[str, list[str]] = {}
    for name in find_public(pomona):
        names.setdefault(FRONT.get(getattr(pomona, name).__module__.split(".")[1], "Others"), []).append(name)
    for heading in (*FRONT.values(), "Others"):
        if heading in names:
            entries = (describe_name(pomona, name) for name in names[heading])
            parts += [headline(heading, "-"), list_names(names[heading]), *entries]
    return "\n".join(parts)


def render_room(room: str, title: str) -> str:
    """Return the page of one room: its public names, or those of its modules."""
    module = importlib.import_module(room)
    parts = [headline(title), render_module(module)]
    for name in find_modules(module):
        parts += [headline(f"`{name}`", "-"), render_module(importlib.import_module(name))]
    return "\n".join(parts)


def find_modules(module: ModuleType) -> list[str]:
    """Return the public modules of a package that names only modules, or nothing."""
    if not hasattr(module, "__path__"):
        return []
    if names := getattr(module, "__all__", []):
        return [f"{module.__name__}.{name}" for name in names if inspect.ismodule(getattr(module, name))]
    found = (info.name for info in pkgutil.iter_modules(module.__path__, f"{module.__name__}."))
    return [name for name in found if not name.rpartition(".")[2].startswith("_")]


def render_module(module: ModuleType) -> str:
    """Return the reference of one module: its docstring, a table of its names, and those that `pomona` has not."""
    front = {id(getattr(pomona, name)): f"pomona.{name}" for name in find_public(pomona)}
    public = find_public(module)
    shown = [front.get(id(getattr(module, name)), name) for name in public]
    shared = "   :no-index:\n" if module.__name__ in front.values() else ""  # a function has the name of its package
    parts = [f".. automodule:: {module.__name__}\n   :no-members:\n{shared}", list_names(shown)]
    return "\n".join([*parts, *(describe_name(module, name) for name in public if name in shown)])


def list_names(names: Sequence[str]) -> str:
    """Return a table of names with the first lines of their docstrings."""
    entries = "".join(f"   {name}\n" for name in names)
    return f".. autosummary::\n   :nosignatures:\n\n{entries}" if names else ""


def find_public(module: ModuleType) -> list[str]:
    """Return the public classes and functions of a module: those of `__all__`, or those that are defined in it."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n, thing in vars(module).items() if getattr(thing, "__module__", None) == module.__name__]
    return [name for name in names if not name.startswith("_") and is_described(getattr(module, name))]


def is_described(thing: object) -> bool:
    """Return whether the reference has an entry for this: a class or function with a docstring."""
    return (inspect.isclass(thing) or inspect.isroutine(thing)) and bool(thing.__doc__)


def describe_name(module: ModuleType, name: str) -> str:
    """Return the directive for one class or function; that of a method refers to its page."""
    path = f"{module.__name__}.{name}"
    if inspect.isclass(getattr(module, name)):
        return f".. autoclass:: {path}\n   :members:\n"
    pages = {METHODS[method].__name__: method for method in METHODS}
    page = f"   Its page: :doc:`/methods/{pages[name]}`.\n" if name in pages and module is pomona else ""
    return f".. autofunction:: {path}\n\n{page}"


# ---- docstrings, which are written for readers of the source, as reStructuredText


def convert_docstring(lines: Sequence[str]) -> list[str]:
    """Return a docstring as reStructuredText: `code` as literals, programs and columns as they are, the rest prose."""
    converted: list[str] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        own = paragraph.split("\n")
        literal = is_literal(own)
        converted += ["::", ""] if literal else []
        converted += [f"    {line}" if literal else convert_line(line) for line in own]
        converted.append("")
    return converted


def is_literal(lines: Sequence[str]) -> bool:
    """Return whether a paragraph is a program, a formula or a table in columns, to be shown as it is."""
    text = [line for line in lines if line.strip()]
    if not text or text[0].lstrip().startswith("- ") or text[0].strip() in SECTIONS:
        return False
    if all(line.startswith(" ") for line in text) or any(map(ALIGNED.search, text)):
        return True
    return any(character in "".join(text) for character in "=(") and is_python("\n".join(text))


def is_python(text: str) -> bool:
    """Return whether a text can be parsed as a program."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def convert_line(line: str) -> str:
    """Return a line of prose with `code` as a literal, and without characters that would start other mark-up."""
    parts = re.split("``?([^`]+)``?", line)
    prose = [re.sub(r"([*|`\\]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    literals = [f"\\ ``{part}``\\ " for part in parts[1::2]]
    return "".join(a + b for a, b in zip(prose, [*literals, ""], strict=True))
