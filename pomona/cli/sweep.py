"""The `sweep` command: train many runs, for a grid of settings, a paper's table or a grid search."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pomona.errors import require

from .application import app
from .options import RUNS, DataDir, DryRun, Json, Plot, Record, RecordAlias, Report, Settings, TableFilter, Track
from .output import print_json, print_note, print_status, print_table
from .run_outputs import require_report, write_charts, write_report_file, write_run_outputs
from .sweep_engine import Address, EngineChoice, EngineName, SlurmOptions, Wait, make_engine

if TYPE_CHECKING:
    from pomona.lab.sweeps.axes import SweepRun
    from pomona.lab.sweeps.run_store import RunStore
    from pomona.lab.tables.paper_table import PaperTable

FailedRuns = list[dict[str, Any]]


@dataclass(frozen=True)
class SweepRequest:
    """The arguments of `sweep` that do not depend on what it trains."""

    path: Path  # of the recipe or table
    settings: Sequence[str]
    out: Path | None
    only_missing: bool
    record: bool
    dry_run: bool
    as_json: bool
    training: dict[str, Any]  # options of `train_runs`
    plot: Path | None = None
    report: Path | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options that the sweep of a recipe and the filling of a table have in common."""
        from pomona.lab.sweeps.run_store import RECORDS

        on_result = None if self.as_json else print_result
        records = RECORDS if self.record else None
        return {"only_missing": self.only_missing, "records": records, "on_result": on_result, **self.training}


