"""A distilled column of a table: its teachers are the runs of another column with the same seeds, trained first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_table import load_small_table

from pomona.errors import PomonaError
from pomona.lab import Recipe
from pomona.lab.recipes import bundled
from pomona.lab.sweeps.run_store import RunStore
from pomona.lab.tables.definitions import load_table
from pomona.lab.tables.filling import fill_table, trainable_runs

DISTILLED_TABLE = """
title = "digits"
paper = "nobody, table 0"
seeds = [0, 1]

[columns]
DPF = { "method.settle" = 0.1 }
"DPF, distilled" = { "method.settle" = 0.1, teacher = "dense", "teacher.temperature" = 2.0 }
dense = { method = "dense" }

[[part]]
label = "small"
rows = { "teacher.weight" = [0.5, 1.0] }
columns = ["DPF, distilled", "dense"]
[part.recipe]
data = "digits"
model = "mlp(hidden=[8])"
method = "dpf(sparsity=0.5, every=2)"
train = { epochs = 1, batch_size = 450, device = "cpu" }
"""


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    """Return an empty working directory."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


def test_a_student_and_its_teacher_have_one_seed_and_are_planned_together(tmp_path):
    table = load_small_table(tmp_path, DISTILLED_TABLE)
    planned = [run for _, run in trainable_runs(table.runs(), RunStore((), ()), tmp_path)]
    names = [run.recipe.name for run in planned]
    assert names == [
        f"mlp-{label}-seed{seed}{suffix}"
        for seed in (0, 1)
        for label, suffix in (
            ("dense", ""),
            ("dpf-weight0.5-settle0.1-temperature2.0", "-distilled"),
            ("dpf-weight1.0-settle0.1-temperature2.0", "-distilled"),
        )
    ]
    for teacher, *students in (planned[:3], planned[3:]):
        assert not teacher.recipe.teacher.is_named
        for student in students:
            assert student.recipe.seed == teacher.recipe.seed
            assert student.recipe.teacher.fingerprint == teacher.recipe.fingerprint()
            assert student.recipe.required_runs() == [teacher.folder.resolve()]
    assert planned[1].recipe.teacher.weight == 0.5


def test_a_teacher_may_have_another_name_in_another_part(tmp_path):
    """The runs of both parts have one teacher, although its settings are written differently."""
    part = DISTILLED_TABLE[DISTILLED_TABLE.index("[[part]]") :]
    other = part.replace('"small"', '"again"').replace("[0.5, 1.0]", "[0.7]")
    other = other.replace("[part.recipe]", 'set = { "train.clip" = 0 }\n[part.recipe]')
    table = load_small_table(tmp_path, DISTILLED_TABLE + other).select(["seed=0"])
    planned = [run for _, run in trainable_runs(table.runs(), RunStore((), ()), tmp_path)]
    assert len(planned) == 4
    (dense,) = (run for run in planned if run.recipe.method["name"] == "dense")
    assert {path for run in planned for path in run.recipe.required_runs()} == {dense.folder.resolve()}


def test_a_distilled_column_is_filled_and_found_again(work_folder):
    table = load_small_table(work_folder, DISTILLED_TABLE)
    calls: list[tuple] = []
    result = fill_table(table, records=work_folder / "records", jobs=1, on_result=lambda *t: calls.append(t))
    assert (result["missing"], result["failed"], len(calls)) == (0, [], 6)
    cells = {(cell["row"], cell["column"]): cell for cell in result["cells"]}
    assert cells.keys() == {(row, "DPF, distilled") for row in ("teacher.weight = 0.5", "teacher.weight = 1.0")} | {
        ("teacher.weight = 0.5", "dense")
    }
    cell = cells["teacher.weight = 1.0", "DPF, distilled"]
    assert (cell["runs"], cell["setting"]["teacher"], cell["setting"]["teacher.weight"]) == (2, "dense", 1.0)
    assert "teacher.weight" not in cells["teacher.weight = 0.5", "dense"]["setting"]
    records = [json.loads(file.read_text()) for file in sorted((work_folder / "records").glob("*distilled*.json"))]
    assert len(records) == 4
    assert all(Path(record["recipe"]["teacher"]["run"]).name.startswith("mlp-dense") for record in records)
    assert not any(str(work_folder) in json.dumps(record) for record in records)
    # The records are enough for the table, and the folders are those of the runs.
    again = load_small_table(work_folder, DISTILLED_TABLE).compare(RunStore((), (work_folder / "records",)))
    assert again["cells"] == result["cells"]
    store = RunStore((work_folder / "runs",), ())
    assert all(run.find_result(store) is not None for run in table.runs())


