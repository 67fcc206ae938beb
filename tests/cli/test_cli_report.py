"""The commands `report` and `watch`, and the options --plot and --report of the commands that train."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_helpers import SMALL_TABLE

from pomona.cli import run_outputs
from pomona.lab import Recipe, train
from pomona.report import latency, page

pytest.importorskip("plotly")


@pytest.fixture
def run_folder() -> Path:
    """Return the folder of a run of one epoch."""
    train(Recipe.load("small.toml", ["train.epochs=1"]), "runs/one")
    return Path("runs/one")


def test_a_report_of_a_run_is_one_file(run_command, run_folder):
    code, out, err = run_command("report", str(run_folder), "-o", "new/page.html", "--title", "Mine", "--json")
    assert code == 0, err
    text = Path("new/page.html").read_text(encoding="utf-8")
    assert json.loads(out) == {"file": "new/page.html", "runs": 1, "bytes": len(text.encode())}
    assert "new/page.html" in err
    assert "<h1>Mine</h1>" in text
    assert "plotly.js v" in text


def test_latency_is_measured_once(run_command, run_folder, monkeypatch):
    monkeypatch.setattr(latency, "measure_median_seconds", lambda models, batch: [0.002] * len(models))
    unpacked = SimpleNamespace(compression=SimpleNamespace(layers=()))
    monkeypatch.setattr(latency, "compress", lambda *given, **options: unpacked)
    for measured in (True, False):
        code, _, err = run_command("report", str(run_folder), "--latency")
        assert code == 0, err
        assert ("small: 2 ms" in err) == measured
    assert json.loads((run_folder / "latency.json").read_text())["milliseconds"] == 2
    assert "Accuracy against latency" in Path("report.html").read_text(encoding="utf-8")


def test_a_trained_run_is_drawn_and_reported(run_command):
    options = ["--set", "train.epochs=2", "--set", "train.eval_every=1", "--plot", "charts", "--report", "report.html"]
    code, out, err = run_command("train", "small.toml", *options, "--json")
    assert code == 0, err
    assert json.loads(out)["epoch"] == 2
    assert sorted(file.name for file in Path("charts").iterdir()) == [
        f"small-{key}.svg" for key in ("accuracy", "loss", "sparsity")
    ]
    assert Path("report.html").is_file()


def test_a_sweep_is_drawn_and_reported(run_command):
    axes = ["--over", "method=random,oneshot", "--set", "method.sparsity=0.5", "--set", "train.epochs=1"]
    pictures = ["--plot", "charts", "--report", "report.html", "--jobs", "1"]
    code, _, err = run_command("sweep", "small.toml", *axes, *pictures)
    assert code == 0, err
    assert "digits-cnn-on-digits-accuracy.svg" in {file.name.replace("_", "-") for file in Path("charts").iterdir()}
    assert "report of 2 runs: report.html" in err


def test_a_swept_table_is_drawn_and_reported(run_command):
    Path("mine.toml").write_text(f'charts = ["accuracy"]\n{SMALL_TABLE}')
    pictures = ["--plot", "charts", "--report", "report.html", "--jobs", "1"]
    code, _, err = run_command("sweep", "mine.toml", *pictures)
    assert code == 0, err
    assert [file.suffix for file in Path("charts").iterdir()] == [".svg"]
    text = Path("report.html").read_text(encoding="utf-8")
    assert "dense, paper" in text
    code, _, err = run_command("table", "mine.toml", "--report", "again.html")
    assert code == 0, err
    assert Path("again.html").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["report", "nowhere"], "unknown table 'nowhere'"),
        (["report", "."], "'.' holds no run"),
        (["report", "small.json"], "'small.json' is not the record of a run"),
        (["watch", "nowhere"], "'nowhere' is not a folder"),
        (["train", "small.toml", "--report", "."], "'.' is a folder"),
        (["sweep", "small.toml", "--tune", "lr", "--report", "a.html"], "--report does not apply to tuning"),
        (["table", "--report", "a.html"], "--report applies to one table"),
        (["table", "gip", "--report", "a.html"], "gip is computed, not trained"),
    ],
)
def test_what_cannot_be_reported_is_refused(assert_refused, arguments, expected):
    assert_refused(arguments, expected)


def test_without_plotly_a_report_is_refused_before_training(assert_refused, monkeypatch):
    monkeypatch.setattr(run_outputs, "has_plotly", lambda: False)
    assert_refused(["train", "small.toml", "--report", "a.html"], "pip install 'pomona[report]'")


def test_a_table_without_charts_is_not_drawn(assert_refused):
    Path("mine.toml").write_text(SMALL_TABLE)
    assert_refused(["sweep", "mine.toml", "--plot", "charts"], "mine defines no charts: leave out --plot")


def test_the_page_needs_no_plotly_until_it_is_made():
    assert "plotly" not in vars(page)
