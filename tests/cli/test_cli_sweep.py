"""The command `sweep`: grids, tables, tuning, and what is refused."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import fake_slurm
import pytest
from cli_helpers import SMALL_TABLE, read_files

with contextlib.suppress(ImportError):  # here, as its import closes the log handlers of others with their streams
    import submitit  # noqa: F401


def test_sweep_trains_every_run_and_only_missing_skips_complete_ones(run_command):
    axes = ["--over", "method=random,oneshot", "--over", "method.sparsity=0.5,0.8", "--set", "train.epochs=1"]
    code, out, err = run_command("sweep", "small.toml", *axes, "--jobs", "1", "--out", "grid", "--json")
    assert code == 0, err
    cells = json.loads(out)["cells"]
    assert {(cell["method"], cell["sparsity"]) for cell in cells} == {
        (method, sparsity) for method in ("random", "oneshot") for sparsity in (0.5, 0.8)
    }
    before = read_files(Path("grid"))
    code, out, err = run_command(
        "sweep", "small.toml", *axes, "--jobs", "1", "--out", "grid", "--only-missing", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["cells"] == cells
    assert {k: v for k, v in read_files(Path("grid")).items() if "sweep" not in k} == {
        k: v for k, v in before.items() if "sweep" not in k
    }


def test_only_the_first_process_of_torchrun_prints(run_command, monkeypatch):
    Path("mine.toml").write_text(SMALL_TABLE)
    printed = run_command("sweep", "mine.toml", "--dry-run")
    monkeypatch.setenv("RANK", "1")
    assert run_command("sweep", "mine.toml", "--dry-run") == (0, "", "")
    assert "digits_cnn-dense" in printed[1]


def test_tuning_prints_the_option_that_selects_the_best_value(run_command):
    run = ["sweep", "small.toml", "--set", "train.epochs=1", "--jobs", "1", "--tune"]
    code, out, err = run_command(*run, "lr=0.05,0.1", "--json")
    assert code == 0, err
    best = json.loads(out)["best"]
    code, out, err = run_command(*run, "lr=0.05,0.1")
    assert f"to use it: --set optimizer.lr={best:g}" in out
    assert " of " not in err  # all of it was there
    code, out, err = run_command(*run, "lr", "--dry-run")
    assert out == "optimizer.lr: 0.025, 0.05, 0.075, 0.1\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "train.device=cpu", "--packed", "4"], "concurrent runs need a GPU"),
        (["--tune", "lr", "--keep"], "--record does not apply to tuning"),
    ],
)
def test_former_names_of_options_still_work_and_are_hidden(assert_refused, run_command, arguments, expected):
    assert_refused(["sweep", "small.toml", *arguments], expected)
    for command in ("sweep", "table", "export"):
        _, out, _ = run_command(command, "--help")
        assert "--packed" not in out
        assert "--keep" not in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sweep", "small.toml", "--over", "method=dfp"], "did you mean 'dpf'?"),
        (["sweep", "small.toml", "--over", "method.sparsity"], "method.sparsity"),
        (["sweep", "small.toml", "--set", "train.device=cpu", "--concurrent", "4"], "concurrent runs need a GPU"),
        (["sweep", "small.toml", "--concurrent", "4", "--jobs", "2"], "give concurrent or jobs"),
        (["sweep", "small.toml", "--only", "seed=0"], "--only does not apply to a recipe"),
        (["sweep", "dpf-table1", "--over", "seed=0"], "--over does not apply to a table"),
        (["sweep", "dpf-table1", "--tune", "lr"], "--tune does not apply to a table"),
        (["sweep", "small.toml", "--tune", "lr", "--record"], "--record does not apply to tuning"),
        (["sweep", "small.toml", "--tune", "lr", "--over", "train.clip=1.0"], "leave out --over train.clip"),
        (["sweep", "small.toml", "--tune", "lrr"], "did you mean 'lr'?"),
        (["sweep", "small.toml", "--address", "auto"], "--address is for --engine ray, not for local: leave it out."),
        (["sweep", "small.toml", "--engine", "ray", "--no-wait"], "--no-wait is for --engine slurm, not for ray"),
        (["sweep", "small.toml", "--engine", "slurm", "--slurm", "gpu"], "'gpu' is not of the form KEY=VALUE"),
        (
            ["sweep", "small.toml", "--engine", "slurm", "--concurrent", "2"],
            "leave out --concurrent, or use --engine ray",
        ),
    ],
)
def test_invalid_arguments_of_sweep_are_refused(assert_refused, arguments, expected):
    assert_refused(arguments, expected)


def test_a_sweep_without_the_package_of_its_engine_is_refused(assert_refused, monkeypatch):
    for engine, package in (("ray", "ray"), ("slurm", "submitit")):
        monkeypatch.setitem(sys.modules, package, None)  # its import fails
        assert_refused(["sweep", "small.toml", "--engine", engine], f"pip install 'pomona[{engine}]'")


def test_runs_are_submitted_to_slurm_and_not_waited_for(run_command, work_folder, monkeypatch):
    pytest.importorskip("submitit")
    jobs = fake_slurm.install(work_folder / "slurm", monkeypatch)
    options = ["--engine", "slurm", "--no-wait", "--slurm", "partition=gpu", "--slurm", "cpus-per-task=4"]
    grid = ["sweep", "small.toml", "--over", "seed=0,1", "--out", "grid", *options]
    code, out, err = run_command(*grid)
    assert (code, out) == (0, "")
    assert err == (
        "2 runs are submitted (1): the same command with --only-missing shows what is complete, and with --wait waits "
        "for the rest.\n"
    )
    text = (jobs / "1.sh").read_text()
    assert "#SBATCH --partition=gpu\n" in text
    assert "#SBATCH --cpus-per-task=4\n" in text
    code, out, err = run_command(*grid, "--json")
    assert (code, json.loads(out)) == (0, {"submitted": 2, "jobs": ["1"]})
    assert "2 runs are queued already" in err
    (jobs / "closed").touch()
