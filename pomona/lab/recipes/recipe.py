"""Recipes: all that decides a run, in one TOML file, every default visible once it is resolved.

    name = "resnet20-dpf"
    data = "cifar10"
    model = "resnet20"
    method = "dpf(sparsity=0.9)"

    [optimizer]
    lr = 0.2

    [train]
    epochs = 300

    [finetune]
    epochs = 60

A section that is a named choice may be written as a table or as `"name(option=value, …)"`. A table
`[sweep]` is for `pomona sweep` and left aside by all else.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pomona import models
from pomona.compressors import COMPRESSORS
from pomona.data import AUGMENTS, SOURCES, Source
from pomona.errors import PomonaError, require, unknown_name_error
from pomona.methods import METHODS
from pomona.registry import parse_spec, spec_to_dict, to_plain_data, validate_type

from .optimizers import OPTIMIZERS, RATES, SGD, Optimizer, Rate, Step

DENSE = "dense"  # the method that is none

# Names and places, and how a run is carried out and watched: none of it decides what is reached.
PASSIVE = {"name", "origin.run"} | {
    f"train.{key}"
    for key in (
        "device",
        "loop",
        "eval_every",
        "eval_batch_size",
        "checkpoint_every",
        "checkpoint_steps",
        "log_every",
    )
}


# Options that came later: at these values they decide nothing, and the names of earlier runs stand.
LATER = [("train.average", 0), ("method.feedback", None)]


@dataclass(frozen=True)
class DataOptions:
    """Which data set, read how, and what is done to its training images."""

    source: Source
    validation: int | float = 0  # rows, or the share of them, held out of train
    augment: str | dict[str, Any] = "auto"  # "auto" is the data set's own custom, "none" is none

    @property
    def name(self) -> str:
        return self.source.name

    def to_dict(self) -> dict[str, Any]:
        """The data set's own options beside the common ones."""
        return spec_to_dict(self.source) | {"validation": self.validation, "augment": self.augment}


@dataclass(frozen=True)
class TrainOptions:
    """How long, where and in which precision a run trains, and what it writes down when."""

    epochs: int = 10
    batch_size: int = 128
    drop_last: bool = False  # leave out the last batch of an epoch where it is not full
    device: str = "auto"  # "auto" takes CUDA where there is one
    precision: str = "float32"  # or "bf16", by autocast
    loop: str = "auto"  # "eager", "captured" in a CUDA graph, or "compiled" too; "auto" is the quickest that fits
    label_smoothing: float = 0.0
    clip: float = 0.0  # the largest gradient norm; 0 does not clip
    eval_every: int = 1  # epochs between evaluations; the last epoch always has one
    eval_batch_size: int = 1000
    reestimate: int = 32  # training batches for fresh batch-norm statistics; 0 never re-estimates
    average: float = 0.0  # the share of a stage's epochs, its last, over whose ends the weights are averaged
    checkpoint_every: int = 1  # epochs between checkpoints; 0 leaves only the one at the end
    checkpoint_steps: int = 0  # steps between further checkpoints within an epoch; 0 writes none
    log_every: int = 50  # steps between two looks at the loss
    track: bool = False  # remember when each mask entry last changed, for the summary's `settled`

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
        if self.precision not in ("float32", "bf16"):
            raise unknown_name_error("precision", self.precision, ("float32", "bf16"))
        if self.loop not in ("auto", "eager", "captured", "compiled"):
            raise unknown_name_error("loop", self.loop, ("auto", "eager", "captured", "compiled"))
        try:
            torch.device("cpu" if self.device == "auto" else self.device)
        except RuntimeError as error:
            raise unknown_name_error("device", self.device, ("auto", "cpu", "cuda")) from error


@dataclass(frozen=True)
class OriginOptions:
    """A finished run to begin with: its weights, and for `finetune` its masks."""

    run: str | None = None  # its folder
    weights: str = "final"  # as that run left them, or "new": drawn by this recipe's seed
    fingerprint: str | None = None  # of that run's settings; filled in

    def __post_init__(self) -> None:
        if self.weights not in ("final", "new"):
            raise unknown_name_error("origin.weights", self.weights, ("final", "new"))


