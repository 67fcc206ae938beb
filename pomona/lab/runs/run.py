"""A run: one recipe trained in one folder, which can be stopped, killed and resumed at any step.

    recipe.toml        all settings, resolved
    env.json           versions, machine, commit and command
    metrics.jsonl      one line for each epoch, one line for each mask update, and what is pruned before the first
    checkpoint/        the state to resume from; checkpoint.previous/ is the one before
    model.safetensors  the trained weights
    masks.safetensors  the masks of the pruned weights
    summary.json       the result; its presence means that the run is complete
    tracking/          what trackers such as TensorBoard wrote, if any were asked for

A run has one stage or several (see `stages`). The line of an epoch has its `stage`, `epoch` and `step` (counted over
all stages), `loss`, `lr`, `sparsity` (of the pruned weights), `seconds` and `images_per_second`. After an evaluation it
also has `test_loss` and `accuracy` in per cent (`perplexity` for text), these again with the prefix `valid_` for the
validation part, and with the suffix `_reestimated` where the batch-norm statistics were stale. Where weights are
averaged, the summary has the results of the last weights with the suffix `_last`. Where every epoch was evaluated, it
has the best result at the final sparsity with the suffix `_best`, and its epoch as `epoch_best`.

The line of an update is an entry of `pruner.history`; its `layers` are in the order of the summary's, and of the line
`targets` before the first update, which has the `sizes` of the pruned tensors. Stages with fixed masks have neither.

The order of the data, the learning rate and the initial weights are pure functions of the recipe, so a resumed run is
the uninterrupted one, bit for bit on a CPU. Under torchrun a run is data parallel.
"""

from __future__ import annotations

import json
import math
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from pomona import models
from pomona.core.mask_file import encode_masks
from pomona.core.method import Masks
from pomona.data import Batches
from pomona.integrations.trackers import Tracking
from pomona.methods._mask_holder import MaskHolder

from . import checkpoint, loops
from .concurrency import SHARED_STATE_LOCK, isolated_random_state
from .dips import DipWatcher
from .distillation import load_teacher
from .distributed import DistributedContext, joined_processes
from .environment import describe_environment
from .evaluate import autocast, cross_entropy
from .folder import MASKS_FILE, METRICS_FILE, MODEL_FILE, TRACKING_FOLDER, FolderInUse, refuse_used_folder
from .interruption import Interrupted
from .numerical_safety import refuse_loss, refuse_weights
from .recorder import NoteCallback, ProgressListener, Recorder
from .resume import collect_state, restore_state
from .run_evaluation import evaluate_run, install_average
from .run_inputs import load_data, load_origin, model_options
from .run_summary import summarize_run
from .run_view import TrainingRunView
from .stage_figures import best_epoch
from .strategy import TrainingStrategy
from .weight_average import WeightAverage


