"""Feed mutated and invented files to every parser: each is read, or refused with one sentence.

    python benchmarks/measure/parser_fuzz.py [--inputs 100000] [--seed 0] [--workers 2] [--only NAME] [--json PATH]

A failure is an exception that is no PomonaError, a message that is not one printable line, an input that takes longer
than `SECONDS` or grows the process by more than `MEMORY` bytes, and a crash. Inputs run in forked processes, so that a
crash or an endless loop is counted and the next input follows. The inputs of a seed are always the same,
but for the times that the files of a run hold.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from fuzz_case import Parser
from fuzz_parsers import make_parsers
from record_file import write_record

from pomona.errors import UNPRINTABLE, PomonaError

SECONDS = 5.0  # that an input may take, of the process's own time
PATIENCE = 30.0  # seconds of silence after which a process is ended
MEMORY = 1 << 30  # bytes by which an input may grow the process
ADDRESS_SPACE = 4 << 30  # bytes that a process may have beyond those it begins with
CHUNK = 500  # inputs of one process
MAX_SHOWN = 20  # failures of a parser in the report
OUTCOMES = ("accepted", "refused", "failed")


@dataclass
class ParserReport:
    """What became of the inputs of one parser."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0  # with a PomonaError
    failed: int = 0
    slowest: float = 0.0  # seconds of the slowest input
    failures: list[str] = field(default_factory=list)  # a line for each of the first ones


