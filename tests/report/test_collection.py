"""Finding the runs of a report: folders, records and tables."""

from __future__ import annotations

import pytest
from report_runs import write_grid, write_run

from pomona.errors import PomonaError
from pomona.lab.sweeps.run_store import BUNDLED_RECORDS, RunStore
from pomona.lab.tables.catalog import find_table
from pomona.report import collect_runs
from pomona.report.collection import collect_table
from pomona.report.series import group_runs


def test_the_runs_of_a_folder_are_found_at_any_depth(tmp_path):
    write_grid(tmp_path / "deep" / "grid")
    write_run(tmp_path / "one", "snip")
    report = collect_runs([tmp_path])
    assert len(report.runs) == 2 * 5 + 1
    assert report.networks == ["digits_cnn on digits"]


def test_a_run_that_is_given_twice_is_shown_once(tmp_path):
    folder = write_run(tmp_path / "run")
    assert len(collect_runs([folder, tmp_path]).runs) == 1


def test_groups_join_seeds_and_series_join_sparsities(tmp_path):
    groups = group_runs(collect_runs([write_grid(tmp_path / "grid", seeds=3)]).runs)
    assert [(group.series, group.asked_sparsity, len(group.runs)) for group in groups] == [
        ("dense", 0.0, 3),
        ("dpf", 0.8, 3),
        ("dpf", 0.9, 3),
        ("rigl", 0.8, 3),
        ("rigl", 0.9, 3),
    ]
    assert groups[1].result() == (pytest.approx(81), pytest.approx(1))
    assert groups[1].label == "dpf 80 %"


def test_a_setting_in_which_runs_differ_is_part_of_their_name(tmp_path):
    folders = [write_run(tmp_path / "a", "rigl"), write_run(tmp_path / "b", "rigl")]
    text = (folders[1] / "recipe.toml").read_text()
    (folders[1] / "recipe.toml").write_text(text.replace("every = 100", "every = 8"))
    assert [group.series for group in group_runs(collect_runs(folders).runs)] == ["rigl (every=100)", "rigl (every=8)"]


def test_a_record_file_is_a_run():
    file = sorted(BUNDLED_RECORDS.glob("digits_cnn-dpf-80-seed0-*.json"))[0]
    (run,) = collect_runs([file]).runs
    assert (run.method, run.sparsity, run.folder) == ("dpf", 0.8, None)
    assert run.layers


def test_a_table_gives_its_runs_and_the_figures_of_the_paper():
    table = find_table("dpf-table1").select(["label=ResNet-20"])
    store = RunStore(())
    report = collect_table(table, store)
    printed = [cell for cell in table.unique_cells if cell.paper not in (None, "*", "-")]
    assert len(report.papers) == len(printed)
    found = [run.find_result(store) for cell in table.unique_cells for run in cell.runs]
    assert len(report.runs) == sum(run is not None for run in found)
    assert {run.network for run in report.runs} == {"ResNet-20"}
    assert {run.series for run in report.runs} <= {cell.column for cell in table.unique_cells}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("empty", "'empty' holds no run"),
        ("other.json", "'other.json' is not the record of a run"),
        ("dpf-tabel1", "unknown table 'dpf-tabel1'"),
        ("runs/nowhere", "'runs/nowhere' is not there"),
        ("qian-table1", "qian-table1 is computed, not trained"),
    ],
)
def test_a_source_without_runs_is_refused(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(PomonaError, match=message):
        collect_runs([source])


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ('data = "digits"\nmodel = "mlp"\nmethod = "no_such"\n', "unknown method 'no_such'"),
        ("data = [", "recipe.toml' is damaged"),
        ('data = "digits"\nmodel = "mlp"\n[private]\nno_such = 1\n', "no_such"),
    ],
)
def test_a_run_whose_recipe_is_refused_is_named_with_the_reason(recipe, reason, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(recipe)
    with pytest.raises(PomonaError, match=f"run' holds no run that can be read: .*{reason}") as caught:
        collect_runs([tmp_path / "run"])
    assert "\n" not in str(caught.value)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "recipe.toml").write_text(recipe)
    with pytest.raises(PomonaError, match=f"{reason}.*, and 1 more cannot be read either"):
        collect_runs([tmp_path])


def test_a_report_without_sources_is_refused():
    with pytest.raises(PomonaError, match="a report needs runs"):
        collect_runs([])