@dataclass(frozen=True)
class FinetuneOptions:
    """A second stage with the masks fixed. What is not said of its optimizer and rate is as in the first."""

    epochs: int = 0  # none
    optimizer: Optimizer = SGD()
    rate: Rate = Step()

    def __post_init__(self) -> None:
        require(self.epochs >= 0, f"finetune.epochs must be 0 or more, got {self.epochs}.")

    def to_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "optimizer": spec_to_dict(self.optimizer), "rate": spec_to_dict(self.rate)}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run's settings, checked and with every default filled in."""

    name: str = "run"
    seed: int = 0
    data: DataOptions
    model: dict[str, Any]
    origin: OriginOptions = OriginOptions()
    method: dict[str, Any] = field(default_factory=lambda: {"name": DENSE})
    optimizer: Optimizer = SGD()
    rate: Rate = Step()
    train: TrainOptions = TrainOptions()
    finetune: FinetuneOptions = FinetuneOptions()

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
        """A recipe from a TOML file or a mapping; `overrides` are "dotted.key=value".

        The value of an override is a TOML literal, or else a bare string. A file without a name is
        called after itself.
        """
        given = read(source, overrides)
        given.pop("sweep", None)
        require(
            "part" not in given,
            "this is a table of runs, no recipe: `pomona sweep` trains it, `pomona table` shows it.",
        )
        _check_keys(given)
        for section in ("data", "model"):
            require(section in given, f'a recipe needs a {section}: {section} = "…".')
        second = given.pop("finetune", {})
        first = cls(**{key: _MAKE[key](value) for key, value in given.items()})
        method = first.method["name"]
        require(
            not first.train.average or method == DENSE or METHODS[method].weights != "score",
            f"train.average is a mean of trained weights, and {method} chooses among random ones: leave it out.",
        )
        return dataclasses.replace(first, finetune=_make_finetune(second, first))

    def to_dict(self) -> dict[str, Any]:
        """The recipe as nested plain values, every default included."""
        return {
            "name": self.name,
            "seed": self.seed,
            "data": self.data.to_dict(),
            "model": self.model,
            "origin": dataclasses.asdict(self.origin),
            "method": self.method,
            "optimizer": spec_to_dict(self.optimizer),
            "rate": spec_to_dict(self.rate),
            "train": dataclasses.asdict(self.train),
            "finetune": self.finetune.to_dict(),
        }

    def to_toml(self) -> str:
        """The recipe as TOML; an option that is not set stands there as a comment."""
        return "\n".join(_lines(self.to_dict())) + "\n"

    def fingerprint(self) -> str:
        """A short hash of the settings."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self._settings(), sort_keys=True).encode()).hexdigest()[:12]

    def differences(self, other: Recipe) -> list[str]:
        """The settings in which two recipes differ, as "key: mine, not theirs"."""
        mine, theirs = self._settings(), other._settings()
        keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        return [f"{key}: {mine.get(key)!r}, not {theirs.get(key)!r}" for key in keys]

    def _settings(self) -> dict[str, Any]:
        """Dotted key → value of all that decides the result: what is neither `PASSIVE`, `LATER` nor unused."""
        idle = [*["origin"] * (self.origin.run is None), *["finetune"] * (not self.finetune.epochs)]
        used = {section: options for section, options in self.to_dict().items() if section not in idle}
        return {k: _number(v) for k, v in _leaves(used) if k not in PASSIVE and (k, v) not in LATER}


def read(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe as it was written, with its overrides and nothing filled in."""
    if isinstance(source, Mapping):
        given = copy.deepcopy(dict(source))
    else:
        given = {"name": Path(source).stem} | _read(Path(source))
    for override in overrides:
        _apply(given, override)
    return given