@dataclass
class FuzzReport:
    """What became of the inputs of all parsers."""

    seed: int
    seconds: float = 0.0
    parsers: dict[str, ParserReport] = field(default_factory=dict)

    def count(self, outcome: str) -> int:
        """Return how many inputs were "inputs", "accepted", "refused" or "failed", over all parsers."""
        return sum(getattr(one, outcome) for one in self.parsers.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        totals = {outcome: self.count(outcome) for outcome in ("inputs", *OUTCOMES)}
        return {**totals, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{'parser':<16}{'inputs':>8}{'accepted':>10}{'refused':>9}{'failed':>8}{'slowest':>9}"]
        for name, one in self.parsers.items():
            lines.append(
                f"{name:<16}{one.inputs:>8}{one.accepted:>10}{one.refused:>9}{one.failed:>8}{one.slowest:>8.2f}s"
            )
        totals = "".join(
            f"{self.count(key):>{width}}" for key, width in zip(("inputs", *OUTCOMES), (8, 10, 9, 8), strict=True)
        )
        return "\n".join([*lines, f"{'all':<16}{totals}   in {self.seconds:.0f} s"])


@dataclass
class Worker:
    """A process that runs the inputs `start` to `stop` of a parser, and its last sign of life."""

    process: multiprocessing.process.BaseProcess
    results: Connection
    parser: Parser
    start: int  # the input under way
    stop: int
    heard: float = field(default_factory=time.monotonic)


def fuzz(count: int, seed: int = 0, workers: int = 2, only: Sequence[str] = ()) -> FuzzReport:
    """Run `count` inputs over all parsers, or those in `only`, in forked processes, and return what became of them."""
    begin = time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process must not wait for threads that it does not have
    report = FuzzReport(seed)
    try:
        with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder = Path(name)
            parsers = [one for one in make_parsers(folder) if not only or one.name in only]
            shares = sum(one.share for one in parsers)
            chunks = collections.deque[tuple[Parser, int, int]]()
            for parser in parsers:
                report.parsers[parser.name] = ParserReport()
                inputs = -(-count * parser.share // shares)
                chunks.extend((parser, k, min(k + CHUNK, inputs)) for k in range(0, inputs, CHUNK))
            run_chunks(chunks, seed, workers, folder, report)
    finally:
        torch.set_num_threads(threads)
    report.seconds = time.monotonic() - begin
    return report


def run_chunks(
    chunks: collections.deque[tuple[Parser, int, int]], seed: int, workers: int, folder: Path, report: FuzzReport
) -> None:
    """Run chunks of inputs in forked processes; a chunk whose process ends early goes on in another."""
    running: list[Worker] = []
    try:
        while chunks or running:
            while chunks and len(running) < workers:
                running.append(start_worker(*chunks.popleft(), seed, folder))
            wait([one.results for one in running], timeout=1.0)
            for worker in list(running):
                end = hear(worker, report.parsers[worker.parser.name])
                if end is not None:
                    running.remove(worker)
                    worker.process.kill()
                    worker.process.join()
                    worker.results.close()
                    if end:
                        add(report.parsers[worker.parser.name], worker.start, "failed", end, 0.0)
                        worker.start += 1
                    if worker.start < worker.stop:
                        chunks.appendleft((worker.parser, worker.start, worker.stop))
    finally:
        for worker in running:
            worker.process.kill()
            worker.process.join()


def hear(worker: Worker, report: ParserReport) -> str | None:
    """Take the results that a process has sent; return None while it runs, "" at its end, or how it failed."""
    try:
        while worker.results.poll():
            add(report, worker.start, *worker.results.recv())
            worker.start += 1
            worker.heard = time.monotonic()
    except EOFError:
        worker.process.join()
        return f"crash, exit code {worker.process.exitcode}" if worker.process.exitcode else ""
    if time.monotonic() - worker.heard > PATIENCE:
        return f"no answer for {PATIENCE:g} s"
    return None


def add(report: ParserReport, index: int, outcome: str, detail: str, seconds: float) -> None:
    """Count one input."""
    report.inputs += 1
    setattr(report, outcome, getattr(report, outcome) + 1)
    report.slowest = max(report.slowest, seconds)
    if outcome == "failed" and len(report.failures) < MAX_SHOWN:
        report.failures.append(f"input {index}: {detail}")


def start_worker(parser: Parser, start: int, stop: int, seed: int, folder: Path) -> Worker:
    """Fork a process for some inputs of a parser."""
    context = multiprocessing.get_context("fork")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_inputs, args=(parser, start, stop, seed, folder, sender), daemon=True)
    process.start()
    sender.close()
    return Worker(process, results, parser, start, stop)


def run_inputs(parser: Parser, start: int, stop: int, seed: int, folder: Path, sender: Connection) -> None:
    """Run some inputs of a parser in this process, up to the first that fails, and send what becomes of each."""
    torch.set_num_threads(1)
    faulthandler.disable()  # a crash is counted, not printed
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE, size + ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for index in range(start, stop):
            result = run_input(parser, index, seed, Path(scratch))
            sender.send(result)
            if result[0] == "failed":
                break  # what follows begins in a new process
    sender.close()
    os._exit(0)


def run_input(parser: Parser, index: int, seed: int, scratch: Path) -> tuple[str, str, float]:
    """Return what becomes of one input, the reason, and the seconds it took."""
    value = parser.make(random.Random(f"{seed} {parser.name} {index}"))
    peak, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        parser.parse(value, scratch)
        outcome, detail = "accepted", ""
    except PomonaError as error:
        outcome, detail = "refused", judge_refusal(error)
        outcome = "failed" if detail else outcome
    except BaseException as error:
        outcome, detail = "failed", f"{type(error).__name__}: {error}"[:200]
    seconds = time.process_time() - begin
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
    if seconds > SECONDS:
        outcome, detail = "failed", f"{seconds:.1f} s"
    elif grown > MEMORY:
        outcome, detail = "failed", f"{grown / 2**30:.1f} GiB of memory"
    return outcome, detail, seconds


def judge_refusal(error: PomonaError) -> str:
    """Return what is wrong with a refusal: its message, or memory that was asked for; "" if nothing is."""
    message = str(error)
    if not message or UNPRINTABLE.search(message) or "\n" in message:
        return f"a message that is not one printable line: {message[:100]!r}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
            return f"it asked for memory without limit: {message[:150]}"
        cause = cause.__cause__
    return ""


def main() -> int:
    """Run the inputs, print the report, and return 1 if any input failed."""
    parser = argparse.ArgumentParser(description="Feed mutated and invented files to every parser.")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="the name of a parser; repeatable")
    parser.add_argument("--json", type=Path, help="write a record to this path")
    arguments = parser.parse_args()
    report = fuzz(arguments.inputs, arguments.seed, arguments.workers, arguments.only)
    for name, one in report.parsers.items():
        for line in one.failures:
            print(f"{name}, {line}")
    print(report)
    write_record(arguments.json, command=" ".join(["python", *sys.argv]), **report.to_dict())
    return 1 if report.count("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
