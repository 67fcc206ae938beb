"""The runs of a report: those in folders, in records and behind the cells of tables, with the figures of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import PomonaError, require
from ..lab.sweeps.run_store import RUNS, RunStore, find_run_folders, read_record
from ..lab.tables.catalog import find_table
from ..lab.tables.paper_table import PaperTable, TableCell, parse_paper_number
from .run_data import RunData, describe_run, explain_refusal, read_run
from .series import differing_settings


@dataclass(frozen=True)
class PaperPoint:
    """A result that a paper prints, beside which ours are shown."""

    network: str
    series: str
    sparsity: float
    mean: float
    std: float | None


@dataclass(frozen=True)
class ReportData:
    """The runs of a report, and the results of the papers that they are compared with."""

    title: str
    runs: tuple[RunData, ...]
    papers: tuple[PaperPoint, ...] = ()

    @property
    def networks(self) -> list[str]:
        """The networks in the order in which they appear."""
        return list(dict.fromkeys([*(run.network for run in self.runs), *(point.network for point in self.papers)]))


def collect_runs(sources: Sequence[str | Path], folders: Sequence[Path] = (RUNS,)) -> ReportData:
    """Return the runs in sources: folders of runs or sweeps, record files, and names of tables.

    The runs of a table are searched in `folders` and among the records.

    Raises:
        PomonaError: for a source without any run.
    """
    require(bool(sources), "a report needs runs: give folders of runs or sweeps, record files or names of tables.")
    runs: dict[tuple[str, ...], RunData] = {}
    papers: list[PaperPoint] = []
    titles = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            folders_of_runs = list(find_run_folders(path))
            found = list(filter(None, map(read_run, folders_of_runs)))
            if not found:
                raise PomonaError(f"'{path}' holds no run{explain_refusals(folders_of_runs)}.")
            titles.append(path.resolve().name)
        elif path.suffix == ".json":
            found = [read_record_file(path)]
            titles.append(found[0].name)
        else:
            is_path = len(path.parts) > 1 and not path.is_file()
            require(not is_path, f"'{source}' is not there: give folders of runs, record files or names of tables.")
            table = find_table(str(source))
            require(isinstance(table, PaperTable), f"{source} is computed, not trained: a report shows tables of runs.")
            assert isinstance(table, PaperTable)
            part = collect_table(table, RunStore(folders))
            found, title = list(part.runs), part.title
            papers += part.papers
            titles.append(title)
        for run in found:
            runs.setdefault((run.name, str(run.folder), run.network, run.series or "", str(run.settings)), run)
    return ReportData(" · ".join(titles[:3]) + " …" * (len(titles) > 3), tuple(runs.values()), tuple(papers))


def explain_refusals(folders: Sequence[Path]) -> str:
    """Return why no run in these folders could be read, and what to do where there is no folder."""
    if not folders:
        return ": give the folder of a run or of a sweep"
    others = f", and {len(folders) - 1:,} more cannot be read either" if len(folders) > 1 else ""
    return f" that can be read: {explain_refusal(folders[0]).rstrip('.')}{others}"


def read_record_file(path: Path) -> RunData:
    """Return the run that a record file describes; raise PomonaError if it describes none."""
    try:
        stored = read_record(path)
    except PomonaError as error:
        raise PomonaError(f"'{path}' is not the record of a run: {error}") from error
    if stored is None:
        raise PomonaError(f"'{path}' is not the record of a run: it has no recipe.")
    return describe_run(stored)


def collect_table(table: PaperTable, store: RunStore) -> ReportData:
    """Return the finished runs of a table and the paper's results, under the labels and columns of the table.

    Raises:
        PomonaError: for a table without any run or printed number.
    """
    runs: list[RunData] = []
    papers: list[PaperPoint] = []
    for cell, series in zip(table.unique_cells, name_cells(table.unique_cells), strict=True):
        results = (run.find_result(store) for run in cell.runs)
        runs += [describe_run(found, network=cell.label, series=series) for found in results if found is not None]
        mean, std = parse_paper_number(cell.paper)
        if mean is not None:
            papers.append(PaperPoint(cell.label, series, float(cell.attributes["sparsity"]), mean, std))
    require(
        bool(runs or papers),
        f"{table.name} has no finished run: train some with `pomona sweep {table.name} --only-missing`.",
    )
    return ReportData(table.title, tuple(runs), tuple(papers))


def name_cells(cells: Sequence[TableCell]) -> list[str]:
    """Return the series of cells: their columns, with the settings in which cells of one label and column differ."""
    rivals: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        rivals.setdefault((cell.label, cell.column), []).append(cell.setting)
    names = []
    for cell in cells:
        keys = differing_settings(rivals[cell.label, cell.column])
        names.append(", ".join([cell.column, *(f"{key}={cell.setting[key]}" for key in keys if key in cell.setting)]))
    return names


def with_title(report: ReportData, title: str | None) -> ReportData:
    """Return the report under another title, if one is given."""
    return report if title is None else replace(report, title=title)