def _make_method(given: Any) -> dict[str, Any]:
    """The method's recipe spelling with every option; making its record checks them."""
    spelled = _spelled(given)
    if isinstance(spelled, Mapping) and spelled.get("name") == DENSE:
        extra = [key for key in spelled if key != "name"]
        require(not extra, f"method '{DENSE}' prunes nothing and has no option '{(extra or [''])[0]}'.")
        return {"name": DENSE}
    if isinstance(spelled, Mapping) and "name" in spelled and spelled["name"] not in METHODS:
        raise unknown_name_error("method", spelled["name"], [DENSE, *METHODS])
    return spec_to_dict(METHODS.resolve(spelled))


def _make_model(given: Any) -> dict[str, Any]:
    """The model's name and options, all but those that follow from the data (classes, channels …)."""
    name, options = _named("model", given)
    info = models.info(name)
    _try_model(name, json.dumps(options, default=str))
    follows = {"vocabulary", *info.fit_options((1, 1, 1), 1)}
    defaults = {key: value for key, value in info.options.items() if key not in follows}
    return {"name": name} | {key: to_plain_data(value) for key, value in {**defaults, **options}.items()}


@functools.cache
def _try_model(name: str, options: str) -> None:
    """Refuse bad options by making the model, without its memory, once: a table has hundreds of recipes."""
    with torch.device("meta"), _Undrawn():
        models.info(name).constructor(**json.loads(options))


class _Undrawn(TorchFunctionMode):
    """Weights are not drawn: on the meta device there are none, and torch would load its compiler to see that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        init = getattr(func, "__module__", None) == "torch.nn.init"  # within one of these, the mode is off
        drawn = init or func in (torch.Tensor.normal_, torch.Tensor.uniform_)
        return next(iter([*args, *kwargs.values()])) if drawn else func(*args, **kwargs)


def _make_data(given: Any) -> DataOptions:
    """The data set's own options, and those that all data sets have."""
    name, options = _named("data", given)
    common = {f.name for f in dataclasses.fields(DataOptions)} - {"source"}
    mine = {key: options.pop(key) for key in common & options.keys()}
    if "validation" in mine:
        validate_type("data.validation", mine["validation"], int | float)
    if mine.get("augment") not in (None, "auto", "none"):
        mine["augment"] = spec_to_dict(AUGMENTS.resolve(mine["augment"]))
    known = {f.name for f in dataclasses.fields(SOURCES[name])} | common
    for key in options:
        if key not in known:
            raise unknown_name_error(f"option of data set '{name}'", key, known)
    return DataOptions(SOURCES.resolve({"name": name, **options}), **mine)


def _make_train(given: Any) -> TrainOptions:
    return TrainOptions(**_table("train", given, TrainOptions))


def _make_origin(given: Any) -> OriginOptions:
    """With the fingerprint of the run it names, which must be there unless it is given too."""
    options = _table("origin", given, OriginOptions)
    run = options.get("run")
    if run is not None and options.get("fingerprint") is None:
        try:
            options["fingerprint"] = json.loads((Path(run) / "summary.json").read_bytes())["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PomonaError(
                f"origin.run names '{run}', which is no finished run: it has no summary.json, or a damaged one."
            ) from error
    return OriginOptions(**options)


def _make_finetune(given: Any, first: Recipe) -> FinetuneOptions:
    """The second stage, in which the optimizer and the rate of the first are the defaults."""
    options = _table("finetune", given, FinetuneOptions)
    for key, default, choices in (("optimizer", first.optimizer, OPTIMIZERS), ("rate", first.rate, RATES)):
        written = _spelled(options.get(key, {}))
        unnamed = isinstance(written, Mapping) and "name" not in written
        options[key] = choices.resolve(spec_to_dict(default) | written if unnamed else written)
    made = FinetuneOptions(**options)
    compressor = first.method.get("compressor")
    require(
        not made.epochs or compressor is None or not COMPRESSORS.resolve(compressor).needed_after_training,
        "finetune would undo what method.compressor did to the weights: set finetune.epochs = 0.",
    )
    return made


def _table(section: str, given: Any, record: type) -> dict[str, Any]:
    """The options of a section that is no named choice, each known and of its type."""
    require(isinstance(given, Mapping), f"{section} is a table of options, got {given!r}.")
    hints = _hints(record)
    for key, value in given.items():
        if key not in hints:
            raise unknown_name_error(f"option of {section}", key, hints)
        validate_type(f"{section}.{key}", value, hints[key])
    return dict(given)


