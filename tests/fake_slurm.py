"""Slurm's commands for tests, on one machine: sbatch, srun, sacct and scontrol.

The folder in FAKE_SLURM holds a copy of every submitted file as ID.sh, the state of every job as ID or ID_INDEX, and in
`requeued` the jobs that were queued again. Jobs begin once the folder has a file `open`, and never if it has a file
`closed`; those of an array run one after another. A job file with the option `--partition=closed` is refused.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scontrol")


def install(folder: Path, monkeypatch) -> Path:
    """Put the commands first on the PATH and return the folder of the jobs."""
    programs, jobs = folder / "bin", folder / "jobs"
    for place in (programs, jobs):
        place.mkdir(parents=True)
    for name in COMMANDS:
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {name} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(jobs))
    return jobs


def main(command: str, arguments: list[str]) -> None:
    """Run one of the commands."""
    jobs = Path(os.environ["FAKE_SLURM"])
    if command == "sbatch":
        submit(jobs, Path(arguments[0]))
    elif command == "srun":
        start = next(i for i, argument in enumerate(arguments) if "python" in argument)
        os.execv(arguments[start], arguments[start:])
    elif command == "sacct":
        print("JobID|State|NodeList")
        for file in sorted(path for path in jobs.iterdir() if re.fullmatch(r"\d+(_\d+)?", path.name)):
            print(f"{file.name}|{file.read_text()}|here")
    elif command == "scontrol":
        with open(jobs / "requeued", "a") as log:
            print(arguments[1], file=log)
        (jobs / f"{arguments[1]}.requeue").touch()
    elif command == "serve":
        serve(jobs, arguments[0], arguments[1:])


def submit(jobs: Path, file: Path) -> None:
    """Store a job file and start the process that runs it."""
    text = file.read_text()
    if "--partition=closed" in text:
        sys.exit("sbatch: error: invalid partition specified: closed")
    identifier = str(len(list(jobs.glob("*.sh"))) + 1)
    (jobs / f"{identifier}.sh").write_text(text)
    array = re.search(r"--array=0-(\d+)", text)
    names = [f"{identifier}_{k}" for k in range(int(array[1]) + 1)] if array else [identifier]
    for name in names:
        (jobs / name).write_text("PENDING")
    subprocess.Popen(
        [sys.executable, "-S", __file__, "serve", identifier, *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    print(f"Submitted batch job {identifier}")


def serve(jobs: Path, identifier: str, names: list[str]) -> None:
    """Run the jobs of a file, one that was queued again once more."""
    deadline = time.monotonic() + 600
    while not (jobs / "open").exists():
        if time.monotonic() > deadline or not jobs.exists() or (jobs / "closed").exists():
            return
        time.sleep(0.05)
    for name in names:
        environment = {"SLURM_JOB_ID": identifier, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
        environment |= {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here"}
        if "_" in name:
            environment |= {"SLURM_ARRAY_JOB_ID": identifier, "SLURM_ARRAY_TASK_ID": name.split("_")[1]}
        again = True
        while again:
            (jobs / name).write_text("RUNNING")
            done = subprocess.run(["bash", str(jobs / f"{identifier}.sh")], env={**os.environ, **environment})
            again = (jobs / f"{name}.requeue").exists()
            (jobs / f"{name}.requeue").unlink(missing_ok=True)
        (jobs / name).write_text("FAILED" if done.returncode else "COMPLETED")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
