"""The command line: parses, calls the library, prints.

What a program wants goes to stdout, what a person is told on the way to stderr. Bad input is one
sentence and exit code 2, Ctrl-C is 130, anything unforeseen 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from .core.errors import PomonaError, require, unknown
from .version import __version__

if TYPE_CHECKING:  # torch and all that needs it are imported by the commands
    from .lab.recipe import Recipe
    from .lab.sweep import Cell

RUNS = Path("runs")
DEMO = RUNS / "demo"


class Commands(TyperGroup):
    """The commands; a misspelt one is answered with the nearest."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None:
            raise unknown("command", cmd_name, self.list_commands(ctx))
        return command


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of a table.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="FOLDER", help="Look for data here, before $POMONA_DATA and the user's cache."),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    warnings.showwarning = lambda message, *_, **__: note(str(message))
    try:
        return int(app(arguments, prog_name="pomona", standalone_mode=False) or 0)
    except Exception as error:
        if os.environ.get("POMONA_TRACEBACK"):
            raise
        code, sentence = explain(error)
        say(f"error: {sentence}")
        return code


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and sentence for what went wrong."""
    if isinstance(error, PomonaError):
        return 2, str(error)
    if hasattr(error, "format_message"):  # the parser's own; typer has it from click or brings it along
        return 2, error.format_message()
    if isinstance(error, typer.Abort):
        return 130, "interrupted."
    reason = str(error).strip().split("\n")[0]
    what = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return 1, f"this should not happen ({what}); set POMONA_TRACEBACK=1 to see where it comes from."


def say(sentence: str) -> None:
    """Tell a person, on one line of stderr."""
    print(" ".join(sentence.split()), file=sys.stderr, flush=True)


def note(sentence: str) -> None:
    """Tell a person what is no error but should be known."""
    say(f"note: {sentence}")


def show(value: Any) -> None:
    """Print a table for a person."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(value)


def dump(value: Any) -> None:
    """Print a value for a program."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def facts(values: Mapping[str, Any]) -> Table:
    """Names and values, one a line."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for key, value in values.items():
        table.add_row(Text(key, style="bold"), Text(str(value)))
    return table


