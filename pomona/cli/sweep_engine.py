"""The options of `sweep` that choose the engine, and the engine that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pomona.errors import require, unknown_name_error

if TYPE_CHECKING:
    from pomona.lab.sweeps.engine import Engine


class EngineName(StrEnum):
    """Where the runs of a sweep are trained."""

    local = "local"
    ray = "ray"
    slurm = "slurm"


EngineChoice = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="|".join(EngineName),
        help="Train on this machine, on a Ray cluster, or as jobs of Slurm.",
        show_default=True,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="Ray: the cluster, such as auto, HOST:6379 or ray://HOST:10001; by default one on this machine.",
    ),
]
SlurmOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm",
        metavar="KEY=VALUE",
        help="Slurm: an option of sbatch, such as partition=gpu, time=8:00:00, gpus=1 or mem=32GB; may be repeated.",
    ),
]
Wait = Annotated[
    bool | None,
    typer.Option("--wait/--no-wait", help="Slurm: wait for the results, or only submit the runs.", show_default=False),
]


def make_engine(
    name: str,
    jobs: int | None,
    concurrent: int | None,
    address: str | None,
    slurm: Sequence[str] | None,
    wait: bool | None,
) -> Engine | None:
    """Return the engine that the options describe, or None for this machine; refuse options of another engine."""
    if name not in list(EngineName):
        raise unknown_name_error("engine", name, EngineName)
    from pomona.lab.sweeps.ray_engine import RayEngine
    from pomona.lab.sweeps.slurm_engine import SlurmEngine

    for owner, option, given in (
        (EngineName.ray, "--address", address),
        (EngineName.slurm, "--slurm", slurm or None),
        (EngineName.slurm, "--wait and --no-wait", wait),
    ):
        require(given is None or name == owner, f"{option} is for --engine {owner}, not for {name}: leave it out.")
    if name == EngineName.ray:
        return RayEngine(address, concurrent, jobs)
    if name == EngineName.slurm:
        require(concurrent is None, "Slurm gives each run its own GPU: leave out --concurrent, or use --engine ray.")
        return SlurmEngine(dict(map(parse_option, slurm or [])), jobs, wait is not False)
    return None


def parse_option(text: str) -> tuple[str, Any]:
    """Return the name and the value of an option of sbatch, with its name as in Python."""
    name, equals, value = text.partition("=")
    require(bool(equals and name.strip() and value), f"'{text}' is not of the form KEY=VALUE (partition=gpu).")
    return name.strip().lstrip("-").replace("-", "_"), int(value) if value.isdecimal() else value
