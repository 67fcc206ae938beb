"""The cases of chaos.py: a run meets random faults, goes on to its end and is compared with an undisturbed one."""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos_faults import Case, choose_faults, cut_file
from chaos_runs import SUBJECTS, Subject, compare
from chaos_sessions import DiskFault, Session, warm_up
from fault_library import has_faults

CUT_AFTER_THE_END = 0.25  # the share of cases in which a file of the finished run is cut off


@dataclass(frozen=True)
class Reference:
    """An undisturbed run."""

    subject: Subject
    folder: Path
    seconds: float
    calls: tuple[int, ...]


@dataclass(frozen=True)
class CaseResult:
    """What became of a run that met some faults."""

    number: int
    subject: str
    kind: str
    faults: list[str]
    sentences: list[str]
    failures: list[str]


def make_reference(subject: Subject, folder: Path) -> Reference:
    """Run a subject undisturbed, and measure its time and its calls."""
    start = time.perf_counter()
    outcome = Session(subject, folder, disk=DiskFault(0, 0)).wait()
    if outcome.status != "done":
        raise SystemExit(f"the undisturbed run of '{subject.name}' was {outcome.status}: {outcome.text}")
    return Reference(subject, folder, time.perf_counter() - start, outcome.calls)


def run_case(number: int, seed: int, references: Sequence[Reference], place: Path) -> CaseResult:
    """Let a random run meet random faults, continue it to its end and compare it."""
    rng = random.Random(f"{seed}-{number}")
    reference = rng.choice(references)
    subject, folder = reference.subject, place / f"case{number}"
    case = Case(subject, folder, rng, reference.seconds, reference.calls)
    for inject in choose_faults(subject, rng, has_faults()):
        if not case.done and not case.failures:
            inject(case)
    if not case.done and not case.failures:
        case.go_on_to_the_end()
    if case.done and rng.random() < CUT_AFTER_THE_END:
        cut_file(case)
        case.go_on_to_the_end()
    if not case.failures:
        case.failures += compare(subject, folder, reference.folder, case.lines_lost)
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)
    if not case.failures:
        for path in place.glob(f"case{number}*"):
            shutil.rmtree(path)
    return CaseResult(number, subject.name, subject.kind, case.faults, case.sentences, case.failures)


def run_lane(lane: int, lanes: int, faults: int, seed: int, references: Sequence[Reference], place: Path) -> None:
    """Run cases one after another until so many faults have happened; their results go to a file."""
    count, number = 0, lane
    with (place / f"lane{lane}.jsonl").open("w") as results:
        while count < faults:
            result = run_case(number, seed, references, place)
            count, number = count + len(result.faults), number + lanes
            results.write(json.dumps(asdict(result)) + "\n")
            results.flush()
            verdict = "LOST " + " | ".join(result.failures) if result.failures else "survived"
            print(f"{result.kind} {result.subject}: {', '.join(result.faults) or 'no fault'}: {verdict}", flush=True)


def run_cases(faults: int, seed: int, lanes: int, references: Sequence[Reference], place: Path) -> list[CaseResult]:
    """Run cases in some processes at once and return their results."""
    pids = []
    for lane in range(lanes):
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            try:
                run_lane(lane, lanes, -(-faults // lanes), seed, references, place)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(ends):
        raise SystemExit("a lane of the harness ended with an error.")
    return [CaseResult(**json.loads(line)) for line in read_lines(place, lanes)]


def read_lines(place: Path, lanes: int) -> Iterator[str]:
    """Yield the lines of all lanes."""
    for lane in range(lanes):
        yield from (place / f"lane{lane}.jsonl").read_text().splitlines()


def summarize(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Return the counts of faults by kind and by what they hit, and the cases that were lost."""
    lost = [result for result in results if result.failures]
    kinds = collections.Counter(fault.partition(": ")[0] for result in results for fault in result.faults)
    hit: dict[str, dict[str, int]] = {}
    for result in results:
        counts = hit.setdefault(result.kind, {"cases": 0, "faults": 0, "lost": 0})
        counts["cases"] += 1
        counts["faults"] += len(result.faults)
        counts["lost"] += len(result.faults) if result.failures else 0
    injected = sum(len(result.faults) for result in results)
    lost_faults = sum(max(1, len(result.faults)) for result in lost)
    return {
        "injected": injected,
        "survived": injected - sum(len(result.faults) for result in lost),
        "lost": lost_faults,
        "refusals": sum(len(result.sentences) for result in results),
        "kinds": dict(sorted(kinds.items())),
        "subjects": dict(sorted(hit.items())),
        "lost_cases": [asdict(result) for result in lost],
    }


def harm_runs(faults: int, seed: int, lanes: int, names: Sequence[str], place: Path) -> dict[str, Any]:
    """Let so many faults happen to the subjects of some names, or to all, and return what became of them."""
    warm_up()
    started = time.perf_counter()
    subjects = [subject for subject in SUBJECTS if not names or subject.name in names]
    references = [make_reference(subject, place / f"undisturbed{k}") for k, subject in enumerate(subjects)]
    results = run_cases(faults, seed, lanes, references, place)
    return summarize(results) | {"seconds": round(time.perf_counter() - started, 1), "in_calls": has_faults()}
