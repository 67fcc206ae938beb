"""A step as a CUDA graph, for benchmarks that replay one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def recorded(step: Callable[[], Any], optimizer: torch.optim.Optimizer | None = None) -> Callable[[], None]:
    """Record a step after three rehearsals; what it uses lives as long as its replay, since a graph holds
    addresses only."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()

    def replay(keep: Any = step) -> None:
        graph.replay()

    return replay
