"""Processes that stay up as the ranks of one gloo group, and run one function after another."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
from torch import distributed, multiprocessing


def serve_rank(rank: int, size: int, folder: str, connection: Connection) -> None:
    """Join the group, and run the functions that arrive until None does."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    while (task := connection.recv()) is not None:
        function, arguments = task
        try:
            connection.send((True, function(*arguments)))
        except BaseException as error:
            connection.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)  # a normal exit is sometimes aborted by torch's threads


class RankWorld:
    """Some processes of one group; a function that is run returns one result for each rank."""

    def __init__(self, size: int) -> None:
        self.size, self.folder = size, tempfile.mkdtemp(prefix="ranks")
        context = multiprocessing.get_context("forkserver")  # imports the slow packages once, for all ranks
        context.set_forkserver_preload(["torch.distributed.fsdp", "pomona.methods"])
        pairs = [context.Pipe() for _ in range(size)]
        self.connections = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=serve_rank, args=(rank, size, self.folder, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        self.run(distributed.get_rank, seconds=180)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run a function on every rank without waiting for its results."""
        for connection in self.connections:
            connection.send((function, arguments))

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = 60) -> list[Any]:
        """Run a function on every rank and return its results; raise RuntimeError with the first failure.

        A world in which a rank failed or did not answer in time is of no more use: the others may wait for it.
        """
        self.start(function, *arguments)
        deadline = time.monotonic() + seconds
        answers: list[tuple[bool, Any]] = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(max(deadline - time.monotonic(), 0.1)):
                answers.append((False, f"rank {rank} did not answer within {seconds} s"))
            else:
                answers.append(connection.recv())
        failures = [f"rank {rank}: {value}" for rank, (fine, value) in enumerate(answers) if not fine]
        if failures:
            self.close(kill=True)
            raise RuntimeError("\n".join(failures))
        return [value for _, value in answers]

    def close(self, kill: bool = False) -> None:
        """End the processes."""
        for process, connection in zip(self.processes, self.connections, strict=True):
            if kill:
                process.kill()
            elif process.is_alive():
                connection.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RankWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kill=error is not None)