def test_a_teacher_that_is_only_a_record_is_trained_again(work_folder):
    table = load_small_table(work_folder, DISTILLED_TABLE).select(["seed=0"])
    dense = table.select(["column=dense"])
    fill_table(dense, work_folder / "elsewhere", records=work_folder / "results" / "runs", jobs=1)
    calls: list[tuple] = []
    fill_table(
        table.select(["teacher.weight=0.5"]),
        only_missing=True,
        jobs=1,
        on_result=lambda *t: calls.append(t[2].recipe.name),
    )
    assert calls == ["mlp-dense-seed0", "mlp-dpf-weight0.5-settle0.1-temperature2.0-seed0-distilled"]


def test_a_student_may_start_from_another_run(work_folder):
    text = DISTILLED_TABLE.replace('teacher = "dense"', 'from = "DPF", teacher = "dense"')
    table = load_small_table(work_folder, text).select(["seed=0", "teacher.weight=0.5"])
    names: list[str] = []
    result = fill_table(table, jobs=1, on_result=lambda *t: names.append(t[2].recipe.name))
    assert (result["missing"], result["failed"]) == (0, [])
    assert sorted(names[:2]) == ["mlp-dense-seed0", "mlp-dpf-settle0.1-seed0"]
    (folder,) = (work_folder / "runs" / "tables").glob("*distilled*")
    recipe = Recipe.load(folder / "recipe.toml")
    assert [Path(run).name.rpartition("-")[0] for run in (recipe.origin.run, recipe.teacher.run)] == [
        "mlp-dpf-settle0.1-seed0",
        "mlp-dense-seed0",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('teacher = "dense"', 'teacher = "dens"', "unknown column 'dens': did you mean 'dense'"),
        ('teacher = "dense"', 'teacher = "DPF, distilled"', "DPF, distilled learns from itself"),
        ('teacher = "dense"', 'teacher = "dense", from = "DPF", retrain = "init"', "retrains with the teacher of DPF"),
    ],
)
def test_a_link_that_cannot_be_is_refused(tmp_path, old, new, message):
    with pytest.raises(PomonaError, match=message):
        load_small_table(tmp_path, DISTILLED_TABLE.replace(old, new))


def test_the_bundled_table_learns_from_the_recorded_dense_runs():
    """The recorded figures are those of other tables, so that its teachers are the runs of dpf-onepass."""
    table = load_table(bundled.find_recipe("dpf-distilled"))
    dense = {
        run.recipe.seed: run.recipe.fingerprint()
        for cell in load_table(bundled.find_recipe("dpf-onepass")).cells
        if cell.column == "dense, cosine"
        for run in cell.runs
    }
    students = [run.recipe for cell in table.cells if cell.column == "DPF, distilled" for run in cell.runs]
    assert sorted((r.seed, r.method["sparsity"]) for r in students) == [(k, s) for k in range(5) for s in (0.9, 0.95)]
    for recipe in students:
        assert recipe.teacher.fingerprint == dense[recipe.seed]
        assert (recipe.method["settle"], recipe.method["feedback"]) == (0.1, 1.0)
        assert (recipe.method["compressor"]["name"], recipe.rate.name) == ("soft", "cosine")
