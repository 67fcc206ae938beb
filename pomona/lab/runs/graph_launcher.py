"""One thread that replays the CUDA graphs of all concurrent runs.

A thread for each run would do, but then as many threads wait for each other at every replay, for Python's lock and for
the driver's. Here a run asks for several replays at once, and one thread takes them in turns with those of other runs.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch


@dataclass
class Request:
    """Replays of one graph on one stream that are still to be launched."""

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    count: int
    launched: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class GraphLauncher:
    """Launch replays that other threads ask for, in turns. Use as a context manager: the thread ends with the block."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()  # None ends the thread
        self.thread = threading.Thread(target=self._serve, name="graph launcher", daemon=True)

    def __enter__(self) -> GraphLauncher:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.requests.put(None)
        self.thread.join()

    def replay(self, graph: torch.cuda.CUDAGraph, count: int) -> None:
        """Replay a graph on the current stream `count` times, and return when the last replay is launched."""
        request = Request(graph, torch.cuda.current_stream(), count)
        self.requests.put(request)
        request.launched.wait()
        if request.error is not None:
            raise request.error

    def _serve(self) -> None:
        """Launch one replay of each request in turn; the main function of the thread."""
        waiting: deque[Request] = deque()
        while True:
            while not waiting or not self.requests.empty():
                request = self.requests.get()
                if request is None:
                    return
                waiting.append(request)
            self._launch(waiting.popleft(), waiting)

    def _launch(self, request: Request, waiting: deque[Request]) -> None:
        """Launch one replay of a request, and put the request back in line if it has more."""
        try:
            with torch.cuda.stream(request.stream):
                request.graph.replay()
            request.count -= 1
        except Exception as error:  # belongs to the run that asked
            request.error, request.count = error, 0
        if request.count > 0:
            waiting.append(request)
        else:
            request.launched.set()


# The launcher of the concurrent runs to which the run of this thread belongs; None for a run that is alone.
GRAPH_LAUNCHER: ContextVar[GraphLauncher | None] = ContextVar("GRAPH_LAUNCHER", default=None)
