"""Parsers that turn each section of a recipe, as written, into checked options with every default filled in."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pomona import models
from pomona.compressors import COMPRESSORS
from pomona.data import AUGMENTS, SOURCES
from pomona.errors import PomonaError, require, unknown_name_error
from pomona.methods import METHODS
from pomona.registry import spec_to_dict, to_plain_data, validate_type
from pomona.untrusted import read_bytes, read_object

from .learning_rates import LEARNING_RATES, LearningRate, StepDecay
from .optimizers import OPTIMIZERS, SGD, OptimizerSpec
from .options import DENSE, DataOptions, FinetuneOptions, OriginOptions, TeacherOptions, TrainOptions
from .overrides import normalize_choice

MAX_NAME_BYTES = 200  # file systems take 255 bytes, and folders add a fingerprint


def parse_name(given: Any) -> str:
    """Return the name of a run, which is also the name of its folder: one part of a path, and printable."""
    validate_type("name", given, str)
    is_one_part = given not in ("", ".", "..") and not set(given) & {"/", "\\"}
    fits = is_one_part and given.isprintable() and len(given.encode(errors="replace")) <= MAX_NAME_BYTES
    require(
        fits,
        f"name must be a folder's name, printable, without slashes and of at most {MAX_NAME_BYTES} bytes, "
        f"got {given[:60]!a}.",
    )
    return str(given)


def parse_seed(given: Any) -> int:
    """Return the seed of a run, an integer that torch accepts."""
    validate_type("seed", given, int)
    require(0 <= given < 2**63, f"seed must be in [0, 2⁶³), got {given}.")
    return int(given)


def parse_data(given: Any) -> DataOptions:
    """Return the options of the data set and those that all data sets have."""
    name, options = split_name("data", given)
    common = {f.name for f in dataclasses.fields(DataOptions)} - {"source"}
    shared = {key: options.pop(key) for key in common & options.keys()}
    if "validation" in shared:
        validate_type("data.validation", shared["validation"], int | float)
    if shared.get("augment") not in (None, "auto", "none"):
        shared["augment"] = spec_to_dict(AUGMENTS.resolve(shared["augment"]))
    known = {f.name for f in dataclasses.fields(SOURCES[name])} | common
    for key in options:
        if key not in known:
            raise unknown_name_error(f"option of data set '{name}'", key, known)
    return DataOptions(SOURCES.resolve({"name": name, **options}), **shared)


def parse_model(given: Any) -> dict[str, Any]:
    """Return the name and the options of the model, without those that follow from the data (classes, channels …)."""
    name, options = split_name("model", given)
    info = models.info(name)
    validate_model(name, json.dumps(options, default=str))
    from_data = {"vocabulary", *info.fit_options((1, 1, 1), 1)}
    defaults = {key: value for key, value in info.options.items() if key not in from_data}
    return {"name": name} | {key: to_plain_data(value) for key, value in {**defaults, **options}.items()}


@functools.cache
def validate_model(name: str, options: str) -> None:
    """Raise PomonaError unless the model can be built with these options, given as JSON.

    The model is built on the meta device, which takes no memory. The result is cached because a result table has
    hundreds of recipes.
    """
    models.build_on_meta(name, **json.loads(options))


def parse_method(given: Any) -> dict[str, Any]:
    """Return the method as a mapping with every option; making its spec validates them."""
    choice = normalize_choice(given, registry=METHODS)
    if isinstance(choice, Mapping) and choice.get("name") == DENSE:
        extra = [key for key in choice if key != "name"]
        require(not extra, f"method '{DENSE}' prunes nothing and has no option '{(extra or [''])[0]}'.")
        return {"name": DENSE}
    if isinstance(choice, Mapping) and "name" in choice and choice["name"] not in METHODS:
        raise unknown_name_error("method", choice["name"], [DENSE, *METHODS])
    return spec_to_dict(METHODS.resolve(choice))


def parse_origin(given: Any) -> OriginOptions:
    """Return the origin with the fingerprint of its run, which must be finished unless a fingerprint is given."""
    options = parse_options("origin", given, OriginOptions)
    if options.get("run") is not None and options.get("fingerprint") is None:
        options["fingerprint"] = read_fingerprint("origin.run", options["run"])
    return OriginOptions(**options)


def parse_teacher(given: Any) -> TeacherOptions:
    """Return the teacher with the fingerprint of its run, or a hash of its file, unless a fingerprint is given."""
    options = parse_options("teacher", given, TeacherOptions)
    teacher = TeacherOptions(**options)
    if teacher.fingerprint is not None or not teacher.is_named:
        return teacher
    if teacher.run is not None:
        return dataclasses.replace(teacher, fingerprint=read_fingerprint("teacher.run", teacher.run))
    return dataclasses.replace(teacher, fingerprint=hash_file("teacher.file", str(teacher.file)))


def read_fingerprint(key: str, run: str) -> str:
    """Return the fingerprint of the finished run in the folder that a setting names."""
    try:
        return str(read_object(Path(run) / "summary.json")["fingerprint"])
    except (PomonaError, KeyError) as error:
        raise PomonaError(
            f"{key} names '{run}', which is not a finished run: it has no summary.json, or a damaged one."
        ) from error


def hash_file(key: str, file: str) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of the file that a setting names."""
    try:
        return hashlib.sha256(read_bytes(file)).hexdigest()[:12]
    except OSError as error:
        raise PomonaError(f"{key} names '{file}', which cannot be read: {error.strerror}.") from error


