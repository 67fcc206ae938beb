"""A run: one recipe trained into one folder, which can be stopped, killed and resumed at any step.

    recipe.toml        all settings, resolved
    env.json           versions, machine, commit and command
    metrics.jsonl      one line an epoch, one line a mask update
    checkpoint/        the state to resume from, and checkpoint.previous/ the one before
    model.safetensors  the trained weights
    masks.safetensors  what is kept of those that were pruned
    summary.json       what was reached; its presence says that the run is complete

A run is one stage or several (see `stages`). A line of an epoch has its `stage`, `epoch` and `step`
(counted over all stages), `loss`, `lr`, `sparsity` (of what is pruned), `seconds` and
`images_per_second`, and where it was evaluated `test_loss` and `accuracy` in per cent (for a text
`perplexity`), these again with `valid_` before them where there is a validation part, and with
`_reestimated` behind them where fresh batch-norm statistics were called for. Where weights are averaged,
the summary has what the last ones reached with `_last` behind it. A line of an update is one of
`pruner.history`; its `layers` are in the order of the summary's. Masks that are held have none.

The order of the data, the rate and the model's first weights are pure functions of the recipe, so a
resumed run is the uninterrupted one, bit for bit on a CPU. Under torchrun it is data parallel.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pomona import data, models
from pomona.core.method import Masks
from pomona.data import Batches, Dataset
from pomona.errors import PomonaError, require
from pomona.methods._mask_holder import MaskHolder
from pomona.registry import spec_to_dict

from ..recipes.recipe import Recipe
from . import checkpoint, loops, masks
from . import environment as env
from .distributed import Team, assembled
from .evaluate import autocast, batchnorms, cross_entropy, measure, reestimate_batchnorm
from .folder import (
    MODEL,
    RECIPE,
    SUMMARY,
    Metrics,
    as_json,
    check_folder,
    claimed,
    compare_models,
    compare_recipes,
    refuse_used,
)
from .folder import summary as summary_of
from .loops import PACKED, SETUP
from .stages import stages
from .weight_average import Mean

Note = Callable[[str], None]
HOW = ("foreach", "fused", "capturable")  # an optimizer's options that say how a step is computed, not which


class Progress(Protocol):
    """Who is told how a run goes. A resumed run first tells the steps it has behind it."""

    def start(self, total_epochs: int, steps_per_epoch: int, title: str) -> None: ...

    def step(self, loss: float | None = None) -> None:
        """After every step; with the loss where it was read."""

    def epoch(self, row: dict[str, Any]) -> None:
        """After every epoch, with its line of the metrics."""

    def close(self) -> None:
        """At the end, whatever it was."""


class Interrupted(Exception):
    """The run was asked to stop; a checkpoint was written first."""

    def __init__(self, folder: Path, step: int, total: int) -> None:
        super().__init__(
            f"stopped after step {step} of {total}, with a checkpoint in '{folder}': "
            "the same command with --resume goes on from there."
        )
        self.folder, self.step, self.total = folder, step, total


def train(
    recipe: Recipe,
    folder: Path | str,
    *,
    resume: bool = False,
    data_dir: Path | str | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    note: Note = warnings.warn,
) -> dict[str, Any]:
    """Train a recipe in a folder and return its summary, which is also in `summary.json`.

    Nothing is written before the whole recipe is known to work. Ctrl-C, SIGTERM or `stop()`, asked
    after every step, end the run with `Interrupted` once a checkpoint is written. With `resume` it
    goes on from there; a complete run gives its summary back. `note` is told what a person should
    know, such as a damaged checkpoint.
    """
    folder = Path(folder)
    with assembled(recipe.train.device) as (team, device), own_random(device):
        done = check_folder(recipe, folder, resume)
        team.wait()  # all have looked before one begins to write
        if done is not None:
            return done
        with SETUP:
            run = Run(recipe, folder, team, device, data_dir, progress, note)
        try:
            with SETUP:
                run.open(resume)
            with signals() as asked:
                run.train(lambda: asked() or (stop is not None and stop()))
            with SETUP:
                summary = run.finish()
            team.wait()  # until the first has written it all
            return summary
        finally:
            run.close()


def plan(recipe: Recipe, *, data_dir: Path | str | None = None) -> dict[str, Any]:
    """What `train` would do, after all the checks it would make; nothing is trained or written."""
    with assembled(recipe.train.device) as (team, device), own_random(device):
        run = Run(recipe, Path(), team, device, data_dir)
        run.begin(0)
        cost = models.summary(run.model, run.data.input_shape)
        return {
            "fingerprint": recipe.fingerprint(),
            "device": str(device),
            "data": run.data.describe(),
            "model": run.built,
            "params": cost.params,
            "macs": cost.macs,
            "pruned": {} if run.pruner is None else {k: m.numel() for k, m in run.pruner.masks().items()},
            "stages": {stage.name: stage.epochs for stage in run.stages},
            "steps_per_epoch": run.per_epoch,
            "steps": run.total,
        }


class Run:
    """The state of a run and what is done with it. Making one checks everything and writes nothing."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        team: Team,
        device: torch.device,
        data_dir: Path | str | None = None,
        progress: Progress | None = None,
        note: Note = warnings.warn,
    ) -> None:
        self.recipe, self.folder, self.team, self.device = recipe, folder, team, device
        self.options = recipe.train
        self.progress = progress if team.first else None
        self.note: Note = note if team.first else lambda text: None
        torch.manual_seed(recipe.seed)
        self.data = load_data(recipe, data_dir, device)
        self.built = model_options(recipe, self.data)
        self.model = models.build(**self.built).to(device)
        self.masks: Masks | None = None  # that the last stage left, or another run
        self.inherit()
        if not team.first:
            torch.manual_seed(recipe.seed + team.rank)  # the same weights, but other draws for dropout
        self.channels_last = device.type == "cuda" and self.data.kind == "image"
        if self.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        models.summary(self.model, self.data.input_shape)  # refuses a model that does not run on this data
        self.batches = self.training(rank=team.rank, world=team.world)
        self.per_epoch = len(self.batches)
        self.stages = stages(recipe, self.model)
        self.epochs = sum(stage.epochs for stage in self.stages)
        self.total = self.per_epoch * self.epochs
        self.network = team.wrap(self.model, device)
        self.results: list[dict[str, Any]] = []  # of the stages that are over
        self.rewound: dict[str, Tensor] = {}  # early weights, to which a lottery goes back
        self.step = 0  # of all stages together
        self.loss = 0.0  # summed over the epoch, as far as it was read
        self.seconds = 0.0  # of the sessions before this one
        self.started = self.lap = time.perf_counter()
        self.lap_steps = 0  # steps since the lap began: with the epoch, or when resumed within it
        self.pace = 0.0  # samples per second of the last lap
        self.written = 0  # bytes of the metrics that a checkpoint knows of
        self.metrics: Metrics | None = None
        self.opened = ExitStack()  # what is to be closed
        if self.progress is not None:
            self.opened.callback(self.progress.close)

    def inherit(self) -> None:
        """Take over what the recipe asks of another run."""
        origin = self.recipe.origin
        if origin.run is None:
            return
        folder = Path(origin.run)
        done = summary_of(folder)
        if done is None:
            raise PomonaError(f"the run '{folder}', with which this one begins, is not there (any more).")
        theirs = done["fingerprint"]
        require(
            theirs == origin.fingerprint,
            f"the run in '{folder}' has the fingerprint {theirs}, and this one began with {origin.fingerprint}.",
        )
        if origin.weights == "final":
            try:
                weights = safetensors.torch.load_file(folder / MODEL)
            except (OSError, SafetensorError) as error:
                raise PomonaError(f"the weights of the run '{folder}' cannot be read: train it again.") from error
            compare_models(weights, self.model.state_dict(), folder)
            self.model.load_state_dict(weights)
        if self.recipe.method["name"] == "finetune":
            self.masks = {name: mask.to(self.device) for name, mask in masks.load(folder).items()}

    def begin(self, index: int, resumed: bool = False) -> None:
        """Begin a stage, with a new optimizer; where it is resumed its state is still to come."""
        self.index, self.stage = index, self.stages[index]
        self.first = self.per_epoch * sum(stage.epochs for stage in self.stages[:index])
        self.steps = self.per_epoch * self.stage.epochs
        if not resumed:
            self.stage.prepare(self)
        self.rate = self.stage.rate.over(self.stage.optimizer.lr, self.steps, self.per_epoch)
        kind = loops.choose(self)
        learning = (p for p in self.model.parameters() if p.requires_grad)
        self.optimizer = self.stage.optimizer.build(learning, captured=kind != "eager")
        self.loop = loops.make(self, kind)
        self.pruner = self.stage.pruner(self)
        self.mean = Mean(self.model)
        self.updates = 0  # of the pruner's history that stand in metrics.jsonl

    @property
    def end(self) -> int:
        """The last step of this stage."""
        return self.first + self.steps

    @property
    def rewind(self) -> dict[str, Tensor]:
        """The weights of a lottery's first round to which the later ones go back, as soon as they are known."""
        return getattr(self.pruner, "snapshot", None) or self.rewound

    @property
    def elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.started

    def training(self, **options: Any) -> Batches:
        """The training batches."""
        choice = self.recipe.data.augment
        if choice != "auto":
            options["augment"] = None if choice == "none" else choice
        return self.data.batches(
            self.options.batch_size,
            seed=self.recipe.seed,
            drop_last=self.options.drop_last,
            channels_last=self.channels_last,
            **options,
        )

    def unseen_loss(self) -> Tensor:
        """The loss of a batch that training never draws, for methods that look at a gradient before it."""
        inputs, targets = next(self.training().epoch(self.epochs))
        with autocast(self.device, self.options.precision):
            logits = self.model(inputs)
        return cross_entropy(logits, targets)

    # ---- the folder

    def open(self, resume: bool) -> None:
        """Begin the folder, or take up what is in it."""
        begun = resume and checkpoint.found(self.folder)
        if not begun:
            self.begin(0)  # refuses what does not work before there is a folder
        if self.team.first:
            self.opened.enter_context(claimed(self.folder))
            if not resume:
                refuse_used(self.folder)  # by one that was quicker
        if begun:
            self.restore(checkpoint.load(self.folder, self.note))
        else:
            self.make_folder()
        if self.team.first:
            checkpoint.replace(self.folder / "env.json", as_json(env.facts() | {"data": self.data.describe()}))
            self.metrics = Metrics(self.folder, self.written)
            self.opened.callback(self.metrics.close)
        if self.progress is not None:
            self.progress.start(self.epochs, self.per_epoch, self.recipe.name)
            for _ in range(self.step):
                self.progress.step()

    def make_folder(self) -> None:
        """What is in the folder of a run that has not taken a step."""
        if self.team.first:
            checkpoint.replace(self.folder / RECIPE, self.recipe.to_toml().encode())

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs; the pruner's part rides in the optimizer's."""
        return {
            "recipe": self.recipe.to_dict(),
            "stage": self.index,
            "results": self.results,
            "rewind": self.rewind,
            "step": self.step,
            "loss": self.loss,
            "updates": self.updates,
            "seconds": self.elapsed,
            "metrics": self.metrics.sync() if self.metrics is not None else 0,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer_state(),
            "mean": self.mean.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's; its rate is a function of the step, and the same number whatever loop it comes from."""
        state = self.optimizer.state_dict()
        rate = self.rate(self.step - self.first)
        return state | {"param_groups": [group | {"lr": rate} for group in state["param_groups"]]}

    def save(self) -> None:
        """Write a checkpoint, with all metrics up to here safely on the disk before it."""
        self.read_losses()
        if self.team.first:
            self.write_updates()
            checkpoint.save(self.folder, self.state())

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        compare_models(state["model"], self.model.state_dict(), self.folder)
        compare_recipes(self.recipe, Recipe.load(state["recipe"]), self.folder)
        self.begin(state["stage"], resumed=True)
        self.model.load_state_dict(state["model"])
        ways = [{key: group[key] for key in HOW if key in group} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, way in zip(self.optimizer.param_groups, ways, strict=True):
            group.update(way)  # that of this loop, which may not be the one the checkpoint is from
        self.mean.load_state_dict(state.get("mean", self.mean.state_dict()))  # earlier checkpoints have none
        self.results, self.rewound = state["results"], state["rewind"]
        if isinstance(self.pruner, MaskHolder) and state["rewind"]:
            self.pruner.snapshot = state["rewind"]
        self.step, self.loss, self.updates = state["step"], state["loss"], state["updates"]
        self.seconds, self.written = state["seconds"], state["metrics"]
        if self.team.first:
            torch.set_rng_state(state["random"])
            if self.device.type == "cuda" and state["random_cuda"] is not None:
                torch.cuda.set_rng_state(state["random_cuda"], self.device)
        else:  # only the first rank's dropout is continued; the others draw anew
            torch.manual_seed(self.recipe.seed + self.step + self.team.rank)

    def write(self, row: dict[str, Any]) -> None:
        """Append a line to the metrics."""
        assert self.metrics is not None
        self.metrics.write(row)

    def write_updates(self) -> None:
        """The pruner's mask updates since the last time."""
        history = [] if self.pruner is None or isinstance(self.pruner, MaskHolder) else self.pruner.history
        for record in history[self.updates :]:
            self.write({"kind": "update", "stage": self.stage.name, **record, "step": self.first + record["step"]})
        self.updates = len(history)

    def close(self) -> None:
        self.opened.close()

    # ---- training

    def train(self, stop: Callable[[], bool]) -> None:
        """All stages to their end, from where the run is."""
        while True:
            self.train_stage(stop)
            self.end_stage()
            if len(self.results) == len(self.stages):
                return
            with SETUP:
                self.begin(self.index + 1)

    def train_stage(self, stop: Callable[[], bool]) -> None:
        """Train to the last step of the stage; stopped before it, leave a checkpoint and raise `Interrupted`."""
        interval = self.loop.interval
        while self.step < self.end:
            epoch, start = divmod(self.step, self.per_epoch)
            for _ in self.loop.epoch(epoch, start):
                self.step += 1
                self.lap_steps += 1
                last = self.step % self.per_epoch == 0
                loss = self.read_losses() if last or (interval and self.step % interval == 0) else None
                if last:
                    self.end_lap()
                    self.average()
                if self.progress is not None:
                    self.progress.step(loss)
                if last and self.step < self.end:
                    self.end_epoch()
                stopped = self.step < self.total and self.agree(stop())
                if stopped or self.due():
                    self.save()
                if stopped:
                    raise Interrupted(self.folder, self.step, self.total)

    def due(self) -> bool:
        """Whether a checkpoint is to be written after this step; a stage's last step always has one."""
        every, steps = self.options.checkpoint_every * self.per_epoch, self.options.checkpoint_steps
        return self.step == self.end or (every > 0 and self.step % every == 0) or (steps > 0 and self.step % steps == 0)

    def read_losses(self) -> float | None:
        """Take the losses since the last reading off the device; the last one, or an error if one is not finite."""
        taken = self.loop.losses()
        if taken is None:
            return None
        losses = self.team.mean(taken).tolist()
        first = self.step - len(losses) + 1
        for step, loss in enumerate(losses, first):
            if not math.isfinite(loss):
                raise PomonaError(
                    f"the loss is {loss} at step {step} of {self.total}: lower optimizer.lr "
                    f"({self.recipe.optimizer.lr:g}), or add rate.warmup or train.clip, and start anew."
                )
            self.loss += loss
        return float(losses[-1])

    def average(self) -> None:
        """Take the weights into their mean, at the end of each of the stage's last epochs: of one at least."""
        epochs = max(1, round(self.options.average * self.stage.epochs))
        if self.options.average and self.end - self.step < epochs * self.per_epoch:
            self.mean.add()

    def install(self) -> None:
        """Give the model its mean, sparse as it was, and batch-norm statistics that belong to it."""
        self.mean.install()
        if self.pruner is not None:
            self.pruner.apply(self.model)
        if batchnorms(self.model) and self.options.reestimate:
            self.model.load_state_dict(self.refreshed().state_dict())

    def refreshed(self) -> nn.Module:
        """A copy of the model with batch-norm statistics from training batches."""
        batches = self.training().epoch(max(self.step - 1, 0) // self.per_epoch)
        return reestimate_batchnorm(self.model, batches, self.options.reestimate, self.options.precision)

    def agree(self, stop: bool) -> bool:
        """Whether any rank was asked to stop; asked of all of them at the steps where losses are read."""
        if self.team.world == 1:
            return stop
        return self.step % self.loop.interval == 0 and self.team.any(stop, self.device)

    # ---- measuring

    def end_epoch(self) -> dict[str, Any]:
        """Evaluate where it is due, and write the epoch's line."""
        epoch = self.step // self.per_epoch
        row = {
            "kind": "epoch",
            "stage": self.stage.name,
            "epoch": epoch,
            "step": self.step,
            "loss": self.loss / self.per_epoch,
            "lr": self.rate(self.step - self.first - 1),
            "sparsity": 0.0 if self.pruner is None else self.pruner.sparsity(),
        }
        if epoch % self.options.eval_every == 0 or self.step == self.end:
            with SETUP:
                row |= self.evaluate()
        row |= {"seconds": self.elapsed, "images_per_second": self.pace}
        if self.team.first:
            self.write_updates()
            self.write(row)
        if self.progress is not None:
            self.progress.epoch(row)
        self.loss, self.lap_steps, self.lap = 0.0, 0, time.perf_counter()
        return row

    def end_lap(self) -> None:
        """Note the pace of the epoch's training, before anything is measured or written."""
        rows = min(len(self.batches.split), self.per_epoch * self.options.batch_size) / self.per_epoch
        self.pace = rows * self.lap_steps / max(time.perf_counter() - self.lap, 1e-9)

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy (perplexity of a text) on test, and on valid where there is one.

        Soon after a mask change the batch-norm statistics are stale: the accuracy with fresh ones, of
        a copy, is then given beside it.
        """
        scores = self.score(self.model, "test")
        if self.data.valid is not None:
            scores |= {f"valid_{key}": value for key, value in self.score(self.model, "valid").items()}
        if self.stale():
            scores |= {f"{key}_reestimated": value for key, value in self.score(self.refreshed(), "test").items()}
        return scores

    def score(self, model: nn.Module, part: str) -> dict[str, float]:
        text = self.data.kind == "text"
        size = self.options.batch_size if text else self.options.eval_batch_size
        batches = self.data.batches(size, part=part, channels_last=self.channels_last)
        scores = measure(model, batches.evaluate(), self.options.precision)
        return {"test_loss" if part == "test" else "loss": scores["loss"]} | (
            {"perplexity": scores["perplexity"]} if text else {"accuracy": scores["accuracy"]}
        )

    def stale(self) -> bool:
        """Whether the mask changed so lately that running statistics cannot have followed."""
        if self.pruner is None or not self.options.reestimate or not batchnorms(self.model):
            return False
        every = getattr(self.pruner.method, "every", 0)  # None is once an epoch
        return self.step - self.first - self.pruner.last_change <= (self.per_epoch if every is None else every)

    def end_stage(self) -> None:
        """Let go of the pruner, and measure what is left."""
        self.rewound = self.rewind
        if self.pruner is not None:
            with SETUP, warnings.catch_warnings(record=True) as caught:  # which all threads share
                warnings.simplefilter("always")
                self.pruner.finish()
            for warning in caught:
                self.note(str(warning.message))
            self.masks = {name: mask.clone() for name, mask in self.pruner.masks().items()}
        last: dict[str, float] = {}
        if self.mean.count:
            with SETUP:
                last = {f"{key}_last": value for key, value in self.evaluate().items()}
                self.install()
        self.results.append(self.end_epoch() | last | self.stage.outcome(self))

    def finish(self) -> dict[str, Any]:
        """Write the model, its masks and the summary."""
        ends = [{key: value for key, value in row.items() if key not in ("kind", "lr")} for row in self.results]
        settled = {"settled": ends[0].pop("settled")} if "settled" in ends[0] else {}
        cost = models.summary(self.model, self.data.input_shape)
        summary = {
            "name": self.recipe.name,
            "fingerprint": self.recipe.fingerprint(),
            "seed": self.recipe.seed,
            "data": self.recipe.data.name,
            "model": self.recipe.model["name"],
            "method": self.recipe.method["name"],
            **{key: value for key, value in ends[-1].items() if key not in ("stage", "layers")},
            "model_sparsity": cost.sparsity,
            "params": cost.params,
            "nonzeros": cost.nonzeros,
            "macs": cost.macs,
            "macs_left": cost.macs_left,
            **settled,
            "stages": ends,
            "device": str(self.device),
            "world": self.team.world,
            **env.facts(),
        }
        if self.team.first:
            weights = {
                name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                for name, tensor in self.model.state_dict().items()
            }
            about = {"pomona": json.dumps(self.built)}
            checkpoint.replace(self.folder / MODEL, safetensors.torch.save(weights, about))
            if self.masks is not None:
                masks.save(self.folder, self.masks)
            checkpoint.replace(self.folder / SUMMARY, as_json(summary))
        return summary


_loaded: weakref.WeakValueDictionary[str, Dataset] = weakref.WeakValueDictionary()


def load_data(recipe: Recipe, data_dir: Path | str | None, device: torch.device) -> Dataset:
    """The recipe's data set, on the device; runs that are packed read one copy of it."""
    options = spec_to_dict(recipe.data.source) | {
        "root": data_dir,
        "device": device,
        "validation": recipe.data.validation,
    }
    key = repr(options)
    found = _loaded.get(key) if loops.PACKED.get() else None
    if found is None:
        found = data.load(options.pop("name"), **options)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # others will read it on streams of their own
        _loaded[key] = found
    return found


def model_options(recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    """Name and options of the model, with what follows from the data unless the recipe says otherwise."""
    info = models.info(recipe.model["name"])
    if not _fits(info, dataset.kind):
        fitting = [name for name in models.names() if _fits(models.info(name), dataset.kind)]
        raise PomonaError(
            f"model '{info.name}' does not fit data set '{dataset.name}', which holds {dataset.kind}s: "
            f"choose one of {', '.join(fitting)}."
        )
    follows = info.fit_options(dataset.input_shape, dataset.classes)
    if info.takes_tokens:
        follows["vocabulary"] = dataset.vocab
    return {**follows, **recipe.model}


def _fits(info: models.ModelInfo, kind: str) -> bool:
    """Whether a model is for a kind of data: token ids or not, a class for the whole or the next token."""
    return info.takes_tokens == (kind in ("tokens", "text")) and ("num_classes" in info.options) == (kind != "text")


@contextmanager
def own_random(device: torch.device) -> Iterator[None]:
    """A run seeds torch's generators; its caller's are given back afterwards."""
    if PACKED.get():  # whoever packs runs gives them back for all
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextmanager
def signals() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM came. A second one is not waited for: it raises KeyboardInterrupt."""
    caught: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield lambda: False
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
