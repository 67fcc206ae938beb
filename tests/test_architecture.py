"""The package keeps its architecture: imports point one way, modules are short and have names of their own.

The tests read the sources and import nothing. `ALLOWED` is the map of docs/architecture.md.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "pomona"

# What each room may import, besides itself. The longest name that fits a module is its room.
BASE = {"errors", "durable", "untrusted", "registry", "masking", "native", "sharding"}
CHOICES = {"patterns", "scores", "schedules", "allocation", "compressors"}
MIDDLE = BASE | CHOICES | {"core", "models", "data", "table_view"}
LIBRARY = MIDDLE | {"methods", "posttraining", "sparse", "privacy", "theory", "integrations", "export"}
LABORATORY = {"lab.kernels", "lab.recipes", "lab.runs", "lab.sweeps", "lab.tables"}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "table_view": set(),
    "version": set(),
    "cpu_features": set(),
    "native": set(),
    "sharding": {"errors"},
    "durable": {"errors"},
    "untrusted": {"errors"},
    "registry": {"errors", "untrusted"},
    "masking": {"errors", "native", "sharding"},
    "patterns": BASE,
    "scores": BASE | {"patterns"},
    "schedules": BASE | {"patterns"},
    "allocation": BASE | {"patterns"},
    "compressors": BASE | {"patterns"},
    "core": BASE | CHOICES | {"table_view"},
    "models": {"errors", "untrusted", "registry", "table_view"},
    "data": {"errors", "untrusted", "registry"},
    "methods": MIDDLE,
    "sparse": MIDDLE | {"version"},
    "posttraining": MIDDLE | {"methods"},
    "theory": MIDDLE | {"methods"},
    "privacy": MIDDLE | {"theory"},
    "integrations": MIDDLE | {"methods", "sparse", "version"},
    "export": MIDDLE | {"methods", "sparse", "version"},
    "lab.kernels": LIBRARY,
    "lab.recipes": LIBRARY,
    "lab.runs": LIBRARY | {"lab.kernels", "lab.recipes", "version"},
    "lab.sweeps": LIBRARY | {"lab.recipes", "lab.runs"},
    "lab.tables": LIBRARY | {"lab.recipes", "lab.runs", "lab.sweeps"},
    "lab.demo": LIBRARY | LABORATORY,
    "lab": LIBRARY | LABORATORY | {"lab.demo"},
    "report": LIBRARY | LABORATORY | {"lab", "version"},
    "cli": LIBRARY | LABORATORY | {"lab", "lab.demo", "report", "version", "cpu_features"},
    "__main__": {"cli"},
    "__init__": LIBRARY | {"version", "cpu_features"},
}

# The storage format's module has its name from the design; it is never imported as the bare name `format`.
SHARED_NAMES = {"pomona.sparse.format"}

MOST_LINES = 400  # of a source file; kernels are one algorithm each and may be longer
KERNELS = "_triton.py"

# Packages that a user may not have: a module that needs one is imported where it is used.
OPTIONAL = {
    *("triton", "torch_pruning", "dp_accounting", "PIL", "plotly"),
    *("transformers", "lightning", "accelerate", "torchtitan", "huggingface_hub"),
    *("tensorboard", "mlflow", "wandb", "trackio", "onnx", "onnxscript", "onnxruntime", "openvino"),
}
# Rooms that import inside functions to start quickly: `pomona --help` must not load torch's compiler or scipy.
LAZY_ROOMS = {"cli"}


@dataclass(frozen=True)
class Import:
    """One import of one module by another."""

    source: str
    target: str
    line: int
    for_types: bool = False  # whether it stands under `if TYPE_CHECKING:`
    in_function: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def find_modules(root: Path = ROOT, package: str = PACKAGE) -> dict[str, Path]:
    """Return the modules of a package, by dotted name."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def find_imports(modules: dict[str, Path]) -> list[Import]:
    """Return every import of one of `modules` by another, wherever it stands in the file."""
    return [
        Import(name, target, line, for_types, in_function)
        for name, path in modules.items()
        for node, for_types, in_function in walk_imports(ast.parse(path.read_text(encoding="utf-8")))
        for target, line in resolve_import(node, name, path, modules)
        if target in modules and target != name
    ]


