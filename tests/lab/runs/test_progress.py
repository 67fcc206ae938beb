"""Progress: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pomona.lab.runs import progress
from pomona.lab.runs.progress import (
    ProgressBar,
    ProgressLines,
    SeriesProgress,
    format_duration,
    format_measurements,
    make_reporter,
)

ROW = {"epoch": 2, "loss": 0.25, "accuracy": 97.125, "sparsity": 0.8, "seconds": 10.0, "images_per_second": 512.0}


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=140, color_system=None)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until it is moved."""
    time = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: time[0])
    return time


def test_bar_on_a_terminal_lines_elsewhere():
    assert isinstance(make_reporter(console(terminal=True)), ProgressBar)
    assert isinstance(make_reporter(console()), ProgressLines)


def test_bar_shows_epoch_loss_accuracy_sparsity_speed_and_time_left(now):
    bar = ProgressBar(console(terminal=True))
    bar.start(10, 20, "run")
    for _ in range(40):
        now[0] += 0.25
        bar.step(0.5)
    bar.epoch(ROW)
    assert bar.format_text() == "epoch 3/10 · loss 0.250 · accuracy 97.12 % · sparsity 80.0 % · 4.0 steps/s"
    assert bar.format_time_left() == "0:40 left"
    bar.close()


def test_steps_before_a_resume_count_as_done_but_not_as_speed(now):
    bar = ProgressBar(console(terminal=True))
    bar.start(10, 20, "run")
    for _ in range(100):  # at once
        bar.step()
    for _ in range(10):
        now[0] += 1
        bar.step(0.5)
    assert bar.format_text() == "epoch 6/10 · loss 0.500 · 1.0 steps/s"
    assert bar.format_time_left() == "1:30 left"
    bar.close()


def test_one_line_is_printed_for_each_epoch():
    out = console()
    lines = ProgressLines(out)
    lines.start(10, 20, "[run]")
    lines.step(0.5)
    lines.epoch(ROW)
    lines.close()
    assert out.file.getvalue() == (
        "[run]: epoch 2/10 · loss 0.250 · accuracy 97.12 % · sparsity 80.0 % · 512 images/s · 0:40 left\n"
    )


def test_series_is_one_line_a_run_without_a_terminal():
    out = console()
    series = SeriesProgress(out, 2)
    for name in ("first", "second"):
        series.start(10, 20, name)
        series.step(0.5)
        series.epoch(ROW)
        series.close()
        series.done(ROW)
    series.end()
    assert [line.split(" · ")[0] for line in out.file.getvalue().splitlines()] == ["first (1 of 2)", "second (2 of 2)"]


def test_series_is_one_bar_over_all_runs_on_a_terminal(now):
    series = SeriesProgress(console(terminal=True), 2)
    for name in ("first", "second"):
        series.start(10, 20, name)
        for _ in range(200):
            now[0] += 0.25
            series.step(0.5)
        series.epoch(ROW)
        series.close()
        series.done(ROW)
    (task,) = series.bar.bar.tasks
    assert (task.total, task.completed, task.description) == (400, 400, "second (2 of 2)")
    series.end()


def test_bar_draws_both_lines_within_eighty_columns(now):
    out = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    bar = ProgressBar(out)
    bar.start(300, 391, "dpf-resnet20")
    bar.epoch(ROW)
    for _ in range(2):
        now[0] += 1
        bar.step(0.5)
    bar.bar.refresh()
    bar.close()
    assert "dpf-resnet20 " in out.file.getvalue()
    assert "epoch 1/300 · loss 0.500 · accuracy 97.12 % · sparsity 80.0 % · 1.0 steps/s" in out.file.getvalue()


def test_downloads_are_shown_on_a_terminal_only():
    with progress.download_progress(console()) as tell:
        assert tell is None
    out = console(terminal=True)
    with progress.download_progress(out) as tell:
        tell("cifar.tar.gz", 500_000, 1_000_000)
    assert "cifar.tar.gz" in out.file.getvalue()
    assert "0.5/1.0 MB" in out.file.getvalue()


def test_missing_measurements_are_left_out():
    assert format_measurements({"loss": 1.0, "sparsity": 0.0, "perplexity": 12.34}) == ["loss 1.000", "perplexity 12.3"]


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "0:07"), (59.6, "1:00"), (750, "12:30"), (11100, "3:05:00")])
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_note_about_an_epoch_is_shown_once(now, terminal):
    out = console(terminal)
    reporter = make_reporter(out)
    reporter.start(10, 20, "run")
    reporter.epoch({**ROW, "note": "accuracy fell [for a reason]."})
    reporter.epoch(ROW)
    reporter.close()
    assert out.file.getvalue().count("accuracy fell [for a reason].") == 1


def test_a_series_shows_no_notes(now):
    out = console(terminal=True)
    series = SeriesProgress(out, 2)
    series.start(10, 20, "run")
    series.epoch({**ROW, "note": "accuracy fell."})
    series.end()
    assert "accuracy fell" not in out.file.getvalue()
