"""The queue of jobs: order, what waits for what, and threads that take from it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_recipe import SMALL_RECIPE

from pomona.lab import Recipe
from pomona.lab.runs.folder import read_summary
from pomona.lab.sweeps.axes import SweepRun
from pomona.lab.sweeps.job_queue import JobQueue
from pomona.lab.sweeps.sweep import train_runs


def make_queue(*needed: list[int]) -> JobQueue:
    """Return a queue of jobs that need the jobs of these indices."""
    folders = [Path(f"run{k}") for k in range(len(needed))]
    return JobQueue(
        [
            SimpleNamespace(
                folder=folder, recipe=SimpleNamespace(required_runs=lambda own=own: [folders[k] for k in own])
            )
            for folder, own in zip(folders, needed, strict=True)
        ]
    )


def test_jobs_are_taken_in_their_order():
    queue = make_queue([], [], [])
    assert [queue.take() for _ in range(4)] == [0, 1, 2, None]
    queue.put_back(1)
    assert queue.take() == 1


def test_a_job_waits_for_the_jobs_that_it_needs():
    queue = make_queue([2], [], [], [1, 2])
    assert [queue.take(), queue.take(), queue.take()] == [1, 2, None]
    queue.mark_ended(1)
    assert queue.take() is None
    queue.mark_ended(2)
    assert [queue.take(), queue.take()] == [0, 3]
    assert not queue.waiting


def test_a_run_that_is_not_in_the_sweep_is_not_waited_for(tmp_path):
    recipe = SimpleNamespace(required_runs=lambda: [tmp_path / "trained"])
    assert JobQueue([SimpleNamespace(folder=tmp_path / "run", recipe=recipe)]).take() == 0


@settings(deadline=None, max_examples=20)
@given(data=st.data(), count=st.integers(1, 8), threads=st.integers(1, 4))
def test_threads_begin_every_job_once_and_after_what_it_needs(data, count, threads):
    order = data.draw(st.permutations(range(count)))  # a job may need any job before it in this order
    needed = {one: data.draw(st.lists(st.sampled_from(order[:k]), unique=True)) if k else []
              for k, one in enumerate(order)}  # fmt: skip
    queue = make_queue(*(needed[k] for k in range(count)))
    begun, ended, lock = [], set(), threading.Lock()

    def serve() -> None:
        while (index := queue.wait_and_take(lambda: False)) is not None:
            with lock:
                begun.append((index, set(needed[index]) <= ended))
                ended.add(index)
            queue.mark_ended(index)

    workers = [threading.Thread(target=serve) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert sorted(begun) == [(k, True) for k in range(count)]


def test_a_thread_that_waits_for_a_job_can_be_stopped():
    queue, stop = make_queue([], [0]), threading.Event()
    assert queue.take() == 0
    worker = threading.Thread(target=lambda: queue.wait_and_take(stop.is_set))
    worker.start()
    stop.set()
    worker.join(30)
    assert not worker.is_alive()


def make_family(folder: Path, **dense) -> list[SweepRun]:
    """Return a student, its teacher and a run without either, the student first."""
    teacher = Recipe.load({**SMALL_RECIPE, "name": "dense", **dense})
    section = {"run": str(folder / "dense"), "fingerprint": teacher.fingerprint()}
    student = Recipe.load({**SMALL_RECIPE, "name": "student", "method": "dpf(every=2)", "teacher": section})
    recipes = [student, teacher, Recipe.load({**SMALL_RECIPE, "name": "other", "seed": 1})]
    return [SweepRun(recipe, folder / recipe.name, {}) for recipe in recipes]


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sweep_trains_the_teacher_before_its_student(tmp_path, jobs):
    runs = make_family(tmp_path)
    order = [index for index, result in train_runs(runs, jobs=jobs) if "error" not in result]
    assert sorted(order) == [0, 1, 2]
    assert order.index(1) < order.index(0)


def test_a_student_of_a_failed_teacher_fails_with_one_sentence(tmp_path):
    results = dict(train_runs(make_family(tmp_path, optimizer={"lr": 1e12}), jobs=1))
    assert "the loss is" in results[1]["error"]
    assert results[0]["error"] == (
        f"the teacher of this run, '{tmp_path / 'dense'}', is not a finished run: train it first."
    )
    assert read_summary(tmp_path / "other") is not None
