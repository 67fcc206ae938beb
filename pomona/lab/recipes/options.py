"""The option sections of a recipe that are plain dataclasses: data, train, origin, teacher and finetune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pomona.data import Source
from pomona.errors import require, unknown_name_error
from pomona.registry import spec_to_dict

from .learning_rates import LearningRate, StepDecay
from .optimizers import SGD, OptimizerSpec

DENSE = "dense"  # the name of the method that prunes nothing

PRECISIONS = ("float32", "bf16")
LOOPS = ("auto", "eager", "captured", "compiled")
NONFINITE = ("stop", "skip")
ORIGIN_WEIGHTS = ("final", "matching", "new")


@dataclass(frozen=True)
class DataOptions:
    """The data set, its validation split and the augmentation of its training images."""

    source: Source
    validation: int | float = 0  # rows, or the share of the rows, held out of the training set
    augment: str | dict[str, Any] = "auto"  # "auto" is the data set's usual augmentation, "none" is none

    @property
    def name(self) -> str:
        """Return the registered name of the data set."""
        return self.source.name

    @property
    def training_rows(self) -> int | None:
        """Return how many rows there are to train on, or None where that is not known without the data."""
        rows = self.source.training_rows
        if rows is None:
            return None
        return rows - (round(self.validation * rows) if isinstance(self.validation, float) else self.validation)

    def to_dict(self) -> dict[str, Any]:
        """Return the options of the data set together with those that all data sets have."""
        return spec_to_dict(self.source) | {"validation": self.validation, "augment": self.augment}


@dataclass(frozen=True)
class TrainOptions:
    """The length, device and precision of a training, and when it evaluates, logs and saves."""

    epochs: int = 10
    batch_size: int = 128
    drop_last: bool = False  # leave out the last batch of an epoch if it is not full
    device: str = "auto"  # "auto" is CUDA if available
    precision: str = "float32"  # or "bf16" by autocast
    loop: str = "auto"  # "eager", "captured" as a CUDA graph, or also "compiled"; "auto" is the fastest possible
    label_smoothing: float = 0.0
    clip: float = 0.0  # the largest gradient norm; 0 does not clip
    nonfinite: str = "stop"  # at a NaN or an infinity; "skip" leaves out steps whose gradient is not finite
    eval_every: int = 1  # epochs between evaluations; the last epoch is always evaluated
    eval_batch_size: int = 1000
    reestimate: int = 32  # training batches for new batch-norm statistics; 0 never re-estimates
    average: float = 0.0  # the share of a stage's epochs, counted from its end, whose final weights are averaged
    ema: float = 0.0  # after each step, what an exponential moving average of the weights keeps of itself; 0: none
    checkpoint_every: int = 1  # epochs between checkpoints; 0 writes only the one at the end
    checkpoint_steps: int = 0  # steps between additional checkpoints within an epoch; 0 writes none
    log_every: int = 50  # steps between two readings of the loss
    track: bool = False  # record when each mask entry last changed, for `settled` in the summary

    def __post_init__(self) -> None:
        for key in ("epochs", "batch_size", "eval_every", "eval_batch_size", "log_every"):
            require(getattr(self, key) >= 1, f"train.{key} must be at least 1, got {getattr(self, key)}.")
        for key in ("clip", "reestimate", "checkpoint_every", "checkpoint_steps"):
            require(getattr(self, key) >= 0, f"train.{key} must be 0 or more, got {getattr(self, key)}.")
        require(
            0 <= self.label_smoothing < 1,
            f"train.label_smoothing must be in [0, 1), got {self.label_smoothing}.",
        )
        require(0 <= self.average <= 1, f"train.average is a share of the epochs in [0, 1], got {self.average}.")
        require(0 <= self.ema < 1, f"train.ema must be in [0, 1), such as 0.9999, got {self.ema}.")
        require(
            not (self.average and self.ema),
            f"weights are averaged in one way: give train.average ({self.average}) or train.ema ({self.ema}).",
        )
        if self.precision not in PRECISIONS:
            raise unknown_name_error("precision", self.precision, PRECISIONS)
        if self.nonfinite not in NONFINITE:
            raise unknown_name_error("train.nonfinite", self.nonfinite, NONFINITE)
        if self.loop not in LOOPS:
            raise unknown_name_error("loop", self.loop, LOOPS)
        try:
            torch.device("cpu" if self.device == "auto" else self.device)
        except RuntimeError as error:
            raise unknown_name_error("device", self.device, ("auto", "cpu", "cuda")) from error

    def count_steps(self, rows: int) -> int:
        """Return the optimizer steps of a training on so many rows."""
        full, rest = divmod(rows, self.batch_size)
        return self.epochs * (full + (rest > 0 and not self.drop_last))


@dataclass(frozen=True)
class OriginOptions:
    """The finished run that a run starts from: its weights, and for method `finetune` its masks."""

    run: str | None = None  # the folder of the finished run
    # The finished run's weights; or "matching": those with the name and shape of this model's, so that a model with
    # other classes gets a new last layer; or "new": none. What is not taken is initialized with this recipe's seed.
    weights: str = "final"
    fingerprint: str | None = None  # the fingerprint of the finished run; filled in

    def __post_init__(self) -> None:
        if self.weights not in ORIGIN_WEIGHTS:
            raise unknown_name_error("origin.weights", self.weights, ORIGIN_WEIGHTS)


@dataclass(frozen=True)
class TeacherOptions:
    """The trained network whose outputs a run learns beside the labels (Hinton et al., 2015), in all its stages."""

    run: str | None = None  # the folder of the teacher's finished run, or
    file: str | None = None  # the model.safetensors of a finished run
    fingerprint: str | None = None  # the fingerprint of the teacher's run, or a hash of the file; filled in
    weight: float = 0.9  # the share of the teacher in the loss; the rest is that of the labels
    temperature: float = 4.0  # divides the logits of both networks before their softmax

    def __post_init__(self) -> None:
        require(
            self.run is None or self.file is None,
            f"a run has one teacher: give teacher.run ('{self.run}') or teacher.file ('{self.file}').",
        )
        require(0 < self.weight <= 1, f"teacher.weight is a share of the loss in (0, 1], got {self.weight}.")
        require(self.temperature > 0, f"teacher.temperature must be above 0, got {self.temperature}.")

    @property
    def is_named(self) -> bool:
        """Return whether there is a teacher."""
        return self.run is not None or self.file is not None


@dataclass(frozen=True)
class FinetuneOptions:
    """The second stage, with fixed masks. Its optimizer and rate default to those of the first stage."""

    epochs: int = 0  # 0 leaves the stage out
    optimizer: OptimizerSpec = SGD()
    rate: LearningRate = StepDecay()

    def __post_init__(self) -> None:
        require(self.epochs >= 0, f"finetune.epochs must be 0 or more, got {self.epochs}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the options as nested plain values."""
        return {"epochs": self.epochs, "optimizer": spec_to_dict(self.optimizer), "rate": spec_to_dict(self.rate)}
