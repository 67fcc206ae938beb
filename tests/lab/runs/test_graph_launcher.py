"""The thread that replays the graphs of concurrent runs, with graphs that only count; on a GPU see test_loops.py."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from pomona.lab.runs.graph_launcher import GraphLauncher


class CountingGraph:
    """A graph whose replays append its name to a list; it fails at a replay where it is told to."""

    def __init__(self, name: str, log: list[str], fails_at: int | None = None) -> None:
        self.name, self.log, self.fails_at, self.replays = name, log, fails_at, 0

    def replay(self) -> None:
        self.replays += 1
        if self.replays == self.fails_at:
            raise RuntimeError(f"{self.name} is broken")
        self.log.append(self.name)


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    """Streams that need no GPU."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def ask_together(launcher: GraphLauncher, graphs: dict[CountingGraph, int]) -> dict[str, BaseException]:
    """Ask for the replays of all graphs from a thread each before the launcher starts, and return the errors."""
    errors: dict[str, BaseException] = {}

    def ask(graph: CountingGraph, count: int) -> None:
        try:
            launcher.replay(graph, count)
        except RuntimeError as error:
            errors[graph.name] = error

    threads = [threading.Thread(target=ask, args=pair) for pair in graphs.items()]
    for number, thread in enumerate(threads, 1):
        thread.start()
        while launcher.requests.qsize() < number:
            pass
    with launcher:
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
    return errors


def test_replays_of_several_runs_take_turns():
    log: list[str] = []
    errors = ask_together(GraphLauncher(), {CountingGraph("a", log): 3, CountingGraph("b", log): 1})
    assert errors == {}
    assert log == ["a", "b", "a", "a"]


def test_an_error_reaches_the_run_that_asked_and_no_other():
    log: list[str] = []
    errors = ask_together(GraphLauncher(), {CountingGraph("a", log, fails_at=2): 9, CountingGraph("b", log): 4})
    assert {name: str(error) for name, error in errors.items()} == {"a": "a is broken"}
    assert log == ["a", "b", "b", "b", "b"]


def test_replay_returns_after_the_last_launch_and_the_thread_ends():
    log: list[str] = []
    with GraphLauncher() as launcher:
        for count in (1, 5):
            launcher.replay(CountingGraph("a", log), count)
            assert log.count("a") == count
            log.clear()
    assert not launcher.thread.is_alive()
