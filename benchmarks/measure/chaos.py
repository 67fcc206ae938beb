"""Kill, cut off, fill and duplicate runs: each must end bit for bit like an undisturbed one.

    python benchmarks/measure/chaos.py [--faults 200] [--fuzz 100000] [--seed 0] [--lanes 2] [--json PATH]

Trainings, private trainings and sweeps on the digits meet one to three random faults each: SIGKILL at a random moment
or at a change of a file, a full or small disk, errors of the disk, a read-only folder, a limit on files, files that
were cut off, two processes at once, a frozen one, a signal to stop, a clock that jumps. A session that a fault ends
must end with one sentence. The run is then continued to its end, and its weights, masks, metrics and summary are
compared with those of an undisturbed run. A fault is lost where they differ, or where the run does not go on. A fault
counts only if it has happened. Then every parser reads damaged and hostile inputs.

Faults within a process need a C compiler, and a small disk the right to mount one; without them the others remain.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fault_library import run_with_faults

STARTED = "CHAOS_STARTED"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the harness; return 1 where a fault was lost or an input was not refused with a sentence."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=200, help="faults that must happen")
    parser.add_argument("--fuzz", type=int, default=100_000, help="inputs for the parsers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=2, help="processes at a time")
    parser.add_argument("--subjects", default="", help="names of runs, separated by commas; all by default")
    parser.add_argument("--json", type=Path, help="write a record to this path")
    options = parser.parse_args(given)
    if STARTED not in os.environ:  # the library of faults is loaded before Python starts
        os.environ[STARTED] = "1"
        return run_with_faults([sys.executable, __file__, *given])
    from chaos_cases import harm_runs
    from parser_fuzz import fuzz
    from record_file import write_record

    found: dict[str, Any] = {}
    if options.faults:
        place = Path(tempfile.mkdtemp(prefix="chaos-runs-"))
        names = [name for name in options.subjects.split(",") if name]
        found["faults"] = faults = harm_runs(options.faults, options.seed, options.lanes, names, place)
        counts = ", ".join(f"{key}: {faults[key]}" for key in ("injected", "survived", "lost"))
        print(f"faults {counts}; {faults['seconds']:.0f} s", flush=True)
        if faults["lost"]:
            print(f"the folders of what was lost are in {place}")
        else:
            shutil.rmtree(place)
    if options.fuzz:
        report = fuzz(options.fuzz, options.seed, options.lanes)
        found["fuzz"] = report.to_dict()
        print(report)
    write_record(options.json, seed=options.seed, **found)
    return int(any(part.get("lost") or part.get("failed") for part in found.values()))


if __name__ == "__main__":
    sys.exit(main())
