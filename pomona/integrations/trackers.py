"""Experiment trackers behind one small protocol: TensorBoard, MLflow, Weights & Biases and trackio, all offline.

    tracking = Tracking(["tensorboard", "wandb"], "runs/mine/tracking")
    tracking.start("mine", {"lr": 0.1})
    tracking.log(step, {"loss": 0.5})
    tracking.finish()

Each tracker writes to a subfolder of its own name. It stores the configuration and the values that it is given and
nothing else: neither the console nor the code nor figures of the machine. A tracker that fails is left out with one
warning, and the training goes on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..errors import PomonaError, unknown_name_error
from ..registry import flatten_settings

Values = Mapping[str, float]

PROJECT = "pomona"  # the project, or experiment, under which trackers list runs


class Tracker(Protocol):
    """The receiver of one run's configuration and values."""

    package: ClassVar[str]  # the module that must be installed
    distribution: ClassVar[str]  # the name under which pip installs it

    def start(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        """Begin a run in a folder; where the folder holds one, continue it after `step`, its last valid step."""

    def log(self, step: int, values: Values) -> None:
        """Store the values of a step."""

    def finish(self, complete: bool) -> None:
        """Write everything and end the run, which is complete or can be resumed."""


class TensorBoardTracker(Tracker):
    """Event files of TensorBoard. A resumed run hides the events after its last valid step."""

    package, distribution = "tensorboard", "tensorboard"

    def start(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        """Open a new event file."""
        from torch.utils.tensorboard import SummaryWriter

        begun = folder.is_dir()
        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if begun else None)
        if not begun:
            self.writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```")

    def log(self, step: int, values: Values) -> None:
        """Store the values as scalars, which a running TensorBoard shows at once."""
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def finish(self, complete: bool) -> None:
        """Close the event file."""
        self.writer.close()


class MLflowTracker(Tracker):
    """A file store of MLflow, which needs neither a server nor a database.

    A resumed run continues the run in its store. MLflow deletes no values: steps that are taken again are listed twice.
    """

    package, distribution = "mlflow", "mlflow-skinny"

    def start(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        """Create the store with its run, or find the run in it."""
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.17 refuses a file store without it
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.metric_class: Any = Metric
        self.client = MlflowClient(folder.resolve().as_uri())
        experiment = self.client.get_experiment_by_name(PROJECT)
        if experiment is None:
            run = self.client.create_run(self.client.create_experiment(PROJECT), run_name=name)
            params = [Param(key, str(value)) for key, value in flatten_settings(config)]
            self.client.log_batch(run.info.run_id, params=params)
        else:
            run = self.client.search_runs([experiment.experiment_id], max_results=1)[0]
            self.client.update_run(run.info.run_id, status="RUNNING")
        self.run_id = run.info.run_id

    def log(self, step: int, values: Values) -> None:
        """Store the values as metrics."""
        now = time.time_ns() // 1_000_000
        metrics = [self.metric_class(key, value, now, step) for key, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def finish(self, complete: bool) -> None:
        """Set the status of the run."""
        self.client.set_terminated(self.run_id, "FINISHED" if complete else "KILLED")


class WandbTracker(Tracker):
    """An offline run of Weights & Biases, for `wandb sync`. A resumed run has the same id, so that both are one."""

    package, distribution = "wandb", "wandb"

    def start(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        """Start an offline run with the id in the folder, or with a new id."""
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / "run-id.txt"
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:8])
        self.run = wandb.init(
            project=PROJECT,
            id=id_file.read_text(),
            name=name,
            dir=str(folder),
            config=dict(config),
            mode="offline",
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )

    def log(self, step: int, values: Values) -> None:
        """Store the values in the run's history."""
        self.run.log(dict(values), step=step)

    def finish(self, complete: bool) -> None:
        """End the run; its exit code is 0 if it is complete."""
        self.run.finish(exit_code=0 if complete else 1)


class TrackioTracker(Tracker):
    """A local database of trackio. A resumed run continues the run of its name.

    trackio reads its folder from the environment when it is imported, and has one run at a time, so that every run
    has a process of its own.
    """

    package, distribution = "trackio", "trackio"
    PROGRAM = (
        "import json, sys, trackio\n"
        "run = trackio.init(**json.loads(sys.stdin.readline()))\n"
        "for line in sys.stdin:\n"
        "    entry = json.loads(line)\n"
        "    run.log(entry['values'], step=entry['step'])\n"
        "run.finish()\n"
    )
    EXIT_SECONDS = 60  # how long the process may take to write what it has received

    def start(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        """Start the process that writes the database."""
        remote = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")
        environment = {key: value for key, value in os.environ.items() if key not in remote}
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "writer.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", self.PROGRAM],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env=environment | {"TRACKIO_DIR": str(folder.resolve())},
                start_new_session=True,  # Ctrl-C is for the training, which ends this process in time
            )
        options = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
        self._send({"project": PROJECT, "name": name, "config": dict(config), "resume": "allow", **options})

    def log(self, step: int, values: Values) -> None:
        """Send the values to the process."""
        self._send({"step": step, "values": dict(values)})

    def finish(self, complete: bool) -> None:
        """End the process once it has written everything."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(self.EXIT_SECONDS)
        if code:
            raise OSError(f"its process ended with code {code}; its writer.log says why")

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}


class Tracking:
    """Any number of trackers as one. None of them can stop a training: one that fails is left out, with a warning."""

    def __init__(
        self, names: str | Sequence[str], folder: Path | str, note: Callable[[str], None] = warnings.warn
    ) -> None:
        self.folder, self.note = Path(folder), note
        self.trackers: dict[str, Tracker] = {name: TRACKERS[name]() for name in parse_names(names)}

    def start(self, name: str, config: Mapping[str, Any], step: int = 0) -> None:
        """Begin a run called `name`, or continue the one in the folder, whose last valid step was `step`."""
        self._for_each("start", lambda key, tracker: tracker.start(self.folder / key, name, config, step))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Store those values of a step that are numbers."""
        numbers = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
        self._for_each("log", lambda key, tracker: tracker.log(step, numbers))

    def finish(self, complete: bool = True) -> None:
        """End the run, which is complete or can be resumed."""
        self._for_each("finish", lambda key, tracker: tracker.finish(complete))
        self.trackers.clear()

    def _for_each(self, action: str, call: Callable[[str, Tracker], None]) -> None:
        for key, tracker in list(self.trackers.items()):
            try:
                call(key, tracker)
            except Exception as error:  # of a package that we do not know, and never worth a training
                del self.trackers[key]
                reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
                self.note(f"tracker '{key}' failed in its {action} and is left out from now on: {reason}.")


def parse_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of trackers, given as a sequence or as text with commas, without repetitions.

    Raise PomonaError for an unknown name, or if the package of a tracker is not installed.
    """
    given = names.split(",") if isinstance(names, str) else names
    found = tuple(dict.fromkeys(name.strip() for name in given if name.strip()))
    for name in found:
        if name not in TRACKERS:
            raise unknown_name_error("tracker", name, TRACKERS)
        if importlib.util.find_spec(TRACKERS[name].package) is None:
            raise PomonaError(f"tracker '{name}' is not installed: pip install {TRACKERS[name].distribution}.")
    return found