@app.command()
def sweep(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A TOML file, or the name of a bundled recipe or table.")
    ],
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY=VALUE,VALUE",
            help="An axis of the sweep, such as method=dpf,rigl or method.sparsity=0.8,0.9 or seed=0,1; may be "
            "repeated. It replaces the recipe's axis of the same name.",
        ),
    ] = None,
    settings: Settings = None,
    only: TableFilter = None,
    tune: Annotated[
        str | None,
        typer.Option(
            "--tune",
            metavar="KEY[=VALUE,VALUE]",
            help="Search the best value of a number, such as lr, on a validation part of the training data: a linear "
            "grid, extended while the best value is at its end.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Folder of the runs instead of runs/RECIPE, or runs/tables."),
    ] = None,
    only_missing: Annotated[
        bool, typer.Option("--only-missing", help="Skip complete runs, and resume runs that were begun.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            help="Processes with one thread each, by default one per core, or per GPU; with --engine the most runs at "
            "once.",
        ),
    ] = None,
    concurrent: Annotated[
        int | None,
        typer.Option("--concurrent", metavar="N", min=1, help="Train N runs concurrently on one GPU, on Ray on each."),
    ] = None,
    engine: EngineChoice = EngineName.local,
    address: Address = None,
    slurm: SlurmOptions = None,
    wait: Wait = None,
    packed: Annotated[int | None, typer.Option("--packed", min=1, hidden=True)] = None,  # former name of --concurrent
    record: Record = False,
    keep: RecordAlias = False,
    data_dir: DataDir = None,
    track: Track = "",
    plot: Plot = None,
    report: Report = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train a grid of runs, or the runs of a table, and compare them.

    A recipe is trained for every combination of values on its axes, a table of a paper with all runs that it needs.
    The axes are the recipe's [sweep] section and --over. Each run has its own folder FOLDER/NAME-FINGERPRINT; the
    comparison is also written to FOLDER/sweep.json. After Ctrl-C, --only-missing continues. With --engine the runs are
    trained on other machines that share this folder.
    """
    from pomona.integrations.trackers import parse_names
    from pomona.lab.recipes import bundled
    from pomona.lab.runs.distributed import distributed_context
    from pomona.lab.runs.progress import make_reporter
    from pomona.lab.sweeps.axes import parse_axis
    from pomona.lab.sweeps.engine import SweepSubmitted
    from pomona.lab.sweeps.sweep import SweepInterrupted

    require_report(report)
    pictures = (plot, report) if distributed_context().is_first else (None, None)
    path = bundled.find_recipe(recipe)
    concurrent = packed if concurrent is None else concurrent
    elsewhere = make_engine(engine, jobs, concurrent, address, slurm, wait)
    show_progress = not as_json and sys.stderr.isatty() and jobs == 1 and elsewhere is None
    here = {"jobs": jobs, "concurrent": concurrent} if elsewhere is None else {"engine": elsewhere}
    training: dict[str, Any] = {
        **here,
        "data_dir": data_dir,
        "progress": (lambda: make_reporter(Console(stderr=True))) if show_progress else None,
        "note": print_note,
        "trackers": parse_names(track),
    }
    axes = dict(map(parse_axis, over or []))
    kind = "table" if bundled.is_table_file(path) else "recipe" if tune is None else "tuning"
    request = SweepRequest(
        path, settings or [], out, only_missing, record or keep, dry_run, as_json, training, *pictures
    )
    refuse_options(kind, over, only, tune, request)
    with silent_except_first_process():
        try:
            if kind == "table":
                failed = fill_paper_table(request, only or [])
            elif kind == "tuning":
                failed = tune_setting(request, str(tune), axes)
            else:
                failed = sweep_recipe(request, axes)
        except SweepInterrupted as stopped:
            print_status(str(stopped))
            raise typer.Exit(130) from stopped
        except SweepSubmitted as submitted:
            facts = {"submitted": submitted.count, "jobs": submitted.identifiers}
            print_json(facts) if as_json else print_status(str(submitted))
            return
        for run in failed:
            print_status(f"failed: {run['name']}: {run['error']}")
    if failed:
        raise typer.Exit(1)


def refuse_options(
    kind: str, over: Sequence[str] | None, only: Sequence[str] | None, tune: str | None, request: SweepRequest
) -> None:
    """Raise PomonaError for an option that does not apply to a table, a recipe or tuning."""
    inapplicable: dict[str, dict[str, Any]] = {
        "table": {"--over": over, "--tune": tune},
        "recipe": {"--only": only},
        "tuning": {"--only": only, "--record": request.record, "--plot": request.plot, "--report": request.report},
    }
    for option, given in inapplicable[kind].items():
        target = kind if kind == "tuning" else f"a {kind}"
        require(not given, f"{option} does not apply to {target}: leave it out.")


@contextlib.contextmanager
def silent_except_first_process() -> Iterator[None]:
    """Discard all output, under torchrun, of every process but the first."""
    from pomona.lab.runs.distributed import distributed_context

    with contextlib.ExitStack() as stack:
        if not distributed_context().is_first:
            null = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(null))
            stack.enter_context(contextlib.redirect_stderr(null))
        yield


def sweep_recipe(request: SweepRequest, axes: Mapping[str, Any]) -> FailedRuns:
    """Train a recipe over its axes, print the comparison and return the failed runs."""
    from pomona.lab.sweeps import sweep as lab
    from pomona.lab.sweeps.result_table import render_table

    out = request.out or RUNS / request.path.stem
    if request.dry_run:
        runs = lab.expand_runs(request.path, axes, out, request.settings)
        print_runs([(run.recipe.name, run.state(), run.folder) for run in runs], request.as_json)
        for line in [] if request.as_json else dropped_option_notes(runs):
            print_note(line)
        return []
    result = lab.sweep(request.path, axes, out, overrides=request.settings, **request.options)
    if request.as_json:
        print_json(result)
    else:
        print_table(render_table(result["cells"]))
        print(f"total time {result['seconds']:.0f} s; the runs are in {out}")
    if result["cells"]:
        write_run_outputs(out, request.plot, request.report)
    return list(result["failed"])


def fill_paper_table(request: SweepRequest, only: Sequence[str]) -> FailedRuns:
    """Train the missing runs of a paper's table, print the comparison and return the failed runs."""
    from pomona.lab.sweeps.run_store import RUNS, RunStore
    from pomona.lab.tables.definitions import load_table
    from pomona.lab.tables.filling import TABLE_RUNS, fill_table
    from pomona.lab.tables.rendering import render_table

    table, out = load_table(request.path, request.settings).select(only), request.out or TABLE_RUNS
    require(request.plot is None or bool(table.charts), f"{table.name} defines no charts: leave out --plot.")
    if request.dry_run:
        store = RunStore((RUNS, out))
        print_runs([(run.name, run.state(store), run.find_folder(store)) for run in table.runs()], request.as_json)
        return []
    result = fill_table(table, out, **request.options)
    print_json(result) if request.as_json else print_table(render_table(result))
    if request.plot is not None or request.report is not None:
        write_table_outputs(request, table, RunStore((RUNS, out)))
    return list(result["failed"])