_hints = functools.cache(typing.get_type_hints)  # slow, and a table has hundreds of recipes


def _make_seed(given: Any) -> int:
    validate_type("seed", given, int)
    require(0 <= given < 2**63, f"seed must be in [0, 2⁶³), got {given}.")
    return int(given)


def _make_name(given: Any) -> str:
    validate_type("name", given, str)
    return str(given)


# How each section is made from what was written.
_MAKE: dict[str, Any] = {
    "name": _make_name,
    "seed": _make_seed,
    "data": _make_data,
    "model": _make_model,
    "origin": _make_origin,
    "method": _make_method,
    "optimizer": lambda given: OPTIMIZERS.resolve(_spelled(given, "sgd")),
    "rate": lambda given: RATES.resolve(_spelled(given, "step")),
    "train": _make_train,
}


def _spelled(given: Any, default: str | None = None) -> Any:
    """A named choice as a table, whether it was written as text or as a table without its name."""
    if isinstance(given, str):
        name, options = parse_spec(given)
        return {"name": name, **options}
    if isinstance(given, Mapping) and default is not None:
        return {"name": default, **given}
    return given


def _named(section: str, given: Any) -> tuple[str, dict[str, Any]]:
    spelled = _spelled(given)
    require(
        isinstance(spelled, Mapping) and isinstance(spelled.get("name"), str),
        f'{section} needs a name: {section} = "…" or {{name = "…"}}, got {given!r}.',
    )
    options = dict(spelled)
    return options.pop("name"), options


def _check_keys(given: Mapping[str, Any]) -> None:
    """Refuse keys that a recipe does not have; an option at the top is told its section."""
    require("private" not in given, "a recipe with a section 'private' is trained by `pomona private`.")
    for key in given:
        if key not in _MAKE and key != "finetune":
            records = {"optimizer": SGD, "rate": Step, "train": TrainOptions, "origin": OriginOptions}
            options = [f"{s}.{f.name}" for s, record in records.items() for f in dataclasses.fields(record)]
            raise unknown_name_error("key of the recipe", key, [*_MAKE, "finetune", *options, "method.sparsity"])


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PomonaError(f"the recipe '{path}' cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PomonaError(f"the recipe '{path}' is no valid TOML: {error}.") from error


def _apply(given: dict[str, Any], override: str) -> None:
    """Set one "dotted.key=value" in a recipe that is not yet resolved."""
    key, equals, text = override.partition("=")
    require(
        bool(equals) and all(key.strip().split(".")), f"'{override}' is not of the form key=value (train.epochs=10)."
    )
    put(given, key.strip(), literal(text.strip()))


def put(given: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a recipe that is not yet resolved."""
    *path, last = key.split(".")
    table = given
    for depth, part in enumerate(path):
        inner = _spelled(table.get(part, {}))
        if not isinstance(inner, Mapping):
            where = ".".join(path[: depth + 1])
            raise PomonaError(f"'{key}' cannot be set: {where} is {inner!r}, which has no options.")
        table[part] = dict(inner)
        table = table[part]
    table[last] = value


def literal(text: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["value"] if len(values) == 1 else text


def _lines(tables: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a TOML file with plain tables: values first, then one section a table."""
    for key, value in tables.items():
        if not isinstance(value, Mapping):
            yield f"{_key(key)} = {_value(value)}"
    for section, options in tables.items():
        if isinstance(options, Mapping):
            yield f"\n[{_key(section)}]"
            for key, value in options.items():
                yield f"# {_key(key)} is not set" if value is None else f"{_key(key)} = {_value(value)}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    """One TOML value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):  # JSON's escapes are TOML's, but for the one character it leaves bare
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return f"{{{', '.join(pairs)}}}"
    raise TypeError(f"TOML has no way to write {value!r}")


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _number(value: Any) -> Any:
    """1.0 as 1, so that both have one fingerprint; within a list (milestones) they may differ."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
