"""Capture a training step in a CUDA graph, for the benchmarks that replay one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARMUP_STEPS = 3  # torch's documentation of CUDA graphs asks for a few eager steps on a side stream


def capture_step(step: Callable[[], Any], optimizer: torch.optim.Optimizer | None = None) -> Callable[[], None]:
    """Return a function that replays `step` as a CUDA graph.

    The returned function holds a reference to `step`. The graph itself only stores addresses, so the tensors
    that the step uses must stay alive as long as the graph is replayed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()

    def replay(referenced_step: Any = step) -> None:
        graph.replay()

    return replay
