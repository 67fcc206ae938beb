"""The faults of chaos.py, each on a session of a run that was begun before or is begun by it."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos_runs import LOST_LINES, NO_CHECKPOINT, Subject
from chaos_sessions import (
    CHANGES,
    CREATE,
    KILL_AFTER,
    KILL_BEFORE,
    READ,
    REMOVE,
    RENAME,
    WRITE,
    ClockJump,
    DiskFault,
    Outcome,
    Session,
    find_workers,
)

REFUSED_SECOND = "another process trains in", "another process has trained in", "is not empty: go on with --resume"
YEARS = 3e7  # seconds, about
SMALL_DISKS = 20_000, 200_000  # bytes


@dataclass
class Case:
    """One subject in one folder, with the faults that it has met so far."""

    subject: Subject
    folder: Path
    rng: random.Random
    seconds: float  # that an undisturbed session takes
    calls: tuple[int, ...]  # of each kind, of an undisturbed session
    faults: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # each is a promise that was broken
    sentences: list[str] = field(default_factory=list)
    lines_lost: bool = False  # a note has said that lines of the metrics are lost
    done: bool = False

    def record(self, outcome: Outcome) -> Outcome:
        """Take note of how a session ended."""
        if outcome.status in ("crashed", "hung"):
            self.failures.append(f"{outcome.status}: {outcome.text}")
        if outcome.status == "refused":
            self.sentences.append(outcome.text)
            if not outcome.text or "\n" in outcome.text:
                self.failures.append(f"refused without a sentence: {outcome.text!r}")
        self.lines_lost |= any(LOST_LINES in note for note in outcome.notes)
        self.done = outcome.status == "done"
        return outcome

    def run(self, **faults: DiskFault | ClockJump | int | None) -> Outcome:
        """Run one session to its end."""
        return self.record(Session(self.subject, self.folder, **faults).wait())  # type: ignore[arg-type]

    def strike(self, name: str, fault: int, kinds: int, ends: str, lasting: bool = False) -> None:
        """Run a session with a fault at a random call of some kinds, which must end it in one way if it happens."""
        calls = sum(count for bit, count in enumerate(self.calls) if kinds >> bit & 1)
        outcome = self.run(disk=DiskFault(self.rng.randint(1, max(calls, 1)), fault, kinds, lasting))
        if outcome.struck:
            self.faults.append(name)
            if outcome.status not in (ends, "done"):
                self.failures.append(f"after {name} the session was {outcome.status}: {outcome.text}")

    def go_on_to_the_end(self) -> None:
        """Continue the run without faults; where it says that nothing can be used, begin it again in its place."""
        for _ in range(4):
            outcome = self.run()
            if self.done or self.failures:
                return
            if outcome.status != "refused" or NO_CHECKPOINT not in outcome.text:
                break
            for folder in self.subject.folders(self.folder):
                if f"'{folder}'" in outcome.text:
                    clear_folder(folder)
        self.failures.append(f"it did not go on: {outcome.status}, {outcome.text}")


def clear_folder(folder: Path) -> None:
    """Remove what is in a folder, which may be a disk of its own."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


Fault = Callable[[Case], None]


def signal_at_random(case: Case, number: int, name: str) -> None:
    """Send a signal to a session at a random moment."""
    session = Session(case.subject, case.folder)
    session.sleep(case.rng.uniform(0, 1.1 * case.seconds))
    if session.send(number):
        case.faults.append(name)
    case.record(session.wait())


def random_kill(case: Case) -> None:
    """Kill the process at a random moment."""
    signal_at_random(case, signal.SIGKILL, "killed at a random moment")


def kill_at_call(case: Case) -> None:
    """Kill the process before or after a random change of a file; a write reaches the disk by half."""
    case.strike("killed at a change of a file", case.rng.choice((KILL_BEFORE, KILL_AFTER)), CHANGES, "killed")


def kill_worker(case: Case) -> None:
    """Kill one of the processes of a sweep at a random moment: the sweep must end as if nothing had happened."""
    session = Session(case.subject, case.folder)
    session.sleep(case.rng.uniform(0.3, 1) * case.seconds)
    workers = find_workers(session.pid)
    if workers and session.is_running():
        os.kill(case.rng.choice(workers), signal.SIGKILL)
        case.faults.append("a worker killed")
    case.record(session.wait())


def full_disk(case: Case) -> None:
    """Let the disk be full from a random change of a file on."""
    case.strike("disk full", errno.ENOSPC, CREATE | WRITE, "refused", lasting=True)


def disk_error(case: Case) -> None:
    """Let a random change of a file fail."""
    case.strike("input/output error", errno.EIO, CHANGES, "refused", lasting=case.rng.random() < 0.3)


def read_error(case: Case) -> None:
    """Let a random reading of a file fail, once or from then on."""
    case.strike("a file that cannot be read", errno.EIO, READ, "refused", lasting=case.rng.random() < 0.5)


