"""`methods`, `data` and `check`: what there is."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .base import DataDir, Json, app, dump, facts, say, show

if TYPE_CHECKING:
    pass


@app.command()
def methods(as_json: Json = False) -> None:
    """List the ways to prune, with every option and its default."""
    from pomona.methods import METHODS
    from pomona.registry import spec_to_dict

    records = []
    for record in (METHODS[name] for name in METHODS):
        options = spec_to_dict(record())
        about = (record.__doc__ or "").split("\n")[0]
        records.append(
            {
                "name": options.pop("name"),
                "paper": record.paper,
                "weights": record.weights,
                "about": about,
                "options": options,
            }
        )
    if as_json:
        dump(records)
        return
    table = Table("method", "what it does", "option", "default", show_lines=True)
    for each in records:
        about = f"{each['about']}\n[dim]{each['paper']}; {each['weights']} weights[/]"
        defaults = "\n".join(escape(json.dumps(value, ensure_ascii=False)) for value in each["options"].values())
        table.add_row(f"[bold]{each['name']}[/]", about, "\n".join(each["options"]), defaults)
    show(table)


@app.command()
def data(
    download: Annotated[
        str | None, typer.Option("--download", metavar="NAME", help="Fetch a data set and check it.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List the data sets, or fetch one.

    Says which are here, where they were looked for, and how to get the rest.
    """
    from pomona.data import catalog, sources
    from pomona.data import download as fetch
    from pomona.lab.runs.progress import transfer

    if download is not None:
        with transfer(Console(stderr=True, quiet=as_json)) as progress:
            path = fetch(download, data_dir, progress=progress)
        say(f"'{download}' is in {path}.")
    entries = [e for e in catalog(data_dir) if download in (None, e.name)]
    if as_json:
        dump([dataclasses.asdict(entry) for entry in entries])
        return
    table = Table("data set", "here", "what it holds", "where, or how to get it")
    for entry in entries:
        here = "[green]yes[/]" if entry.present else "no"
        table.add_row(f"[bold]{entry.name}[/]", here, entry.size, escape(entry.path or entry.get))
    show(table)
    folders = ", ".join(map(str, sources.data_folders(data_dir)))
    print(f"looked in {folders}; --data-dir and POMONA_DATA name other folders.")


@app.command()
def check(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Say what this machine has.

    Python, torch, CUDA, triton and other kernels, cores, memory and data sets.
    """
    from pomona.cpu_features import describe_amx
    from pomona.data import catalog
    from pomona.lab.runs import environment as env
    from pomona.sparse import cpu as native

    versions, machine = env.versions(), env.machine()
    found: dict[str, Any] = {
        "versions": versions,
        "machine": machine | {"memory_gib": memory(), "amx": describe_amx()},
        "kernels": {
            "triton": bool(machine["gpus"]) and versions["triton"] is not None,
            "native": native.levels()[0] if native.library() is not None else None,
        },
        "data": [entry.name for entry in catalog(data_dir) if entry.present],
    }
    if as_json:
        dump(found)
        return
    gpus = [f"{gpu['name']}, {gpu['memory_gib']} GiB" for gpu in machine["gpus"]]
    show(
        facts(
            {
                **{name: version or "missing" for name, version in versions.items()},
                "GPUs": "; ".join(gpus) or "none that torch can use",
                "processor": f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads in use",
                "AMX": describe_amx(),
                "memory": f"{memory()} GiB",
                "triton kernels": "in use" if found["kernels"]["triton"] else "not in use: they need triton and a GPU",
                "native kernels": found["kernels"]["native"] or "not in use: they need a C compiler",
                "data": ", ".join(found["data"]),
            }
        )
    )


def memory() -> float | None:
    """The machine's memory in GiB, where the system tells."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
