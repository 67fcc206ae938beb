"""Traces of a forward while other threads run modules, and what a forward that stores something leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pomona.core.tracing import trace


class Interrupted(nn.Module):
    """A module whose forward lets something happen in another thread."""

    def __init__(self, event: Callable[[], Any]) -> None:
        super().__init__()
        self.event, self.layer = event, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=self.event)
        thread.start()
        thread.join(timeout=1)
        return self.layer(x)


def test_modules_in_other_threads_run_while_a_model_is_traced() -> None:
    other, results = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []
    graph = trace(Interrupted(lambda: results.append(other(torch.ones(1, 2)))))
    assert graph is not None
    assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "output"]
    assert [type(y) for y in results] == [Tensor]


def test_two_traces_at_the_same_time_leave_modules_as_they_were() -> None:
    before, graphs = (nn.Module.__call__, nn.Module.__getattr__), []
    second = threading.Thread(target=lambda: graphs.append(trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))))
    graphs.append(trace(Interrupted(second.start)))
    second.join()
    assert (nn.Module.__call__, nn.Module.__getattr__) == before
    assert None not in graphs


def test_what_a_forward_stores_is_taken_back() -> None:
    class Storing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            self.all.append(self.last)
            self.named["last"] = self.last
            return self.last

    model = Storing(nn.Linear(2, 2))
    model.last, model.all, model.named = None, [1], {"first": 2}
    assert trace(model) is not None
    assert (model.last, model.all, model.named) == (None, [1], {"first": 2})