def read_only_folder(case: Case) -> None:
    """Let the file system become read-only at a random change of a file."""
    case.strike("folder read-only", errno.EROFS, CREATE | WRITE | RENAME | REMOVE, "refused", lasting=True)


def file_size_limit(case: Case) -> None:
    """Limit the size of files, as a quota does."""
    outcome = case.run(file_size=case.rng.randint(1, 40_000))
    if outcome.status == "refused" and "File too large" in outcome.text:
        case.faults.append("file size limited")
    elif outcome.status != "done":
        case.failures.append(f"with a limited file size the session was {outcome.status}: {outcome.text}")


def small_disk(case: Case) -> None:
    """Put the folder on a small disk that has no room for the run, and then give it room."""
    if os.path.ismount(case.folder) or case.folder.exists():
        return
    case.folder.mkdir()
    if not mount(case.folder, f"size={case.rng.randint(*SMALL_DISKS)}"):
        case.folder.rmdir()
        return
    outcome = case.run()
    if outcome.status == "refused" and "the disk is full" in outcome.text:
        case.faults.append("a small disk full")
    elif outcome.status != "done":
        case.failures.append(f"on a small disk the session was {outcome.status}: {outcome.text}")
    mount(case.folder, "remount,size=100m")


def mount(folder: Path, options: str) -> bool:
    """Mount a file system in memory on a folder; return False where this is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", options, "chaos", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def cut_file(case: Case) -> None:
    """Cut off the end of a random file of the run, or all of it."""
    files = sorted(path for path in case.folder.rglob("*") if path.is_file()) if case.folder.is_dir() else []
    if not files:
        return
    file = case.rng.choice(files)
    size = file.stat().st_size
    keep = 0 if case.rng.random() < 0.2 else case.rng.randrange(size or 1)
    with file.open("r+b") as opened:
        opened.truncate(keep)
    case.faults.append(f"cut off: {file.parent.name if file.parent != case.folder else ''}/{file.name}")
    case.done = False


def second_process(case: Case) -> None:
    """Begin a second process in the folder while the first one trains, which may be frozen meanwhile."""
    first = Session(case.subject, case.folder)
    first.sleep(case.rng.uniform(0.2, 0.9) * case.seconds)
    frozen = case.rng.random() < 0.5 and case.subject.kind != "sweep" and first.send(signal.SIGSTOP)
    second = Session(case.subject, case.folder)
    if frozen:
        second.sleep(case.seconds * 3)
        first.send(signal.SIGCONT)
    kill_first = not frozen and case.rng.random() < 0.3
    if kill_first:
        first.send(signal.SIGKILL)
    outcomes = [first.wait(), second.wait()]
    case.faults.append("two processes, one frozen" if frozen else "two processes")
    for outcome in outcomes:
        case.record(outcome)
    statuses = [outcome.status for outcome in outcomes]
    case.done = "done" in statuses
    refusals = [outcome.text for outcome in outcomes if outcome.status == "refused"]
    expected = all(any(sentence in text for sentence in REFUSED_SECOND) for text in refusals)
    if not expected or (not case.done and not kill_first):
        case.failures.append(f"two processes ended as {statuses}: {refusals}")


def stop_signal(case: Case) -> None:
    """Ask the process to stop at a random moment, as Ctrl-C and cluster schedulers do."""
    signal_at_random(case, signal.SIGTERM, "asked to stop")


def clock_jump(case: Case) -> None:
    """Let the clock jump at a random moment, forwards or backwards, by up to about ten years."""
    jump = ClockJump(case.rng.randint(1, 200), case.rng.uniform(-10 * YEARS, 10 * YEARS))
    outcome = case.run(clock=jump)
    if outcome.struck:
        case.faults.append("the clock jumped")
        unusable = NO_CHECKPOINT in outcome.text and any(fault.startswith("cut off") for fault in case.faults)
        if outcome.status != "done" and not unusable:
            case.failures.append(f"after a jump of the clock the session was {outcome.status}: {outcome.text}")


OUTSIDE: list[Fault] = [random_kill, stop_signal, second_process, file_size_limit]  # need no library of faults
INSIDE: list[Fault] = [kill_at_call, kill_at_call, full_disk, disk_error, read_error, read_only_folder, clock_jump]


def choose_faults(subject: Subject, rng: random.Random, has_library: bool) -> list[Fault]:
    """Return one to three faults for a subject; a file may be cut off after any, and after the end."""
    inside = INSIDE if has_library and subject.jobs == 1 else []
    kinds = [*OUTSIDE, *inside, *([kill_worker, kill_worker, random_kill] if subject.jobs > 1 else [])]
    if subject.jobs > 1:
        kinds.remove(file_size_limit)  # its processes are those of a server that has no limit
    chosen = [rng.choice(kinds) for _ in range(rng.randint(1, 3))]
    if subject.jobs == 1 and rng.random() < 0.2:
        chosen.insert(0, small_disk)
    for place in range(len(chosen), 0, -1):
        if rng.random() < 0.3:
            chosen.insert(place, cut_file)
    return chosen