@app.callback(invoke_without_command=True)
def pomona(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Sparse neural networks: train them, compare ways to prune them, see what is left.

    Begin with `pomona demo`. Every command takes --json for a program, and --help.
    """
    if version:
        print(f"pomona {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


# ---- demo


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer epochs and fewer cells: some seconds.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the runs and the picture go.")] = DEMO,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The first seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare ways to prune, in about a minute.

    A small convolutional network is trained on scikit-learn's digits, dense and then pruned by each
    method, each time for as long. Nothing is downloaded. The table is also in FOLDER/demo.json, and
    as a picture in FOLDER/demo.svg.
    """
    from .lab import Interrupted
    from .lab import demo as lab
    from .lab.progress import Series

    plan = lab.QUICK if quick else lab.FULL
    progress = None if as_json else Series(Console(stderr=True), len(plan.recipes(seed)))
    try:
        result = lab.run(out, plan, seed=seed, progress=progress)
    except Interrupted as stopped:
        say("stopped: the demo is short and starts over when it is called again.")
        raise typer.Exit(130) from stopped
    finally:
        if progress is not None:
            progress.end()
    if as_json:
        dump(result)
        return
    show(lab.table(result["cells"]))
    print(f"{result['seconds']:.0f} s in all; the picture is {out / 'demo.svg'}")


# ---- train


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A TOML file, a recipe that comes with pomona, or a run's folder to resume."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting, such as method.sparsity=0.95; may be repeated."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The run's name instead of the recipe's; its folder is runs/NAME.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="The run's folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    data_dir: DataDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and show it; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train what a recipe says, in a folder.

    Ctrl-C stops a run so that it can be resumed: `pomona train --resume FOLDER`.
    """
    from . import lab
    from .lab.progress import reporter

    resolved, folder = resolve(recipe, settings or [], name, out, resume)
    if dry_run:
        rehearse(resolved, folder, resume, data_dir, as_json)
        return
    with resumable(folder, data_dir):
        summary = lab.train(
            resolved,
            folder,
            resume=resume,
            data_dir=data_dir,
            progress=None if as_json else reporter(Console(stderr=True)),
            note=note,
        )
    if os.environ.get("RANK", "0") != "0":  # under torchrun one process speaks for all
        return
    if as_json:
        dump(summary)
    else:
        show(facts(reached(summary, folder)))


def resolve(given: str, settings: list[str], name: str | None, out: Path | None, resume: bool) -> tuple[Recipe, Path]:
    """The recipe with its settings, and the folder of its run."""
    from .lab.recipe import Recipe

    folder = Path(given)
    if folder.is_dir():  # of a run
        require(resume, f"'{given}' is a folder: give a recipe, or resume the run in it with --resume.")
        require((folder / "recipe.toml").is_file(), f"there is no run to resume in '{given}': it has no recipe.toml.")
        out, path = out or folder, folder / "recipe.toml"
    else:
        path = find(given)
    recipe = Recipe.load(path, [*settings, *([f"name={json.dumps(name)}"] if name else [])])
    return recipe, out or RUNS / recipe.name


def find(given: str) -> Path:
    """A recipe by its path, or by its name among those that come with pomona."""
    path = Path(given)
    shipped = recipes()
    if path.is_file():
        return path
    if path.name == given and path.stem in shipped and path.suffix in ("", ".toml"):
        return shipped[path.stem]
    if path.suffix == ".toml" or path.name != given:
        raise PomonaError(f"there is no recipe '{given}': give a TOML file, or one of {', '.join(shipped)}.")
    raise unknown("recipe", given, shipped)


def recipes() -> dict[str, Path]:
    """The recipes that come with pomona: beside the package in a checkout, in the environment when installed."""
    checkout = Path(__file__).resolve().parents[1] / "recipes"
    installed = Path(sysconfig.get_path("data")) / "share" / "pomona" / "recipes"
    return {file.stem: file for folder in (installed, checkout) for file in sorted(folder.glob("*.toml"))}


def rehearse(recipe: Recipe, folder: Path, resume: bool, data_dir: Path | None, as_json: bool) -> None:
    """What --dry-run shows: the recipe with every default, then what would be done."""
    if not as_json:
        print(recipe.to_toml())
    plan = preview(recipe, folder, resume, data_dir)
    if as_json:
        dump({"recipe": recipe.to_dict(), **plan})
    else:
        show(facts(planned(plan)))


@contextlib.contextmanager
def resumable(folder: Path, data_dir: Path | None) -> Iterator[None]:
    """Around a run: where it is stopped, say how to go on."""
    from .lab import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stopped:
        say(parting(stopped, folder, data_dir))
        raise typer.Exit(130) from stopped


def preview(recipe: Recipe, folder: Path, resume: bool, data_dir: Path | None) -> dict[str, Any]:
    """What a run would do, after all its checks."""
    from .lab import plan
    from .lab.run import check_folder

    done = check_folder(recipe, folder, resume)
    would = "nothing: the run is complete" if done else "go on" if resume else "train"
    return {"would": would, "folder": str(folder), **plan(recipe, data_dir=data_dir)}


def planned(plan: Mapping[str, Any]) -> dict[str, str]:
    """A plan in words."""
    pruned = plan["pruned"]
    return {
        "would": plan["would"],
        "folder": plan["folder"],
        "device": plan["device"],
        "data": f"{plan['data']['train']:,} rows to train, {plan['data']['test']:,} to test",
        "steps": f"{plan['steps']:,}, {plan['steps_per_epoch']:,} an epoch",
        "parameters": f"{plan['params']:,}, with {plan['macs']:,} MACs",
        "to prune": f"{sum(pruned.values()):,} of them, in {len(pruned)} tensors" if pruned else "nothing",
    }


def parting(stopped: BaseException, folder: Path, data_dir: Path | None) -> str:
    """What is said when a run was stopped: how to go on."""
    from .lab import Interrupted, checkpoint

    place = ["--data-dir", str(data_dir)] if data_dir else []
    again = shlex.join(["pomona", "train", "--resume", str(folder), *place])
    if isinstance(stopped, Interrupted):
        return f"stopped after step {stopped.step} of {stopped.total}; to go on: {again}"
    if checkpoint.found(folder):  # a second Ctrl-C, or one outside the training itself
        return f"stopped at once; to go on from the last checkpoint: {again}"
    return "stopped before there was anything to resume."


def reached(summary: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """A summary in words."""
    quality = {k: f"{summary[k]:.2f}{unit}" for k, unit in (("accuracy", " %"), ("perplexity", "")) if k in summary}
    return {
        **quality,
        "sparsity": f"{summary['sparsity']:.2%} of what is pruned, {summary['model_sparsity']:.2%} of the model",
        "parameters left": f"{summary['nonzeros']:,} of {summary['params']:,}",
        "MACs left": f"{summary['macs_left']:,} of {summary['macs']:,}",
        "seconds": f"{summary['seconds']:.1f}",
        "folder": str(folder),
    }


# ---- sweep


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A TOML file, or a recipe that comes with pomona.")],
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY=VALUE,VALUE",
            help="An axis, such as method=dpf,rigl or method.sparsity=0.8,0.9 or seed=0,1; may be repeated. "
            "It takes the place of the recipe's own axis of that name.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every cell; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where the runs go instead of runs/RECIPE.")
    ] = None,
    only_missing: Annotated[
        bool, typer.Option("--only-missing", help="Leave complete cells alone, and go on with begun ones.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Processes of one thread each; one a core, or one in all on a GPU."),
    ] = None,
    data_dir: DataDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and show it; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe for every combination of some settings, and compare.

    The axes are the recipe's [sweep] table and --over. Each cell is an ordinary run in FOLDER/NAME-FINGERPRINT;
    the table is also in FOLDER/sweep.json. Ctrl-C stops so that --only-missing can go on.
    """
    from .lab import sweep as lab
    from .lab.progress import reporter
    from .lab.table import table

    path = find(recipe)
    axes, place = dict(map(lab.axis, over or [])), out or RUNS / path.stem
    if dry_run:
        cells = lab.cells(path, axes, place, settings or [])
        if as_json:
            dump([{"name": c.recipe.name, "folder": str(c.folder), "state": c.state()} for c in cells])
        else:
            show(outline(cells))
            for line in omissions(cells):
                say(line)
        return
    follow = not as_json and sys.stderr.isatty() and jobs == 1
    try:
        result = lab.sweep(
            path,
            axes,
            place,
            overrides=settings or [],
            only_missing=only_missing,
            jobs=jobs,
            data_dir=data_dir,
            report=None if as_json else ended,
            progress=(lambda: reporter(Console(stderr=True))) if follow else None,
            note=note,
        )
    except lab.Stopped as stopped:
        say(str(stopped))
        raise typer.Exit(130) from stopped
    if as_json:
        dump(result)
    else:
        show(table(result["cells"]))
        print(f"{result['seconds']:.0f} s in all; the runs are in {place}")
    for cell in result["failed"]:
        say(f"failed: {cell['name']}: {cell['error']}")
    if result["failed"]:
        raise typer.Exit(1)


def ended(done: int, total: int, cell: Cell, outcome: Mapping[str, Any]) -> None:
    """One line for each cell of a sweep."""
    from .lab.progress import numbers

    told = ["failed: " + outcome["error"]] if "error" in outcome else [*numbers(outcome), f"{outcome['seconds']:.1f} s"]
    say(" · ".join([f"{done} of {total}", cell.recipe.name, *told]))


def outline(cells: Sequence[Cell]) -> Table:
    """The cells of a sweep, and which are there."""
    grid = Table("cell", "state", "folder", box=None, pad_edge=False)
    for cell in cells:
        grid.add_row(escape(cell.recipe.name), cell.state(), escape(str(cell.folder)))
    return grid


def omissions(cells: Sequence[Cell]) -> list[str]:
    """Which options the methods of a sweep do not have, said once each."""
    lost: dict[str, list[str]] = {}
    for cell in cells:
        for key in cell.dropped:
            lost.setdefault(key, []).append(cell.recipe.method["name"])
    return [f"note: {key} is not for {', '.join(dict.fromkeys(names))}." for key, names in lost.items()]


# ---- retrain


@app.command()
def retrain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run that pruned.")],
    start: Annotated[
        str,
        typer.Option("--from", metavar="START", help="init (the run's own first weights), random, or final."),
    ] = "init",
    budget: Annotated[
        str, typer.Option("--budget", help="epochs (as many as the run), or flops (as many as cost the same).")
    ] = "epochs",
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="The seed of a random start.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="The new run's folder instead of RUN-retrain-START.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    data_dir: DataDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and show it; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train the mask that a run found from scratch, and compare.

    Is the mask a lottery ticket? The mask is fixed, and the learning rate begins anew.
    """
    from .lab import retrain as again
    from .lab.progress import reporter

    recipe, folder = again.plan(run, start, budget, out=out, seed=seed)
    if dry_run:
        rehearse(recipe, folder, resume, data_dir, as_json)
        return
    with resumable(folder, data_dir):
        result = again.retrain(
            run,
            start,
            budget,
            out=folder,
            seed=seed,
            resume=resume,
            data_dir=data_dir,
            progress=None if as_json else reporter(Console(stderr=True)),
            note=note,
        )
    if as_json:
        dump(result)
    else:
        show(compared(result["runs"]))


def compared(runs: Sequence[Mapping[str, Any]]) -> Table:
    """A run and its retraining side by side; costs are in epochs of dense training."""
    measure = "accuracy" if "accuracy" in runs[0] else "perplexity"
    grid = Table("run", "", measure, "sparsity", "epochs", "cost in dense epochs", box=None, pad_edge=False)
    for one in runs:
        value = f"{one[measure]:.2f}{' %' if measure == 'accuracy' else ''}"
        numbers = value, f"{one['sparsity']:.2%}", f"{one['epochs']}", f"{one['cost']:.1f}"
        grid.add_row(escape(Path(one["run"]).name), one["how"], *numbers)
    return grid


# ---- shrink


@app.command()
def shrink(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run that pruned filters.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The smaller network's file instead of RUN/shrunk.pt2.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Take a run's removed filters out for good.

    Writes the smaller dense network as a program that torch.export.load runs without pomona, and shows
    parameters, MACs and the time of both on one CPU thread.
    """
    from .lab import shrink as lab

    shrunk, file = lab.shrink(run, out)
    if as_json:
        dump({**shrunk.facts(), "file": str(file)})
    else:
        show(shrunk)
        print(f"the smaller network is {file}")


# ---- methods, data, check


@app.command()
def methods(as_json: Json = False) -> None:
    """List the ways to prune, with every option and its default."""
    from .core.registry import describe
    from .methods import METHODS

    records = []
    for record in (METHODS[name] for name in METHODS):
        options = describe(record())
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
    from .data import catalog, sources
    from .data import download as fetch
    from .lab.progress import transfer

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
    print(f"looked in {', '.join(map(str, sources.roots(data_dir)))}; --data-dir and POMONA_DATA name other folders.")


@app.command()
def check(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Say what this machine has.

    Python, torch, CUDA, triton and other kernels, cores, memory and data sets.
    """
    from .data import catalog
    from .lab import env

    versions, machine = env.versions(), env.machine()
    found: dict[str, Any] = {
        "versions": versions,
        "machine": machine | {"memory_gib": memory()},
        "kernels": {"triton": bool(machine["gpus"]) and versions["triton"] is not None, "native": False},
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
                "memory": f"{memory()} GiB",
                "triton kernels": "in use" if found["kernels"]["triton"] else "not in use: they need triton and a GPU",
                "native kernels": "none in this version",
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
