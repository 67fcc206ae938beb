"""Sessions of runs in processes that can be killed, and the faults of disks and clocks within them.

A session is a fork of this process, which has imported everything: it begins or continues a run.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import struct
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_runs import Subject
from fault_library import has_faults

from pomona.errors import PomonaError
from pomona.lab import Interrupted
from pomona.lab.sweeps.sweep import SweepInterrupted

LONGEST = 300.0  # seconds that a session may take before it counts as hung
POLL = 0.005

CREATE, WRITE, SYNC, RENAME, REMOVE, READ = 1, 2, 4, 8, 16, 32  # the kinds of calls of disk_faults.c
CHANGES = CREATE | WRITE | SYNC | RENAME | REMOVE
KILL_BEFORE, KILL_AFTER = -1, -2


@dataclass(frozen=True)
class DiskFault:
    """A fault at the n-th call of some kinds below a folder: an errno, or a kill; 0 only counts the calls."""

    at: int
    fault: int
    kinds: int = CHANGES
    lasting: bool = False


@dataclass(frozen=True)
class ClockJump:
    """A jump of the clock at its n-th reading."""

    at: int
    seconds: float


@dataclass
class Outcome:
    """How a session ended: done, refused (with a sentence), stopped (with a checkpoint), crashed, killed or hung."""

    status: str
    text: str = ""
    notes: list[str] = field(default_factory=list)
    struck: bool = False  # whether its fault of a disk or clock has happened
    calls: tuple[int, ...] = ()  # of each kind that disk_faults.c counts, below its folder


class Session:
    """A process that begins or continues a subject in a folder."""

    def __init__(
        self,
        subject: Subject,
        folder: Path,
        disk: DiskFault | None = None,
        clock: ClockJump | None = None,
        file_size: int | None = None,
    ) -> None:
        self.folder, self.counters = folder, mmap.mmap(-1, mmap.PAGESIZE)
        self.pipe, writer = os.pipe()
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        result: dict[str, Any] = {"status": "crashed", "text": ""}
        try:
            os.setsid()  # so that its workers can be found
            silence()
            os.environ["POMONA_LEDGER"] = f"{folder}.ledger"
            if file_size is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
            self.arm(disk, clock)
            subject.go_on(folder, lambda text: send(writer, {"note": text}))  # a kill must not lose what was said
            result["status"] = "done"
        except PomonaError as error:
            result |= {"status": "refused", "text": str(error)}
        except (Interrupted, SweepInterrupted) as error:
            result |= {"status": "stopped", "text": str(error)}
        except BaseException:
            result["text"] = traceback.format_exc()
        finally:
            send(writer, result)
            os._exit(0)

    def arm(self, disk: DiskFault | None, clock: ClockJump | None) -> None:
        """Set the faults of this process, where the library of faults is loaded."""
        if not has_faults():
            return
        library = ctypes.CDLL(None)
        shared = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self.counters)))
        if disk is not None:
            path, at, kinds = str(self.folder).encode(), ctypes.c_long(disk.at), ctypes.c_long(disk.kinds)
            library.chaos_arm(path, at, disk.fault, kinds, ctypes.c_long(disk.lasting), shared)
        if clock is not None:
            library.chaos_jump(ctypes.c_long(clock.at), ctypes.c_double(clock.seconds), shared)

    def is_running(self) -> bool:
        """Return whether the process has not ended."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def sleep(self, seconds: float) -> bool:
        """Wait so long, or until the process has ended; return whether it still runs."""
        end = time.monotonic() + seconds
        while self.is_running() and time.monotonic() < end:
            time.sleep(min(POLL, max(0.0, end - time.monotonic())))
        return self.is_running()

    def send(self, number: int) -> bool:
        """Send a signal to the process; return False where it had ended before."""
        if not self.is_running():
            return False
        os.kill(self.pid, number)
        return True

    def wait(self) -> Outcome:
        """Wait for the end of the process and of its workers, and return how it ended."""
        hung = self.sleep(LONGEST)
        if hung:
            os.kill(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        with os.fdopen(self.pipe, "rb") as pipe:
            told = [json.loads(line) for line in pipe.read().splitlines()]
        notes = [one["note"] for one in told if "note" in one]
        struck, _, *calls = struct.unpack("8q", self.counters[:64])
        if hung or not wait_for_workers(self.pid):
            return Outcome("hung", f"{'it' if hung else 'a worker of it'} still ran after {LONGEST:g} s")
        if os.WIFSIGNALED(status):
            return Outcome("killed", str(os.WTERMSIG(status)), notes, bool(struck), tuple(calls))
        return Outcome(**told[-1], notes=notes, struck=bool(struck), calls=tuple(calls))


def send(pipe: int, message: dict[str, Any]) -> None:
    """Write a message to a pipe as one line."""
    os.write(pipe, json.dumps(message).encode() + b"\n")


def silence() -> None:
    """Discard what this process prints."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)


def find_workers(session: int) -> list[int]:
    """Return the living processes of a session, besides its leader, in no order."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != session:
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry))
    return found


def wait_for_workers(session: int, seconds: float = 60.0) -> bool:
    """Wait until no process of a session is left; return False, and kill them, where some do not end by themselves."""
    end = time.monotonic() + seconds
    while find_workers(session) and time.monotonic() < end:
        time.sleep(POLL * 10)
    left = find_workers(session)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def warm_up() -> None:
    """Import and load what every run needs, without a backward pass: autograd's threads do not survive a fork."""
    import sklearn.datasets
    import torch._dynamo

    from pomona import models
    from pomona.lab.runs import environment
    from pomona.native import private, step  # noqa: F401

    torch.set_num_threads(1)
    sklearn.datasets.load_digits()
    environment.describe_environment()
    models.build("mlp", hidden=[8], in_features=64, num_classes=10)(torch.zeros(1, 1, 8, 8))
