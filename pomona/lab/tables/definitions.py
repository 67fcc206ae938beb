"""Definitions of tables: TOML files that say which runs the cells of a table need, and what the paper prints.

    title = "CIFAR-10, unstructured pruning: top-1 accuracy in %"
    paper = "Lin et al., ICLR 2020, table 1"
    seeds = [0, 1, 2]
    queue = ["ResNet-20", "DPF"]                  trained first; then in the order of the file

    [columns]                                     a name, and the settings of the column
    dense = { method = "dense" }
    DPF = { "method.printed" = true }
    "DPF + FT" = { "method.printed" = true, "finetune.epochs" = 60 }
    "one-shot + FT" = { from = "dense", method = "oneshot" }            starts from the weights of that column's run
    "its mask" = { from = "DPF", retrain = "init", budget = "flops" }   retrains its mask, as `pomona retrain` does
    "DPF, distilled" = { teacher = "dense", "teacher.weight" = 0.9 }    learns the outputs of that column's run too

    [[part]]
    label = "ResNet-20"
    recipe = "dpf-resnet20"                       the name of a bundled recipe, or settings
    set = { "train.clip" = 1.0 }                  settings that differ from the recipe
    rows = { "method.sparsity" = [0.7, 0.8] }     the rows are the product of these values
    paper = { dense = "92.48 ± 0.20", DPF = ["92.42 ± 0.14", "-"] }     one number for all rows, or one per row

In the paper's numbers, "*" is a run that did not converge, and "-" is a cell that the paper leaves out and that we
leave out too; a column without numbers is not in the paper. `from`, `teacher` and the `columns` of a part name columns.

    like = "dpf-table4"          take columns and parts from another table; `columns = ["DPF"]` and the labels and
                                 rows of the parts select from them
    measure = "valid_accuracy"   compare runs on held-out training images, for choices that must not use test images
    show = ["cost"]              further measures to print, one line per cell (see `rendering.MEASURE_COLUMNS`)
    charts = ["layers"]          charts that `pomona table NAME --plot FOLDER` draws (see `drawings.CHART_KINDS`)
    across = true                print columns as rows
    names = { ... }              short names of settings
    notes = "..."                remarks for the reader
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pomona.errors import PomonaError, require
from pomona.untrusted import MAX_TOML_BYTES, parse_toml, read_bytes, reading

from ..recipes import bundled
from ..recipes.overrides import parse_value, read_recipe
from ..recipes.recipe import OBSERVING_SETTINGS, OFF_VALUES, SETTINGS_WITHOUT_EFFECT
from .column_runs import RowRuns, applies_to, look_up, require_known
from .drawings import CHART_KINDS
from .paper_table import PaperTable, TableCell, parse_paper_number
from .rendering import MEASURE_COLUMNS

TABLE_KEYS = (
    "title",
    "paper",
    "notes",
    "seeds",
    "queue",
    "columns",
    "part",
    "measure",
    "show",
    "charts",
    "across",
    "names",
    "like",
)
PART_KEYS = ("label", "recipe", "set", "rows", "paper", "seeds", "columns")
MAX_ROWS = 10_000  # of a part
MEASURES = ("accuracy", "valid_accuracy")
# Keys that are not repeated in the setting of a cell: it has entries for the first ones, and the others have no effect.
KEYS_NOT_IN_SETTING = {"model", "model.name", "method", "method.sparsity"}
KEYS_NOT_IN_SETTING |= SETTINGS_WITHOUT_EFFECT | OBSERVING_SETTINGS.keys()


def load_table(source: str | Path, overrides: Sequence[str] = ()) -> PaperTable:
    """Return the table defined in a file; `overrides` are "dotted.key=value" for the recipes of all parts."""
    path = Path(source)
    with reading(f"the table '{path}'"):
        return make_table(path, read_definition(path), overrides)


def make_table(path: Path, definition: Mapping[str, Any], overrides: Sequence[str]) -> PaperTable:
    """Return the table of a definition."""
    try:
        cells = [cell for part in definition["part"] for cell in part_cells(definition, part, overrides)]
    except PomonaError as error:
        raise PomonaError(f"the table {path.stem}: {error}") from error
    return PaperTable(
        path.stem,
        definition.get("title", path.stem),
        definition.get("paper", ""),
        tuple(cells),
        columns=tuple(definition["columns"]),
        notes=definition.get("notes", ""),
        queue=tuple(definition.get("queue", ())),
        measure=definition.get("measure", "accuracy"),
        show=tuple(definition.get("show", ())),
        across=bool(definition.get("across", False)),
        charts=tuple(definition.get("charts", ())),
    )


def read_definition(path: Path, seen: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the validated content of a table's file, with what it takes from another table by `like`.

    `seen` are the tables that are like this one.
    """
    require(path.resolve() not in seen, f"the table '{path}' is like itself.")
    try:
        definition = parse_toml(read_bytes(path, MAX_TOML_BYTES).decode())
    except (OSError, ValueError) as error:
        raise PomonaError(f"the table '{path}' cannot be read: {error}.") from error
    require_known("key of a table", definition, TABLE_KEYS)
    require_known("measure", [definition.get("measure", "accuracy")], MEASURES)
    require_known("measure to show", definition.get("show", ()), MEASURE_COLUMNS)
    require_known("chart", definition.get("charts", ()), CHART_KINDS)
    definition = {"columns": {}, "part": [], **definition}
    if "like" in definition:
        base = read_definition(bundled.find_recipe(definition["like"]), [*seen, path.resolve()])
        definition = inherit_definition(base, definition)
    require(bool(definition["part"] and definition["columns"]), f"the table '{path}' needs [columns] and a [[part]].")
    for part in definition["part"]:
        require_known("key of a part", part, PART_KEYS)
        require("label" in part and "recipe" in part, f"a part of the table '{path}' needs a label and a recipe.")
    return definition


