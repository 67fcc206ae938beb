"""Sweeps: which cells there are, that what is done is not done again, and that one failure is only one."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console
from run_helpers import InterruptAtStep, run_in_two_processes

from pomona.errors import PomonaError
from pomona.lab import Recipe, train
from pomona.lab.sweeps import job
from pomona.lab.sweeps.axes import expand_runs, parse_axis, replace_method
from pomona.lab.sweeps.job import Job
from pomona.lab.sweeps.process_pool import train_in_processes
from pomona.lab.sweeps.result_table import column_label, format_cell, render_table, row_label
from pomona.lab.sweeps.run_store import RECORDS
from pomona.lab.sweeps.sweep import SweepInterrupted, sweep
from pomona.methods import METHODS

BASE = {
    "name": "small",
    "data": "digits",
    "model": "mlp(hidden=[8])",
    "train": {"epochs": 1, "batch_size": 450, "device": "cpu"},
}


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "sweep.json"}


# ---- the cells


def test_cells_are_the_product_of_the_axes(tmp_path):
    axes = {"seed": [0, 1], "method.sparsity": [0.8, 0.9], "method": ["oneshot", "dpf(every=4)"], "train.clip": [1.0]}
    found = expand_runs(BASE, axes, tmp_path)
    assert len(found) == 8
    made = {(c.recipe.seed, c.recipe.method["name"], c.recipe.method["sparsity"]) for c in found}
    assert made == {(s, m, p) for s in (0, 1) for m in ("oneshot", "dpf") for p in (0.8, 0.9)}
    last = found[-1]
    assert last.recipe.name == "dpf-90-every4-seed1-clip1.0"
    assert last.folder == tmp_path / f"{last.recipe.name}-{last.recipe.fingerprint()}"
    assert last.recipe.method["every"] == 4
    assert last.setting == {"options": {"every": 4}, "train.clip": 1.0}
    assert len({c.folder for c in found}) == 8
    assert not list(tmp_path.iterdir())


def test_no_axis_is_one_cell(tmp_path):
    (only,) = expand_runs(BASE, {}, tmp_path)
    assert only.recipe == Recipe.load(BASE)


def test_another_method_takes_over_the_options_it_has(tmp_path):
    base = BASE | {"method": {"name": "dpf", "every": 4, "settle": 0.2, "pattern": "filter"}}
    by_name = {
        c.recipe.method["name"]: c for c in expand_runs(base, {"method": ["dpf", "incremental", "dense"]}, tmp_path)
    }
    assert by_name["dpf"].recipe == Recipe.load(base | {"name": "dpf"})
    assert by_name["dpf"].dropped == ()
    assert by_name["incremental"].recipe.method["every"] == 4
    assert by_name["incremental"].recipe.method["pattern"]["name"] == "filter"
    assert by_name["incremental"].dropped == ("method.settle",)
    assert by_name["dense"].recipe.method == {"name": "dense"}
    # What was not written is not taken over: RigL has its own allocation.
    assert replace_method("dpf(sparsity=0.5)", "rigl") == ({"name": "rigl", "sparsity": 0.5}, [])


def test_dense_is_one_cell_at_all_sparsities(tmp_path):
    axes = {"method": ["dense", "oneshot"], "method.sparsity": [0.8, 0.9], "seed": [0, 1]}
    found = expand_runs(BASE, axes, tmp_path)
    assert [c.recipe.name for c in found] == [
        "dense-seed0",
        "dense-seed1",
        *(f"oneshot-{s}-seed{k}" for k in (0, 1) for s in (80, 90)),
    ]
    assert found[0].dropped == ("method.sparsity",)


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("seed=0,1,2", "seed", [0, 1, 2]),
        ("method = dense, oneshot(sparsity=0.5, at=1),dpf", "method", ["dense", "oneshot(sparsity=0.5, at=1)", "dpf"]),
        ("model.hidden=[8, 8],[16]", "model.hidden", [[8, 8], [16]]),
        ("train.precision=bf16", "train.precision", ["bf16"]),
        (
            "method=dpf(every=4, schedule=cubic(until=0.5)),rigl",
            "method",
            ["dpf(every=4, schedule=cubic(until=0.5))", "rigl"],
        ),
        ("column='a, b',c's, d's", "column", ["a, b", "c's", "d's"]),
    ],
)
def test_axes_are_read_from_text(text, key, values):
    assert parse_axis(text) == (key, values)


@pytest.mark.parametrize("text", ["seed", "=1", "seed=", "seed=1,,2"])
def test_text_that_is_no_axis(text):
    with pytest.raises(PomonaError, match="is not of the form key=value,value"):
        parse_axis(text)


def test_axes_come_from_the_recipe_and_are_overruled(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('data = "digits"\nmodel = "mlp"\n[sweep]\nseed = [0, 1, 2]\n"train.epochs" = [1, 2]\n')
    assert len(expand_runs(path, {}, tmp_path)) == 6
    assert [c.recipe.seed for c in expand_runs(path, {"seed": [7]}, tmp_path)] == [7, 7]
    assert Recipe.load(path).train.epochs == 10  # for all else the table is not there


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"method": ["dpf", "rigel"]}, "unknown method 'rigel': did you mean 'rigl'"),
        ({"train.epoch": [1]}, "did you mean 'epochs'"),
        ({"sed": [1]}, "unknown key of the recipe 'sed': did you mean 'seed'"),
        ({"seed": 3}, "the axis 'seed' takes a list of values, got 3"),
        ({"seed": []}, "the axis 'seed' takes a list of values"),
        ({"method": "dpf"}, "the axis 'method' takes a list"),
        ({"method": [3]}, "an axis of methods takes names"),
        ({"method": ["dpf"], "method.sparsity": [1.5]}, r"must lie in \[0, 1\), got 1.5"),
        ({"method": ["oneshot", "dense"], "method.evry": [4]}, "none of the methods of this sweep has .* 'evry'"),
        ({"method.every": [4]}, "a method needs a name"),
    ],
)
def test_bad_axes_are_refused_before_anything_is_run(tmp_path, axes, says):
    with pytest.raises(PomonaError, match=says):
        sweep(BASE, axes, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_shipped_sweep_has_every_method():
    path = Path(__file__).parents[2] / "recipes" / "digits-sweep.toml"
    found = expand_runs(path, {}, "out")
    made = {(c.recipe.method["name"], c.recipe.method.get("sparsity")) for c in found}
    others = [name for name in METHODS if name not in ("finetune", "edge_popup", "iterand")]
    assert made == {("dense", None), *((name, s) for name in others for s in (0.8, 0.9, 0.95))}
    lottery = next(c.recipe for c in found if c.recipe.method["name"] == "lottery")
    assert lottery.method["retrainings"] == 3


# ---- running them

AXES = {"method": ["dense", "oneshot(sparsity=0.5)"], "seed": [0, 1]}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A sweep of four cells, in this process."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("sweep") / "out"
    told: list[tuple] = []
    result = sweep(BASE, AXES, out, jobs=1, on_result=lambda *t: told.append(t))
    return out, result, told


def test_a_sweep_gives_the_mean_over_seeds(done):
    out, result, told = done
    dense, oneshot = result["cells"]
    assert (dense["method"], dense["sparsity"], oneshot["method"], oneshot["sparsity"]) == (
        "dense",
        0.0,
        "oneshot",
        0.5,
    )
    reached = [json.loads((c.folder / "summary.json").read_text())["accuracy"] for c in expand_runs(BASE, AXES, out)]
    assert (dense["mean"], dense["std"]) == (statistics.mean(reached[:2]), statistics.stdev(reached[:2]))
    assert oneshot["mean"] == statistics.mean(reached[2:])
    assert oneshot["runs"] == 2
    assert oneshot["setting"] == {"data": "digits", "epochs": 1, "seeds": [0, 1], "options": {"sparsity": 0.5}}
    assert {"model", "method", "sparsity", "setting", "mean", "std", "runs", "paper"} <= oneshot.keys()
    assert result["failed"] == []
    assert json.loads((out / "sweep.json").read_text()) == result
    assert [(t[0], t[1]) for t in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_what_is_complete_is_not_run_again(done):
    out, result, _ = done
    with pytest.raises(PomonaError, match="4 of the 4 runs exist in '.*' already: continue with --only-missing"):
        sweep(BASE, AXES, out)
    before = files(out)
    told: list[tuple] = []
    again = sweep(BASE, AXES, out, only_missing=True, on_result=lambda *t: told.append(t))
    assert again["cells"] == result["cells"]
    assert told == []
    assert files(out) == before


def test_what_is_missing_is_added(done):
    out = done[0]
    before = files(out)
    more = sweep(BASE, AXES | {"seed": [0, 1, 2]}, out, only_missing=True, jobs=1)
    assert [c["runs"] for c in more["cells"]] == [3, 3]
    after = files(out)
    assert all(after[path] == stamp for path, stamp in before.items() if path != out)


def test_a_record_is_as_good_as_its_run(done, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep(BASE, {"seed": [0, 1]}, "first", records=RECORDS, jobs=1)
    assert len(list(RECORDS.glob("seed?-*.json"))) == 2
    told: list[tuple] = []
    result = sweep(BASE, {"seed": [0, 1, 2]}, "second", only_missing=True, jobs=1, on_result=lambda *t: told.append(t))
    assert [t[2].recipe.seed for t in told] == [2]
    assert (result["cells"][0]["runs"], result["cells"][0]["setting"]["seeds"]) == (3, [0, 1, 2])


def test_records_are_kept_of_what_was_there_before(done, tmp_path):
    sweep(BASE, AXES, done[0], only_missing=True, records=tmp_path)
    assert {f.name.rpartition("-")[0] for f in tmp_path.iterdir()} >= {"dense-seed0", "oneshot-50-seed1"}


def test_a_summary_of_other_settings_is_no_result(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "out")
    (first, *_) = expand_runs(BASE, AXES, tmp_path / "out")
    told = first.load_summary()
    (first.folder / "summary.json").write_text(json.dumps(told | {"fingerprint": "another"}))
    assert (first.load_summary(), first.state()) == (None, "begun")


@pytest.mark.parametrize("text", ["", "{}"])
def test_a_damaged_summary_is_made_anew(done, tmp_path, text):
    shutil.copytree(done[0], tmp_path / "out")
    (gone,) = (tmp_path / "out").glob("oneshot-50-seed1-*/summary.json")
    gone.write_text(text)
    told: list[tuple] = []
    again = sweep(BASE, AXES, tmp_path / "out", only_missing=True, jobs=1, on_result=lambda *t: told.append(t))
    assert [t[2].folder for t in told] == [gone.parent]
    assert [c["mean"] for c in again["cells"]] == [c["mean"] for c in done[1]["cells"]]


def test_a_cell_that_fails_is_recorded_and_the_others_go_on(tmp_path):
    # Without a hidden layer there is nothing that dpf could prune.
    result = sweep(BASE | {"model": "mlp(hidden=[])"}, {"method": ["dpf", "dense"]}, tmp_path, jobs=1)
    assert [c["method"] for c in result["cells"]] == ["dense"]
    (failed,) = result["failed"]
    assert failed["name"] == "dpf"
    assert "nothing to prune" in failed["error"]


def test_an_unforeseen_error_is_recorded_by_its_kind(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a kernel\nis missing")

    monkeypatch.setattr(job, "train", broken)
    result = sweep(BASE, {"seed": [0]}, tmp_path, jobs=1)
    assert result["failed"][0]["error"] == "RuntimeError: a kernel is missing"


def test_ctrl_c_stops_a_sweep_and_only_missing_goes_on(tmp_path, done):
    base = BASE | {"train": {**BASE["train"], "checkpoint_every": 0}}
    presser = InterruptAtStep(5)  # the second step of the second cell
    with pytest.raises(
        SweepInterrupted, match="stopped with 1 of 4 runs complete in .*repeat the command with --only-missing"
    ):
        sweep(base, AXES, tmp_path, jobs=1, progress=lambda: presser)
    states = [c.state() for c in expand_runs(base, AXES, tmp_path)]
    assert states == ["complete", "begun", "missing", "missing"]
    told: list[tuple] = []
    result = sweep(base, AXES, tmp_path, only_missing=True, jobs=1, on_result=lambda *t: told.append(t))
    assert [(t[0], t[3]["step"]) for t in told] == [(2, 3), (3, 3), (4, 3)]
    assert [c["mean"] for c in result["cells"]] == [c["mean"] for c in done[1]["cells"]]


def test_places_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PomonaError, match="'.*file' is a file"):
        sweep(BASE, {}, tmp_path / "file")
    with pytest.raises(PomonaError, match="jobs must be 1 or more, got 0"):
        sweep(BASE, {}, tmp_path, jobs=0)


# ---- several processes


@dataclass(frozen=True)
class Deadly(Job):
    """A job whose process is killed, as often as there are files to be removed."""

    def run(self, *args, **options):
        for mark in sorted(self.folder.parent.glob(f"{self.folder.name}.*")):
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(*args, **options)


def test_a_killed_process_takes_nothing_with_it(tmp_path):
    made = [Recipe.load(BASE, [f"seed={k}"]) for k in range(3)]
    jobs = [Deadly(recipe, tmp_path / f"run{k}") for k, recipe in enumerate(made)]
    (tmp_path / "run0.1").touch()
    (tmp_path / "run1.1").touch()
    (tmp_path / "run1.2").touch()
    found = dict(train_in_processes(jobs, 2, note=lambda text: None))
    assert found.keys() == {0, 1, 2}
    assert "its process ended twice (killed, -9)" in found[1]["error"]
    for k in (0, 2):
        alone = train(made[k], tmp_path / "alone" / str(k))
        assert found[k]["accuracy"] == alone["accuracy"]
        a, b = (folder / "model.safetensors" for folder in (tmp_path / f"run{k}", tmp_path / "alone" / str(k)))
        assert a.read_bytes() == b.read_bytes()


def test_ctrl_c_lets_every_process_write_a_checkpoint(tmp_path):
    base = BASE | {"train": {**BASE["train"], "epochs": 100_000, "eval_every": 100_000, "checkpoint_every": 0}}
    axes = {"seed": [0, 1, 2]}
    found = expand_runs(base, axes, tmp_path)

    def press() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not all((c.folder / "metrics.jsonl").exists() for c in found[:2]):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(SweepInterrupted, match="stopped with 0 of 3 runs"):
        sweep(base, axes, tmp_path, jobs=2)
    assert [c.state() for c in found] == ["begun", "begun", "missing"]
    assert all((c.folder / "checkpoint" / "state.json").is_file() for c in found[:2])


def test_a_team_trains_one_cell_after_another(tmp_path):
    recipe = Recipe.load(BASE, ["train.drop_last=true", "train.batch_size=400"])
    run_in_two_processes(f"sweep({recipe.to_dict()!r}, {{'seed': [0, 1, 2]}}, {str(tmp_path / 'out')!r})")
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert (found["cells"][0]["runs"], found["failed"]) == (3, [])
    assert {json.loads(f.read_text())["world"] for f in (tmp_path / "out").glob("*/summary.json")} == {2}


@pytest.mark.parametrize("how", [{"jobs": 2}, {"concurrent": 2}])
def test_a_team_is_not_spread_further(tmp_path, monkeypatch, how):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PomonaError, match="the 4 processes of torchrun train each run together: leave out jobs"):
        sweep(BASE, {}, tmp_path, **how)


# ---- the table


def text(grid) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(grid)
    return console.file.getvalue()


def cell(method, sparsity, mean, std=None, **setting):
    setting = {"data": "digits", "epochs": 3, "seeds": [0], **setting}
    return {"model": "mlp", "method": method, "sparsity": sparsity, "setting": setting, "mean": mean, "std": std}


def test_the_table_has_sparsities_in_rows_and_methods_in_columns():
    shown = text(
        render_table(
            [cell("dense", 0.0, 98.0), cell("oneshot", 0.8, 91.0, 0.5), cell("dpf", 0.8, 94.5), cell("dpf", 0.9, 90.0)]
        )
    )
    head, first, second = (next(line for line in shown.splitlines() if key in line) for key in ("dpf", "80 %", "90 %"))
    assert "mlp on digits, accuracy in % · dense after 3 epochs: 98.00" in shown
    assert head.index("oneshot") < head.index("dpf")
    assert "91.00 ± 0.50" in first
    assert "★ 94.50" in first
    assert "–" in second
    assert "★ 90.00" in second


def test_many_methods_are_rows():
    methods = ["dpf", "dsr", "oneshot", "random", "rigl", "set", "snip"]
    shown = text(render_table([cell(m, s, 90.0 + k) for k, m in enumerate(methods) for s in (0.8, 0.9)]))
    head, last = (next(line for line in shown.splitlines() if key in line) for key in ("method", "snip"))
    assert head.index("80 %") < head.index("90 %")
    assert last.count("★ 96.00") == 2
    assert shown.count("★ 9") == 2


def test_one_method_in_two_ways_is_two_columns_and_other_settings_are_rows():
    ways = [cell("oneshot", 0.8, 91.0, options={"at": at}) for at in (0.5, 1)]
    assert [column_label(c, ways) for c in ways] == ["oneshot(at=0.5)", "oneshot(at=1)"]
    assert column_label(ways[0], ways[:1]) == "oneshot"
    assert row_label(cell("dpf", 0.875, 1.0, **{"finetune.epochs": 60})) == "87.5 % finetune.epochs=60"


def test_of_perplexities_the_lowest_is_best():
    low, high = (cell("dpf", 0.8, mean, measure="perplexity") for mean in (20.0, 30.0))
    assert "★" in format_cell(low, [low, high])
    assert "★" not in format_cell(high, [low, high])