def walk_imports(
    node: ast.AST, for_types: bool = False, in_function: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """Yield the import statements below a node, each with whether it is for types only and inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, for_types, in_function
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield from walk_imports(ast.Module([statement], []), True, in_function)
            for statement in child.orelse:
                yield from walk_imports(ast.Module([statement], []), for_types, in_function)
        else:
            inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk_imports(child, for_types, inside)


def resolve_import(
    node: ast.Import | ast.ImportFrom, module: str, path: Path, modules: dict[str, Path]
) -> Iterator[tuple[str, int]]:
    """Yield the modules that an import statement names, with its line: `from a import b` is a.b where that is one."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, node.lineno) for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        yield (inner if inner in modules else base), node.lineno


def room_of(module: str) -> str:
    """Return the room of a module: the longest name in `ALLOWED` that its own begins with."""
    rest = module.removeprefix(PACKAGE).removeprefix(".") or "__init__"
    fits = [room for room in ALLOWED if rest == room or rest.startswith(f"{room}.")]
    assert fits, f"{module} is in no room: add one to ALLOWED and to docs/architecture.md."
    return max(fits, key=len)


def find_forbidden(imports: list[Import]) -> list[Import]:
    """Return the imports between rooms that `ALLOWED` does not have.

    Annotations may name a class of the same room that is defined further up, so within a room imports for types
    are left out.
    """
    forbidden = []
    for one in imports:
        source, target = room_of(one.source), room_of(one.target)
        for_types_within = one.for_types and source.split(".")[0] == target.split(".")[0]
        if source != target and target not in ALLOWED[source] and not for_types_within:
            forbidden.append(one)
    return forbidden


def find_cycles(imports: list[Import]) -> list[list[str]]:
    """Return the groups of modules that import each other (strongly connected components, Tarjan 1972)."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        if not one.for_types:
            graph.setdefault(one.source, set()).add(one.target)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in sorted(graph.get(module, ())):
            if target not in order:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], order[target])
        if lowest[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                cycles.append(sorted(group))

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return cycles


def find_late_imports(path: Path) -> list[int]:
    """Return the lines of a module's imports that come after its first other statement."""
    lines = []
    started = False
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        holds_import = any(not in_function for _, _, in_function in walk_imports(ast.Module([statement], [])))
        if holds_import and started:
            lines.append(statement.lineno)
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        started = started or not (holds_import or is_docstring)
    return lines


def find_local_imports(modules: dict[str, Path]) -> list[str]:
    """Return the imports inside functions that keep neither an optional nor a slow dependency out."""
    needs_optional = {
        name
        for name, path in modules.items()
        for node, for_types, in_function in walk_imports(ast.parse(path.read_text(encoding="utf-8")))
        for target, _ in resolve_import(node, name, path, modules)
        if not for_types and not in_function and target.split(".")[0] in OPTIONAL
    }
    found = []
    for name, path in modules.items():
        if room_of(name) in LAZY_ROOMS:
            continue
        for node, _, in_function in walk_imports(ast.parse(path.read_text(encoding="utf-8"))):
            for target, line in resolve_import(node, name, path, modules) if in_function else ():
                ours = target.split(".")[0] == PACKAGE and target not in needs_optional
                if ours or target.split(".")[0] in sys.stdlib_module_names:
                    found.append(f"{name}:{line} imports {target} inside a function")
    return found


def list_lines(items: Iterable[object]) -> str:
    """Return one line for each item, which pytest shows in full where a list would be cut short."""
    return "\n".join(map(str, items))


@pytest.fixture(scope="module")
def modules() -> dict[str, Path]:
    """Return the modules of pomona."""
    return find_modules()


@pytest.fixture(scope="module")
def imports(modules: dict[str, Path]) -> list[Import]:
    """Return the imports between the modules of pomona."""
    return find_imports(modules)


def test_the_allowed_arrows_have_no_cycle():
    pairs = [Import(source, target, 0) for source, targets in ALLOWED.items() for target in targets]
    assert find_cycles(pairs) == []


def test_the_page_has_the_same_table():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`[^|]+) \| ([^|]+) \|$", text.split("| room | may import |")[1].split("\n\n")[0], re.MULTILINE
    )
    shown: dict[str, set[str]] = {}
    for rooms, cell in rows:
        imports = set()
        for part in cell.split(";"):
            names = set(re.findall(r"`(\w+)`", part))
            imports |= names | (set().union(*(shown[name] for name in names)) if "may import" in part else set())
        shown |= dict.fromkeys(re.findall(r"`(\w+)`", rooms), imports)
    whole: dict[str, set[str]] = {}  # ALLOWED with the parts of the laboratory as one room
    for room, targets in ALLOWED.items():
        joined = {target.split(".")[0] for target in targets} - {room.split(".")[0]}
        whole.setdefault(room.split(".")[0], set()).update(joined)
    assert shown == {room: targets for room, targets in whole.items() if not room.startswith("__")}


def test_rooms_import_only_what_the_map_allows(imports):
    assert list_lines(find_forbidden(imports)) == ""


def test_no_modules_import_each_other(imports):
    assert list_lines(find_cycles(imports)) == ""


def test_only_report_and_command_line_import_the_laboratory(imports):
    sources = {room_of(one.source) for one in imports if room_of(one.target).split(".")[0] == "lab"}
    assert {room for room in sources if room.split(".")[0] != "lab"} <= {"cli", "report"}


def test_no_module_has_the_name_of_a_builtin_or_of_the_standard_library(modules):
    taken = sys.stdlib_module_names | set(dir(builtins))
    assert list_lines(name for name in modules.keys() - SHARED_NAMES if name.split(".")[-1] in taken) == ""


def test_no_source_file_is_too_long():
    files = [path for folder in (PACKAGE, "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert (
        list_lines(
            f"{path.relative_to(ROOT)} has {count} lines"
            for path, count in lengths.items()
            if count > MOST_LINES and not path.name.endswith(KERNELS)
        )
        == ""
    )


def test_imports_are_at_the_top_of_their_modules(modules):
    late = [f"{name}:{line} imports late" for name, path in modules.items() for line in find_late_imports(path)]
    assert list_lines(late) == ""


def test_imports_inside_functions_keep_optional_or_slow_packages_out(modules):
    assert list_lines(find_local_imports(modules)) == ""


# The checks themselves, on packages that are wrong.


@pytest.fixture
def write_package(tmp_path):
    """Return a function that writes a package of the given sources and returns its modules."""

    def write(**sources: str) -> dict[str, Path]:
        for name, source in {"__init__": "", **sources}.items():
            path = tmp_path / PACKAGE / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return find_modules(tmp_path)

    return write


def test_an_arrow_upwards_is_found(write_package):
    found = find_forbidden(find_imports(write_package(errors="", masking="from .cli import app\n", cli="")))
    assert list(map(str, found)) == ["pomona.masking:1 imports pomona.cli"]


def test_an_arrow_upwards_inside_a_function_is_found(write_package):
    found = find_imports(write_package(masking="def f():\n    from pomona import cli\n", cli=""))
    assert list(map(str, find_forbidden(found))) == ["pomona.masking:2 imports pomona.cli"]


def test_types_may_point_upwards_within_a_room_and_not_between_rooms(write_package):
    head = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
    modules = write_package(
        core__in__engine="from . import guards\n",
        core__in__guards=head + "from .engine import Engine\n",
        masking=head + "from .core.engine import Engine\n",
    )
    imports = find_imports(modules)
    assert find_cycles(imports) == []
    assert list(map(str, find_forbidden(imports))) == ["pomona.masking:3 imports pomona.core.engine"]


def test_a_cycle_is_found(write_package):
    imports = find_imports(
        write_package(
            core__in__a="from .b import f\n", core__in__b="from . import c\n", core__in__c="from .a import g\n"
        )
    )
    assert find_cycles(imports) == [["pomona.core.a", "pomona.core.b", "pomona.core.c"]]


def test_a_late_import_is_found(write_package):
    modules = write_package(errors='"""Errors."""\n\nimport os\n\nNAME = os.sep\n\nfrom . import masking\n', masking="")
    assert find_late_imports(modules["pomona.errors"]) == [7]


def test_a_local_import_is_found_unless_it_is_optional(write_package):
    modules = write_package(
        masking="def f():\n    import json\n    import triton\n    from . import masking_triton, errors\n",
        masking_triton="import triton\n",
        errors="",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALLOWED, "masking_triton", set())
        found = find_local_imports(modules)
    assert found == [
        "pomona.masking:2 imports json inside a function",
        "pomona.masking:4 imports pomona.errors inside a function",
    ]
