"""The commands `methods`, `data` and `check`: what is available."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .application import app
from .options import DataDir, Json
from .output import facts_table, print_json, print_status, print_table


@app.command()
def methods(as_json: Json = False) -> None:
    """List the pruning methods, with all options and their defaults."""
    from pomona.methods import METHODS
    from pomona.registry import spec_to_dict

    found = []
    for spec in (METHODS[name] for name in METHODS):
        options = spec_to_dict(spec())
        found.append(
            {
                "name": options.pop("name"),
                "paper": spec.paper,
                "weights": spec.weights,
                "about": (spec.__doc__ or "").split("\n")[0],
                "options": options,
            }
        )
    if as_json:
        print_json(found)
        return
    table = Table("method", "what it does", "option", "default", show_lines=True)
    for method in found:
        about = f"{method['about']}\n[dim]{method['paper']}; {method['weights']} weights[/]"
        defaults = "\n".join(escape(json.dumps(value, ensure_ascii=False)) for value in method["options"].values())
        table.add_row(f"[bold]{method['name']}[/]", about, "\n".join(method["options"]), defaults)
    print_table(table)


@app.command()
def data(
    download: Annotated[
        str | None, typer.Option("--download", metavar="NAME", help="Download a data set and verify its files.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List the data sets, or download one.

    Shows which data sets are present, which folders were searched, and how to get the others.
    """
    from pomona.data import catalog, sources
    from pomona.data import download as fetch
    from pomona.lab.runs.progress import download_progress

    if download is not None:
        with download_progress(Console(stderr=True, quiet=as_json)) as progress:
            path = fetch(download, data_dir, progress=progress)
        print_status(f"'{download}' is in {path}.")
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
