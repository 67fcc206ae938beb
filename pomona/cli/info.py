"""The commands `methods`, `data` and `check`: what is available."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pomona.errors import require

from .application import app
from .options import DataDir, Json
from .output import facts_table, print_json, print_status, print_table


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Explain this method.")] = None,
    as_json: Json = False,
) -> None:
    """List the pruning methods, or explain one.

    The list has all options and their defaults. With a name: the paper, what the method does, what its options mean,
    and an example.
    """
    from pomona.methods import METHODS, describe_method, summarize_method

    found = [summarize_method(each) for each in METHODS] if name is None else describe_method(name)
    if as_json:
        print_json(found)
    elif isinstance(found, dict):
        print_method(found)
    else:
        print_table(table_of_methods(found))


def table_of_methods(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of methods with their options; an option stands on the line of its default at any width."""
    from pomona.registry import format_plain_data

    longest = max(len(option) for method in found for option in method["options"])
    table = Table("method", show_lines=True, expand=True)
    table.add_column("what it does", ratio=2)
    table.add_column("options and defaults", ratio=3)
    for method in found:
        options = Table.grid(padding=(0, 2, 0, 0))
        options.add_column(width=longest)
        options.add_column(overflow="fold")
        for option, value in method["options"].items():
            options.add_row(option, escape(format_plain_data(value)))
        about = f"{method['about']}\n[dim]{method['paper']}; {method['weights']} weights[/]"
        table.add_row(f"[bold]{method['name']}[/]", about, options)
    return table


def print_method(method: Mapping[str, Any]) -> None:
    """Print the explanation of one method."""
    print_table(Text.assemble((method["name"], "bold"), f": {method['about']}"))
    print_table(f"{method['paper']}; {method['weights']} weights: {method['weights_mean']}.\n")
    if method["description"]:
        print_table(Text(" ".join(method["description"].split()) + "\n"))
    print_table(table_of_options(method))
    print_example(method)


def table_of_options(found: Mapping[str, Any]) -> Table:
    """Return a table of the options of one method or data set: name, default and meaning."""
    from pomona.registry import format_plain_data

    table = Table("option", "default", "meaning", box=None, pad_edge=False)
    for option, value in found["options"].items():
        table.add_row(f"[bold]{option}[/]", escape(format_plain_data(value)), escape(found["meanings"][option]))
    return table


def print_example(found: Mapping[str, Any]) -> None:
    """Print how a method or data set is used in Python and on the command line, in lines that are never wrapped."""
    print(f"\nIn Python:\n\n{textwrap.indent(found['python'].strip(), '    ')}")
    print(f"\nOn the command line:\n\n    {found['command']}")


@app.command()
def data(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Explain this data set.")] = None,
    download: Annotated[
        str | None, typer.Option("--download", metavar="NAME", help="Download a data set and verify its files.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List the data sets, explain one, or download one.

    Shows which data sets are present, which folders were searched, and how to get the others.
    """
    from pomona.data import catalog, describe_source, sources
    from pomona.data import download as fetch
    from pomona.lab.runs.progress import download_progress

    require(
        name in (None, download) or download is None,
        f"'{name}' would be explained and '{download}' downloaded: name one data set.",
    )
    found = None if name is None else describe_source(name, data_dir)
    if download is not None:
        with download_progress(Console(stderr=True, quiet=as_json)) as progress:
            path = fetch(download, data_dir, progress=progress)
        print_status(f"'{download}' is in {path}.")
        found = None if name is None else describe_source(name, data_dir)
    if found is not None:
        print_json(found) if as_json else print_data_set(found)
        return
    entries = [e for e in catalog(data_dir) if download in (None, e.name)]
    if as_json:
        print_json([dataclasses.asdict(entry) for entry in entries])
        return
    table = Table("data set", "present", "contents", "location, or how to get it")
    for entry in entries:
        present = "[green]yes[/]" if entry.present else "no"
        table.add_row(f"[bold]{entry.name}[/]", present, entry.size, escape(entry.path or entry.get))
    print_table(table)
    searched = ", ".join(map(str, sources.data_folders(data_dir)))
    print(f"searched {searched}; --data-dir and POMONA_DATA add other folders.")


def print_data_set(found: Mapping[str, Any]) -> None:
    """Print the explanation of one data set."""
    print_table(Text.assemble((found["name"], "bold"), f": {' '.join(found['about'].split())}\n"))
    facts = {
        "contents": found["size"] or "as you provide",
        "classes": found["classes"] or "as the files have",
        "found": found["path"] or ("built in" if found["present"] else "no"),
        "searched": "\n".join(found["looked"]),
        "how to get it": found["get"],
        "published as": "\n".join(file["url"] for files in found["downloads"].values() for file in files),
        "licence": found["licence"],
        "citation": found["citation"],
    }
    print_table(facts_table({key: value for key, value in facts.items() if value}))
    if found["options"]:
        print()
        print_table(table_of_options(found))
    print_example(found)


@app.command()
def check(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show what this machine provides.

    Versions of Python, torch and triton, GPUs, kernels, cores, memory and data sets.
    """
    from pomona.cpu_features import describe_amx
    from pomona.data import catalog
    from pomona.lab.runs import environment
    from pomona.sparse.cpu import backend as cpu_backend

    versions, machine = environment.package_versions(), environment.describe_machine()
    found: dict[str, Any] = {
        "versions": versions,
        "machine": machine | {"memory_gib": memory_gib(), "amx": describe_amx()},
        "kernels": {
            "triton": bool(machine["gpus"]) and versions["triton"] is not None,
            "native": cpu_backend.supported_instruction_sets()[0] if cpu_backend.load_library() is not None else None,
        },
        "data": [entry.name for entry in catalog(data_dir) if entry.present],
    }
    if as_json:
        print_json(found)
        return
    gpus = [f"{gpu['name']}, {gpu['memory_gib']} GiB" for gpu in machine["gpus"]]
    facts = {
        **{name: version or "missing" for name, version in versions.items()},
        "GPUs": "; ".join(gpus) or "none that torch can use",
        "processor": f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads in use",
        "memory": f"{memory_gib()} GiB",
        "AMX": describe_amx(),
        "triton kernels": "in use" if found["kernels"]["triton"] else "not in use: they need triton and a GPU",
        "native kernels": found["kernels"]["native"] or "not in use: they need a C compiler",
        "data": ", ".join(found["data"]),
    }
    print_table(facts_table(facts))


def memory_gib() -> float | None:
    """Return the memory of the machine in GiB; None where the system does not report it."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