class Run(TrainingRunView):
    """The state of a run. Making one validates everything and writes nothing."""

    def __init__(
        self,
        strategy: TrainingStrategy,
        folder: Path,
        processes: DistributedContext,
        device: torch.device,
        data_dir: Path | str | None = None,
        progress: ProgressListener | None = None,
        note: NoteCallback = warnings.warn,
        trackers: Sequence[str] = (),
    ) -> None:
        self.strategy, self.recipe = strategy, strategy.recipe
        self.folder, self.processes, self.device = folder, processes, device
        self.options = self.recipe.train
        self.note: NoteCallback = note if processes.is_first else lambda text: None
        tracking = Tracking(trackers, folder / TRACKING_FOLDER, self.note)
        self.recorder = Recorder(folder, strategy.allowed_outputs, progress, processes.is_first, tracking)
        torch.manual_seed(self.recipe.seed)
        self.data = load_data(self.recipe, data_dir, device)
        self.model_options = model_options(self.recipe, self.data)
        self.model = models.build(**self.model_options).to(device)
        # The masks that the last stage, or the run of the recipe's origin, left.
        self.masks: Masks | None = load_origin(self.recipe, self.model, device)
        self.teacher = load_teacher(self.recipe, self.model_options, device)
        if not processes.is_first:
            torch.manual_seed(self.recipe.seed + processes.rank)  # the same weights, but other dropout
        self.channels_last = device.type == "cuda" and self.data.kind == "image"
        if self.channels_last:
            for network in self.networks:
                network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for network in self.networks:
            models.summary(network, self.data.input_shape)  # refuses a model that does not run on this data
        self.batches = self.training_batches(rank=processes.rank, world=processes.world_size)
        self.steps_per_epoch = len(self.batches)
        self.stages = strategy.make_stages(self.model)
        self.epochs = sum(stage.epochs for stage in self.stages)
        self.total_steps = self.steps_per_epoch * self.epochs
        self.parallel_model = processes.wrap_model(self.model, device)
        self.stage_results: list[dict[str, Any]] = []  # of the stages that are complete
        self.saved_rewind_weights: dict[str, Tensor] = {}  # of a stage that is complete, or from a checkpoint
        self.step = 0  # over all stages
        self.saved_step: int | None = None  # of the last checkpoint
        self.loss_sum = 0.0  # of the steps of this epoch whose loss was read
        self.previous_seconds = 0.0  # of the sessions before this one
        self.session_start = self.timing_start = time.perf_counter()
        self.timed_steps = 0  # since `timing_start`: the start of the epoch, or of a session within it
        self.images_per_second = 0.0  # of the last epoch
        self.metrics_size = 0  # bytes of the metrics at the last checkpoint
        strategy.validate_run(self)

    def begin_stage(self, index: int, resumed: bool = False) -> None:
        """Begin a stage with a new optimizer and pruner; the state of a resumed stage is loaded after that."""
        self.stage_index, self.stage = index, self.stages[index]
        self.stage_start = self.steps_per_epoch * sum(stage.epochs for stage in self.stages[:index])
        self.stage_steps = self.steps_per_epoch * self.stage.epochs
        if not resumed:
            self.stage.prepare(self)
        self.rate = self.stage.rate.rate_function(self.stage.optimizer.lr, self.stage_steps, self.steps_per_epoch)
        kind = loops.choose_loop(self)
        trainable = (p for p in self.model.parameters() if p.requires_grad)
        self.optimizer = self.stage.optimizer.build(trainable, captured=kind != "eager")
        self.loop = self.strategy.make_loop(self, kind)
        self.pruner = self.stage.make_pruner(self)
        self.average = WeightAverage(self.model)
        self.dips = DipWatcher()
        self.updates_written = 0  # entries of the pruner's history that are in metrics.jsonl

    @property
    def networks(self) -> list[nn.Module]:
        """Return the networks that a step runs: the trained model, and its teacher if it has one."""
        return [self.model] if self.teacher is None else [self.model, self.teacher]

    @property
    def stage_end(self) -> int:
        """Return the last step of this stage, counted over all stages."""
        return self.stage_start + self.stage_steps

    @property
    def rewind_weights(self) -> dict[str, Tensor]:
        """Return the weights of a lottery's first round to which the later rounds go back, once they are known."""
        return getattr(self.pruner, "snapshot", None) or self.saved_rewind_weights

    @property
    def elapsed_seconds(self) -> float:
        """Return the seconds that this run took so far, over all sessions."""
        return self.previous_seconds + time.perf_counter() - self.session_start

    def training_batches(self, **options: Any) -> Batches:
        """Return the training batches."""
        augment = self.recipe.data.augment
        if augment != "auto":
            options["augment"] = None if augment == "none" else augment
        return self.data.batches(
            self.options.batch_size,
            seed=self.recipe.seed,
            drop_last=self.options.drop_last,
            channels_last=self.channels_last,
            **options,
        )

    def unseen_batch_loss(self) -> Tensor:
        """Return the loss of a batch that training never draws, for methods that need a gradient before training."""
        inputs, targets = next(self.training_batches().epoch(self.epochs))
        with autocast(self.device, self.options.precision):
            logits = self.model(inputs)
        return cross_entropy(logits, targets)

    # ---- the folder

    def open(self, resume: bool) -> None:
        """Start the run's folder, or continue from the checkpoint in it."""
        if resume:
            self.recorder.lock_folder()  # before it is read: no other process may write a checkpoint meanwhile
            if self.processes.is_first and self.strategy.read_finished_run(self.folder) is not None:
                raise FolderInUse(f"another process has trained in '{self.folder}' meanwhile: repeat the command.")
        continues = resume and checkpoint.exists(self.folder)
        if not continues:
            self.begin_stage(0)  # refuses what does not work before there is a folder
        if not resume:
            self.recorder.lock_folder()
            if self.processes.is_first:
                refuse_used_folder(self.folder)  # by a process that was faster
        if continues:
            restore_state(self, checkpoint.load(self.folder, self.note))
        self.recorder.write_recipe(self.strategy.recipe_toml(), replace=not continues)
        self.recorder.write_environment(describe_environment() | {"data": self.data.describe()})
        lost = self.recorder.open_metrics(self.metrics_size)
        if lost:
            self.note(f"'{METRICS_FILE}' has lost {lost} bytes since the checkpoint: its last lines are missing.")
        if self.strategy.has_secret_checkpoints and not continues:
            self.save_checkpoint()
        self.start_tracking()
        self.recorder.report_start(self.epochs, self.steps_per_epoch, self.recipe.name, self.step)

    def start_tracking(self) -> None:
        """Start the trackers; the time that their packages take to import is not counted as the run's."""
        start = time.perf_counter()
        self.recorder.start_tracking(self.recipe.name, tomllib.loads(self.strategy.recipe_toml()), self.step)
        waited = time.perf_counter() - start
        self.session_start, self.timing_start = self.session_start + waited, self.timing_start + waited

    def save_checkpoint(self) -> None:
        """Write a checkpoint, after all metrics up to this step are on the disk."""
        self.read_losses()
        refuse_weights(self)
        if self.processes.is_first:
            self.write_updates()
            secret = self.strategy.has_secret_checkpoints
            self.recorder.write_checkpoint(collect_state(self), self.strategy.state_dict(), secret)
        self.saved_step = self.step

    def write_updates(self) -> None:
        """Write the mask updates since the last call to the metrics."""
        if self.pruner is None or isinstance(self.pruner, MaskHolder) or not self.pruner.update_count:
            return
        if not self.updates_written:
            sizes = {slot.name: slot.mask.numel() for slot in self.pruner.slots}
            self.recorder.write_metrics({"kind": "targets", "stage": self.stage.name, "sizes": sizes})
        new = self.pruner.update_count - self.updates_written  # the history may have dropped earlier ones
        for entry in self.pruner.history[-new:] if new else ():
            step = self.stage_start + entry["step"]
            self.recorder.write_metrics({"kind": "update", "stage": self.stage.name, **entry, "step": step})
        self.updates_written = self.pruner.update_count

    def close(self) -> None:
        """Close the files, the lock and the progress listener."""
        self.recorder.close()

    # ---- training

    def train(self, stop: Callable[[], bool]) -> None:
        """Train all stages to their end, from the step at which the run is."""
        while True:
            self.train_stage(stop)
            self.end_stage()
            if len(self.stage_results) == len(self.stages):
                return
            with SHARED_STATE_LOCK:
                self.begin_stage(self.stage_index + 1)

    def train_stage(self, stop: Callable[[], bool]) -> None:
        """Train to the last step of the stage. If `stop()` is true, write a checkpoint and raise `Interrupted`."""
        interval = self.loop.loss_interval
        while self.step < self.stage_end:
            epoch, start = divmod(self.step, self.steps_per_epoch)
            for taken in self.loop.run_epoch(epoch, start):
                self.step += taken
                self.timed_steps += taken
                last = self.step % self.steps_per_epoch == 0
                loss = self.read_losses() if last or (interval and self.step % interval == 0) else None
                if self.options.ema:
                    self.average.add(1 - self.options.ema)
                if last:
                    self.measure_speed()
                    self.update_average()
                self.recorder.report_steps(taken, loss)
                if last and self.step < self.stage_end:
                    self.end_epoch()
                stopped = self.step < self.total_steps and self.any_process_stops(stop())
                if stopped or self.is_checkpoint_due():
                    self.save_checkpoint()
                if stopped:
                    raise Interrupted(self.folder, self.step, self.total_steps)

    def is_checkpoint_due(self) -> bool:
        """Return whether a checkpoint is written after this step; the last step of a stage always has one."""
        every, steps = self.options.checkpoint_every * self.steps_per_epoch, self.options.checkpoint_steps
        return (
            self.step == self.stage_end
            or (every > 0 and self.step % every == 0)
            or (steps > 0 and self.step % steps == 0)
        )

    @property
    def steps_to_checkpoint(self) -> int:
        """Return the number of steps to the next checkpoint or to the end of the stage."""
        intervals = self.options.checkpoint_every * self.steps_per_epoch, self.options.checkpoint_steps
        return min([self.stage_end - self.step, *(steps - self.step % steps for steps in intervals if steps)])

    def read_losses(self) -> float | None:
        """Read the losses since the last call from the device and return the last; raise if one is not finite."""
        taken = self.loop.take_losses()
        if taken is None:
            return None
        losses = self.processes.mean(taken).tolist()
        first = self.step - len(losses) + 1
        for step, loss in enumerate(losses, first):
            if not math.isfinite(loss):
                if self.options.nonfinite == "stop":
                    refuse_loss(self, loss, step)
                loss = self.loss_sum / max(1, (step - 1) % self.steps_per_epoch)  # the mean of the epoch so far
            self.loss_sum += loss
        return float(losses[-1])

    def update_average(self) -> None:
        """Add the weights to their average at the end of each of the stage's last epochs, of one at least."""
        epochs = max(1, round(self.options.average * self.stage.epochs))
        if self.options.average and self.stage_end - self.step < epochs * self.steps_per_epoch:
            self.average.add()

    def any_process_stops(self, stop: bool) -> bool:
        """Return whether any process was asked to stop; they exchange it at the steps at which losses are read."""
        if self.processes.world_size == 1:
            return stop
        return self.step % self.loop.loss_interval == 0 and self.processes.any(stop, self.device)

    def measure_speed(self) -> None:
        """Measure the images per second of this epoch, before anything is evaluated or written."""
        rows = min(len(self.batches.split), self.steps_per_epoch * self.options.batch_size) / self.steps_per_epoch
        self.images_per_second = rows * self.timed_steps / max(time.perf_counter() - self.timing_start, 1e-9)

    # ---- results

    def end_epoch(self) -> dict[str, Any]:
        """Evaluate if it is due, record the epoch, and return its row."""
        epoch = self.step // self.steps_per_epoch
        row = {
            "kind": "epoch",
            "stage": self.stage.name,
            "epoch": epoch,
            "step": self.step,
            "loss": self.loss_sum / self.steps_per_epoch,
            "lr": self.rate(self.step - self.stage_start - 1),
            "sparsity": 0.0,
        }
        if self.pruner is not None:
            reached = self.pruner.sparsity()
            row |= {"sparsity": reached.pruned, "zeros": reached.zeros}
        if epoch % self.options.eval_every == 0 or self.step == self.stage_end:
            with SHARED_STATE_LOCK:
                row |= evaluate_run(self)
        row |= {"seconds": self.elapsed_seconds, "images_per_second": self.images_per_second}
        row |= self.strategy.epoch_fields()
        if self.processes.is_first:
            self.write_updates()
            self.recorder.write_metrics(row)
        dip = self.dips.explain(self, row)
        self.recorder.report_epoch(row if dip is None else row | {"note": dip})
        self.loss_sum, self.timed_steps, self.timing_start = 0.0, 0, time.perf_counter()
        return row

    def end_stage(self) -> None:
        """Detach the pruner, install averaged weights, and record the result of the stage."""
        self.saved_rewind_weights = self.rewind_weights
        if self.pruner is not None:
            with SHARED_STATE_LOCK, warnings.catch_warnings(record=True) as caught:  # all threads share the filters
                warnings.simplefilter("always")
                self.pruner.finish(max_batches=0)  # `evaluate_run` reports both statistics
            for warning in caught:
                self.note(str(warning.message))
            self.masks = {name: mask.clone() for name, mask in self.pruner.masks().items()}
        self.strategy.end_stage(self)
        last: dict[str, float] = {}
        if self.average.count:
            with SHARED_STATE_LOCK:
                last = {f"{key}_last": value for key, value in evaluate_run(self).items()}
                install_average(self)
        result = self.end_epoch() | last | self.stage.result_fields(self) | self.strategy.stage_fields()
        result |= best_epoch(self.recorder.read_epochs(self.stage.name, self.stage.epochs))
        self.stage_results.append(self.recorder.select_stage_result(result))

    def finish(self) -> dict[str, Any]:
        """Write the model, its masks and the summary, and return the summary."""
        summary = summarize_run(self)
        if self.processes.is_first:
            weights = {
                name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                for name, tensor in self.model.state_dict().items()
            }
            metadata = {"pomona": json.dumps(self.model_options)}
            self.recorder.write_file(MODEL_FILE, safetensors.torch.save(weights, metadata))
            if self.masks is not None:
                self.recorder.write_file(MASKS_FILE, encode_masks(self.masks))
        written = self.recorder.write_summary(summary)
        if self.processes.is_first:
            self.strategy.finish(self)
        return written


@contextmanager
def prepared_run(strategy: TrainingStrategy, data_dir: Path | str | None = None) -> Iterator[Run]:
    """Yield a run at the beginning of its first stage that is never trained and has no folder."""
    with joined_processes(strategy.recipe.train.device) as (processes, device), isolated_random_state(device):
        run = Run(strategy, Path(), processes, device, data_dir)
        run.begin_stage(0)
        yield run