def inherit_definition(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a definition that selects columns and parts from the base table by its own names, labels and rows."""
    names = own["columns"] or base["columns"]
    columns = (
        names if isinstance(names, Mapping) else {name: look_up("column", name, base["columns"]) for name in names}
    )
    require_known("part", [part.get("label") for part in own["part"]], [part["label"] for part in base["part"]])
    pairs = [(one, part) for part in own["part"] for one in base["part"] if one["label"] == part["label"]]
    parts = [inherit_part(one, part, columns) for one, part in pairs]
    shared = {key: base[key] for key in ("seeds", "queue", "names") if key in base}
    return {**shared, **own, "columns": columns, "part": parts}


def inherit_part(base: Mapping[str, Any], own: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of the base table with the selected rows, and the paper's numbers of the selected columns."""
    rows = base.get("rows", {})
    for key, values in own.get("rows", {}).items():
        require_known(f"value of {key}", values, look_up("axis", key, rows))
    selected = {**rows, **own.get("rows", {})}
    indices = [i for i, row in enumerate(expand_rows(rows)) if all(row[key] in selected[key] for key in row)]
    paper = {
        name: texts if isinstance(texts, str) else [texts[i] for i in indices]
        for name, texts in base.get("paper", {}).items()
        if name in columns
    }
    shown = [name for name in base.get("columns", columns) if name in columns]
    return {**base, "columns": shown, **own, "rows": selected, "paper": paper | own.get("paper", {})}


def part_cells(definition: Mapping[str, Any], part: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[TableCell]:
    """Yield the cells of one part, row by row."""
    columns, paper, rows = definition["columns"], part.get("paper", {}), expand_rows(part.get("rows", {}))
    names, common, forced = definition.get("names", {}), part.get("set", {}), dict(map(parse_override, overrides))
    seeds = part.get("seeds", definition.get("seeds", [0]))
    validate_part(part, columns, len(rows), seeds, forced)
    recipe = part["recipe"]
    base = read_recipe(recipe if isinstance(recipe, Mapping) else bundled.find_recipe(str(recipe)))
    for i, row in enumerate(rows):
        row_runs = RowRuns(base, columns, {**common, **row}, forced, seeds)
        for name in part.get("columns", columns):
            text = paper.get(name)
            text = text if text is None or isinstance(text, str) else text[i]
            parse_paper_number(text)  # raises PomonaError for an invalid text
            if text == "-":
                continue
            runs, values = row_runs.of_column(name), {**common, **row, **columns[name], **forced}
            own = {key: value for key, value in values.items() if applies_to(key, runs[0].recipe)}
            shown = {key: value for key, value in own.items() if value != OFF_VALUES.get(key)}
            setting = {names.get(key, key): value for key, value in shown.items() if key not in KEYS_NOT_IN_SETTING}
            own_row = {key: value for key, value in row.items() if key in own}
            yield TableCell(
                part["label"], format_row(row, names), format_row(own_row, names), name, setting, runs, text
            )


def validate_part(
    part: Mapping[str, Any], columns: Mapping[str, Any], row_count: int, seeds: Any, forced: Mapping[str, Any]
) -> None:
    """Raise PomonaError where seeds, columns, the paper's numbers or overridden settings of a part are invalid."""
    paper = part.get("paper", {})
    require(bool(seeds) and all(type(s) is int and s >= 0 for s in seeds), f"seeds takes whole numbers, got {seeds}.")
    require_known("column", [*paper, *part.get("columns", ())], columns)
    for key in forced.keys() & {"seed", *part.get("rows", {})}:
        raise PomonaError(f"{key} differs between the runs of a table: select runs with --only instead of setting it.")
    for name, texts in paper.items():
        require(
            isinstance(texts, str) or len(texts) == row_count,
            f"{part['label']} has {len(texts)} numbers of {name} for its {row_count} rows.",
        )


def parse_override(text: str) -> tuple[str, Any]:
    """Return the key and value of a text "dotted.key=value"."""
    read_recipe({}, [text])  # raises PomonaError for any other form
    key, _, value = text.partition("=")
    return key.strip(), parse_value(value.strip())


def format_row(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return the name of a row as papers print it: "90 %", "ρ = 0.5"."""
    return ", ".join(
        f"{100 * value:g} %" if key == "method.sparsity" else f"{names.get(key, key)} = {value}"
        for key, value in row.items()
    )


def expand_rows(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the rows of a part: every combination of the values of its axes."""
    count = math.prod(len(values) for values in axes.values())
    require(count <= MAX_ROWS, f"the axes have more than {MAX_ROWS:,} combinations: leave out some values.")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
