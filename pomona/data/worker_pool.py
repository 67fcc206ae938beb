"""Worker processes that take numbered tasks from one pipe and report them through another.

Whichever worker is free reads the next task number. Every message is one write of at most `PIPE_BUF` bytes, which the
kernel never mixes with another, so there is no lock that a killed worker could leave closed. Workers are forked: they
know what their parent knew, and what they write to `shared_array`s it reads without a copy. A worker ends when the
pipe of tasks is closed, and so when its parent is killed. Where there is no safe `fork` the workers are threads.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import select
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pomona.errors import PomonaError

TASK, RESULT = struct.Struct("=q"), struct.Struct("=qi")  # a result is followed by so many bytes of an error's text
MAX_ERROR_BYTES = select.PIPE_BUF - RESULT.size if hasattr(select, "PIPE_BUF") else 500
CHECK_SECONDS = 0.5  # after so long without a result it is checked that all workers live
HAS_FORK = sys.platform == "linux"  # elsewhere libraries of the system may not survive a fork


def shared_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of zeros in memory that forked processes share; it needs no file, so no space in /dev/shm."""
    count = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize)), dtype, count).reshape(shape)


class WorkerPool:
    """Workers that call `work(task)` for every task that is submitted.

    What `work` raises is raised again by `next_result`, as a PomonaError. The death of a worker is one too; it has
    `describe(task)` of the task that the worker was at.
    """

    def __init__(self, count: int, work: Callable[[int], None], describe: Callable[[int], str]) -> None:
        self.work, self.describe = work, describe
        self.current = shared_array((count,), np.int64)  # the task of each worker
        self.task_pipe, self.result_pipe = os.pipe(), os.pipe()
        self.workers: dict[int, int] = {}  # process → its index
        self.threads: list[threading.Thread] = []
        self.closed = False
        for index in range(count):
            if HAS_FORK:
                self.workers[self._fork(index)] = index
            else:
                self.threads.append(threading.Thread(target=self._serve, args=(index,), daemon=True))
                self.threads[-1].start()

    def submit(self, task: int) -> None:
        """Hand a task to the workers."""
        os.write(self.task_pipe[1], TASK.pack(task))

    def next_result(self) -> int:
        """Wait for the next task to be done and return it; raise PomonaError where it failed or a worker died."""
        if HAS_FORK:
            poll = select.poll()
            poll.register(self.result_pipe[0], select.POLLIN)
            while not poll.poll(CHECK_SECONDS * 1000):
                self._require_all_alive()
        task, length = RESULT.unpack(os.read(self.result_pipe[0], RESULT.size))
        if length:
            raise PomonaError(os.read(self.result_pipe[0], length).decode(errors="replace"))
        return int(task)

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        if self.closed:
            return
        self.closed = True
        os.close(self.task_pipe[1])
        for process in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in self.workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
        for thread in self.threads:
            thread.join()
        for descriptor in (self.task_pipe[0], *self.result_pipe):
            os.close(descriptor)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _require_all_alive(self) -> None:
        for process, index in list(self.workers.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del self.workers[process]
                code = os.waitstatus_to_exitcode(status)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                raise PomonaError(
                    f"worker process {process} {how} while it {self.describe(int(self.current[index]))}: "
                    "set data.workers lower if memory is short, and resume."
                )

    def _fork(self, index: int) -> int:
        """Start a worker process and return its number; in the worker, never return."""
        with warnings.catch_warnings():  # a worker runs nothing that another thread of the parent may have locked
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process:
            return process
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            gc.freeze()  # the parent's objects are not the worker's to finalize
            os.close(self.task_pipe[1])
            os.close(self.result_pipe[0])
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)  # other threads of the parent do not exist here
            self._serve(index)
            code = 0
        finally:
            os._exit(code)

    def _serve(self, index: int) -> None:
        """Work on tasks until there are no more."""
        while not self.closed and (message := os.read(self.task_pipe[0], TASK.size)):
            task, error = TASK.unpack(message)[0], b""
            self.current[index] = task
            try:
                self.work(task)
            except PomonaError as failure:
                error = str(failure).encode(errors="replace")
            except Exception as failure:  # whatever it is, it must reach the parent
                sentence = f"a worker that {self.describe(task)} failed: {type(failure).__name__}: {failure}."
                error = sentence.encode(errors="replace")
            error = error[:MAX_ERROR_BYTES]
            os.write(self.result_pipe[1], RESULT.pack(task, len(error)) + error)