def parse_optimizer(given: Any) -> OptimizerSpec:
    """Return the optimizer spec; without a name it is SGD."""
    return OPTIMIZERS.resolve(normalize_choice(given, "sgd", OPTIMIZERS))


def parse_rate(given: Any) -> LearningRate:
    """Return the learning-rate schedule; without a name it is a step decay."""
    return LEARNING_RATES.resolve(normalize_choice(given, "step", LEARNING_RATES))


def parse_train(given: Any) -> TrainOptions:
    """Return the training options."""
    return TrainOptions(**parse_options("train", given, TrainOptions))


def parse_finetune(
    given: Any, optimizer: OptimizerSpec, rate: LearningRate, method: Mapping[str, Any]
) -> FinetuneOptions:
    """Return the options of the second stage, whose defaults are the optimizer and rate of the first stage."""
    options = parse_options("finetune", given, FinetuneOptions)
    for key, default, registry in (("optimizer", optimizer, OPTIMIZERS), ("rate", rate, LEARNING_RATES)):
        if key not in options:
            options[key] = default
            continue
        written = normalize_choice(options[key], registry=registry)
        unnamed = isinstance(written, Mapping) and "name" not in written
        options[key] = registry.resolve(spec_to_dict(default) | written if unnamed else written)
    parsed = FinetuneOptions(**options)
    compressor = method.get("compressor")
    require(
        not parsed.epochs or compressor is None or not COMPRESSORS.resolve(compressor).needed_after_training,
        "finetune would undo what method.compressor did to the weights: set finetune.epochs = 0.",
    )
    return parsed


def parse_options(section: str, given: Any, options: type) -> dict[str, Any]:
    """Return the options of a section, after checking that each is a field of a dataclass and has its type."""
    require(isinstance(given, Mapping), f"{section} is a section of options, got {given!r}.")
    hints = type_hints(options)
    for key, value in given.items():
        if key not in hints:
            raise unknown_name_error(f"option of {section}", key, hints)
        validate_type(f"{section}.{key}", value, hints[key])
    return dict(given)


type_hints = functools.cache(typing.get_type_hints)  # it is slow, and a result table has hundreds of recipes


def split_name(section: str, given: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a named choice; raise PomonaError if it has no name."""
    choice = normalize_choice(given)
    require(
        isinstance(choice, Mapping) and isinstance(choice.get("name"), str),
        f'{section} needs a name: {section} = "…" or {{name = "…"}}, got {given!r}.',
    )
    options = dict(choice)
    return options.pop("name"), options


# The parser of each section but `LATER_SECTIONS`.
SECTION_PARSERS: dict[str, Any] = {
    "name": parse_name,
    "seed": parse_seed,
    "data": parse_data,
    "model": parse_model,
    "origin": parse_origin,
    "teacher": parse_teacher,
    "method": parse_method,
    "optimizer": parse_optimizer,
    "rate": parse_rate,
    "train": parse_train,
}
LATER_SECTIONS = ("finetune", "sweep")  # depends on the sections of the first stage; is read by `pomona sweep` only


def parse_sections(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections as written, but for `LATER_SECTIONS`, as checked options with every default filled in."""
    return {key: SECTION_PARSERS[key](value) for key, value in given.items() if key not in LATER_SECTIONS}


def validate_keys(given: Mapping[str, Any]) -> None:
    """Raise PomonaError for a key that recipes do not have; the error names the section of a misplaced option."""
    require(
        "part" not in given,
        "this file defines a table of runs, not a recipe: train it with `pomona sweep`, show it with `pomona table`.",
    )
    require("private" not in given, "a recipe with a section [private] is trained by `pomona private`.")
    for key in given:
        if key not in SECTION_PARSERS and key not in LATER_SECTIONS:
            sections = {
                "optimizer": SGD,
                "rate": StepDecay,
                "train": TrainOptions,
                "origin": OriginOptions,
                "teacher": TeacherOptions,
            }
            options = [f"{s}.{f.name}" for s, spec in sections.items() for f in dataclasses.fields(spec)]
            raise unknown_name_error(
                "key of the recipe", key, [*SECTION_PARSERS, "finetune", *options, "method.sparsity"]
            )
