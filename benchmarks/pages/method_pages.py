"""Write a page for each method, from the registry and the records: its docstring, an example, its options, accuracies.

The pages are part of the site and not of the repository: see site_source.py.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page_helpers import ROOT, format_table, read_records
from results_page import CELL_IDENTITY, compare_with_paper, load_run_store, table_names

from pomona.core.method import METHODS, WEIGHT_KINDS, Method
from pomona.lab.sweeps.result_table import format_mean
from pomona.registry import describe_options, spec_options

HARM_MATRIX = "harm-matrix.json"

HARM = """## Small networks and patterns

Accuracy on test digits after a short training, in per cent; of several seeds the lowest.
[Which combinations harm a network](../harm.md) says how they were trained."""

# What the example of a method gives it, where that is more than a sparsity, and what it gives `attach`. The example has
# 32 steps, in which a method that updates its masks every 100 steps would not update any.
EVERY_8_STEPS = "sparsity=0.9, every=8"
ARGUMENTS = {
    "finetune": "",
    "sfp": "sparsity=0.5, pattern=pm.Filter()",
    **dict.fromkeys(("dsr", "edge_popup", "iterand", "rigl", "set", "srigl"), EVERY_8_STEPS),
}
ATTACH = dict.fromkeys(("sfp", "sparse_momentum"), ", steps_per_epoch=8")

EXAMPLE = """import torch
from torch import nn

import pomona as pm

torch.manual_seed(0)
digits = pm.data.load("digits").train
x, y = digits.x[:256].float() / 255, digits.y[:256]
model = pm.models.build("digits_cnn"{model})
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

pruner = pm.{constructor}({arguments})
pruner.attach(model, optimizer, total_steps=32{attach})
for _ in range(32):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
pruner.finish(max_batches=0)
print(f"{{pruner.sparsity():.0%}} of the targets are pruned")
"""

LOTTERY = """import torch
from torch import nn

import pomona as pm

torch.manual_seed(0)
digits = pm.data.load("digits").train
x, y = digits.x[:256].float() / 255, digits.y[:256]
model = pm.models.build("digits_cnn")


def train(model, pruner, round):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # a new one in each round
    pruner.attach(model, optimizer, total_steps=16)
    for _ in range(16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    pruner.finish(max_batches=0)
    return float((model(x).argmax(1) == y).float().mean())


lottery = pm.Lottery(sparsity=0.9, retrainings=2)
results = lottery.rounds(model, train)
"""


def render_pages() -> dict[str, str]:
    """Return the pages of all methods of the package by their names."""
    return {name: render_page(METHODS[name]) for name in built_in_methods()}


def built_in_methods() -> list[str]:
    """Return the names of the methods of the package, without those of plugins."""
    return [name for name in METHODS if METHODS[name].__module__.startswith("pomona.methods.")]


def render_page(spec: type[Method]) -> str:
    """Return the page of one method."""
    source = Path(inspect.getfile(spec)).relative_to(ROOT).as_posix()
    facts = {
        "constructor": f"`pm.{spec.__name__}`",
        "name in recipes": f"`{spec.name}`",
        "paper": spec.paper,
        "weights": f"{spec.weights}: {WEIGHT_KINDS[spec.weights]}",
        "source": f"`{source}`",
    }
    parts = [
        f"# {spec.__name__}",
        inspect.getdoc(spec) or "",
        "\n".join(f"- {fact}: {value}" for fact, value in facts.items()),
        "[The methods](../methods.md) compares it with the others and says where it differs from the authors' code.",
        f"## Example\n\n```python\n{render_example(spec)}```",
        f"## Options\n\n{format_options(spec)}",
        *format_accuracies(spec.name),
        *format_harm(spec.name),
    ]
    return "\n\n".join(parts) + "\n"


def render_example(spec: type[Method]) -> str:
    """Return a program that trains a small network with a method."""
    if spec.name == "lottery":
        return LOTTERY
    return EXAMPLE.format(
        constructor=spec.__name__,
        model=", affine=False" if spec.weights == "score" else "",  # such methods train no gains of norms
        arguments=ARGUMENTS.get(spec.name, "sparsity=0.9"),
        attach=ATTACH.get(spec.name, ""),
    )


def format_options(spec: type[Method]) -> str:
    """Return the table of a method's options: its own first, then those that all methods share."""
    meanings, shared = describe_options(spec), spec_options(Method)
    options = sorted(spec_options(spec).items(), key=lambda option: option[0] in shared)
    rows = [[f"`{name}`", f"`{option.default!r}`", escape_cell(meanings[name])] for name, option in options]
    return format_table(["option", "default", "meaning"], rows)


def escape_cell(content: str) -> str:
    """Return a text that can stand in a cell of a Markdown table."""
    return content.replace("|", "\\|")


@functools.cache
def read_tables() -> list[dict[str, Any]]:
    """Return all result tables with the runs that are recorded, each cell in the first table that has it."""
    store, seen, tables = load_run_store(), set(), []
    for name in table_names():
        result = compare_with_paper(name, store)
        cells = []
        for cell in result["cells"]:
            identity = json.dumps([cell[key] for key in CELL_IDENTITY])
            if cell["runs"] and identity not in seen:
                cells.append(cell)
            seen.add(identity)
        tables.append(result | {"cells": cells})
    return tables


def format_accuracies(method: str) -> Iterator[str]:
    """Yield the sections with the recorded results of a method, one for each table that has any."""
    tables = {table["name"]: [cell for cell in table["cells"] if cell["method"] == method] for table in read_tables()}
    if any(tables.values()):
        yield "## Results from the records\n\n[Results](../results.md) has all tables, and says how to read them."
    for table in read_tables():
        if cells := tables[table["name"]]:
            rows = [[c["label"], c["row"], c["column"], format_mean(c), c["paper_text"] or ""] for c in cells]
            shown = format_table(["network", "", "setting", "ours", "paper"], rows)
            yield f"### {table['title']}\n\n`pomona table {table['name']}` ({table['paper']})\n\n{shown}"


def format_harm(method: str) -> Iterator[str]:
    """Yield the section with a method's accuracies on six small networks, the lowest where there are several seeds."""
    cells = [cell for record in read_records(HARM_MATRIX) for cell in record["cells"] if cell["method"] == method]
    networks = list(dict.fromkeys(cell["network"] for cell in cells))
    found: dict[tuple[str, str], dict[str, float]] = {}
    for cell in cells:
        if cell.get("accuracy") is not None:
            row = found.setdefault((cell["pattern"], f"{100 * cell['sparsity']:g} %"), {})
            row[cell["network"]] = min(cell["accuracy"], row.get(cell["network"], 100.0))
    if found:
        rows = [[*key, *(f"{row[n]:.1f}" if n in row else "" for n in networks)] for key, row in found.items()]
        yield f"{HARM}\n\n{format_table(['pattern', 'sparsity', *networks], rows)}"