def write_table_outputs(request: SweepRequest, table: PaperTable, store: RunStore) -> None:
    """Write the charts and the report of a table that are asked for."""
    from pomona.lab.tables.drawings import draw_charts
    from pomona.report.collection import collect_table

    if request.plot is not None:
        write_charts(draw_charts(table, store), request.plot, table.name)
    if request.report is not None:
        write_report_file(collect_table(table, store), request.report)


def tune_setting(request: SweepRequest, tune: str, axes: Mapping[str, Any]) -> FailedRuns:
    """Search the best value of a setting and print it; no run is reported as failed."""
    from pomona.lab.sweeps import grid_search
    from pomona.lab.sweeps.axes import parse_axis

    key, grid = parse_axis(tune) if "=" in tune else (tune.strip(), None)
    other_axes = [axis for axis in axes if axis != "seed"]
    require(not other_axes, f"tuning takes one setting and seeds: leave out --over {', '.join(other_axes[:1])}.")
    if request.dry_run:
        key, values = grid_search.resolve_search(request.path, key, grid, request.settings)
        plain = f"{key}: {', '.join(f'{v:g}' for v in values)}"
        print_json({"key": key, "grid": values}) if request.as_json else print(plain)
        return []
    result = grid_search.tune(
        request.path,
        key,
        grid,
        request.out or RUNS / f"{request.path.stem}-tune",
        seeds=axes.get("seed"),
        overrides=request.settings,
        on_result=None if request.as_json else print_validation_result,
        **request.training,
    )
    if request.as_json:
        print_json(result)
    else:
        print_search(result)
    return []


def print_search(result: Mapping[str, Any]) -> None:
    """Print the points of a grid search, and the option that selects the best value."""
    from pomona.lab.sweeps.result_table import format_mean

    grid = Table(result["key"], "validation", box=None, pad_edge=False)
    for point in result["points"]:
        reached = point["error"] or format_mean(point)
        grid.add_row(f"{point['value']:g}", escape(f"{reached} ★" if point["value"] == result["best"] else reached))
    print_table(grid)
    where = "" if result["inside"] else ", which is at an end of the grid"
    print(f"the best value is {result['best']:g}{where}; to use it: --set {result['key']}={result['best']:g}")


def print_result(done: int, total: int, run: SweepRun, result: Mapping[str, Any]) -> None:
    """Print one line on the result of a run."""
    from pomona.lab.runs.progress import format_measurements

    failed = "error" in result
    texts = [f"failed: {result['error']}"] if failed else [*format_measurements(result), f"{result['seconds']:.1f} s"]
    print_status(" · ".join([f"{done} of {total}", run.recipe.name, *texts]))


def print_validation_result(done: int, total: int, run: SweepRun, result: Mapping[str, Any]) -> None:
    """Print one line on the result of a run of a grid search, with the results on the validation part only."""
    hidden = {key: value for key, value in result.items() if key not in ("accuracy", "perplexity", "test_loss")}
    valid = {key.removeprefix("valid_"): value for key, value in result.items() if key.startswith("valid_")}
    print_result(done, total, run, hidden | valid)


def print_runs(runs: Sequence[tuple[str, str, Path | None]], as_json: bool) -> None:
    """Print the names, states and folders of the runs of a sweep."""
    if as_json:
        print_json([{"name": n, "state": state, "folder": None if f is None else str(f)} for n, state, f in runs])
        return
    grid = Table("run", "state", "folder", box=None, pad_edge=False)
    for name, state, folder in runs:
        grid.add_row(escape(name), state, escape(str(folder or "")))
    print_table(grid)


def dropped_option_notes(runs: Sequence[SweepRun]) -> list[str]:
    """Return one note for each option of the sweep that some of its methods do not have."""
    methods: dict[str, list[str]] = {}
    for run in runs:
        for key in run.dropped:
            methods.setdefault(key, []).append(run.recipe.method["name"])
    return [f"{key} does not apply to {', '.join(dict.fromkeys(names))}." for key, names in methods.items()]
