"""Capture the kernels of an operation in a CUDA graph, which is quicker to replay than to launch."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

GRAPH_CAPTURE_LOCK = threading.RLock()  # held while a CUDA graph is captured


class CapturedGraphs:
    """Operations by name, each captured in a graph when it is launched for the second time.

    Python takes longer to launch a Triton kernel than to replay a CUDA graph of it. The first launch is eager,
    because it may compile the kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs: dict[str, torch.cuda.CUDAGraph | None] = {}

    def clear(self) -> None:
        """Free all graphs."""
        self.graphs.clear()

    def launch(self, name: str, run: Callable[[str], None]) -> None:
        """Run the operation `run(name)`, or replay its graph; inside another capture it is always run."""
        if torch.cuda.is_current_stream_capturing() or name not in self.graphs:
            with GRAPH_CAPTURE_LOCK:  # Triton may still be loading a kernel for another thread
                run(name)
            self.graphs.setdefault(name, None)
            return
        graph = self.graphs[name]
        if graph is None:
            graph = self.graphs[name] = self._capture(name, run)
        graph.replay()

    def _capture(self, name: str, run: Callable[[str], None]) -> torch.cuda.CUDAGraph:
        """Capture an operation."""
        graph = torch.cuda.CUDAGraph()
        with GRAPH_CAPTURE_LOCK, pause_garbage_collection(), torch.cuda.stream(capture_stream(self.device)):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on meanwhile
            try:
                run(name)
            finally:
                graph.capture_end()  # in any case, or nothing could run on the stream any more
        return graph


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collector: a graph that it freed during a capture would invalidate the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of a device that graphs are captured on.

    torch hands out 32 streams in turn, so a second one could be the stream that another thread works on.
    """
    return torch.cuda.Stream(device)
