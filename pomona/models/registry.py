"""The networks by name: a typed record each, whose options are read from the network's own signature."""

from __future__ import annotations

import fnmatch
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

from torch import nn

from ..errors import require, unknown_name_error
from ..registry import validate_type


@dataclass(frozen=True)
class Info:
    """What is known of a network before it is built."""

    name: str
    paper: str
    input_shape: tuple[int, ...]  # one sample: (channels, height, width), or (tokens,)
    options: Mapping[str, Any]  # every option of `build`, with its default
    make: Callable[..., nn.Module]

    @property
    def tokens(self) -> bool:
        """Whether the network reads token ids, and not images."""
        return "vocabulary" in self.options

    def fit(self, input_shape: tuple[int, ...], num_classes: int | None = None) -> dict[str, Any]:
        """The options that fit the network to samples of this shape, and to this many classes."""
        facts = {
            "in_channels": input_shape[0],
            "in_features": prod(input_shape),
            "image_size": input_shape[-1],
        }
        if num_classes is not None:
            facts["num_classes"] = num_classes
        return {key: value for key, value in facts.items() if key in self.options}


_records: dict[str, Info] = {}


def register(
    name: str,
    paper: str,
    input_shape: tuple[int, ...],
    network: type[nn.Module],
    *shape: Any,
    **defaults: Any,
) -> None:
    """Enter `network(*shape, **options)` under a name.

    The positional arguments make the network what its name says and cannot be changed. Its
    keyword-only parameters are the options; `defaults` replaces some of their defaults.
    """
    parameters = inspect.signature(network).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | defaults
    hints = typing.get_type_hints(network.__init__)

    def make(**given: Any) -> nn.Module:
        for key, value in given.items():
            if key not in options:
                raise unknown_name_error(f"option of model '{name}'", key, options)
            check(key, value, hints[key])
        return network(*shape, **options | given)

    _records[name] = Info(name, paper, input_shape, MappingProxyType(options), make)


def check(key: str, value: Any, hint: Any) -> None:
    """Refuse a value outside the choices, of the wrong type, or no count where one is needed."""
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            raise unknown_name_error(key, value, typing.get_args(hint))
        return
    validate_type(key, value, hint)
    if hint is int:
        require(value >= 1, f"{key} must be at least 1, got {value}.")
    if hint == tuple[int, ...]:
        counts = isinstance(value, tuple | list) and all(type(v) is int and v >= 1 for v in value)
        require(counts, f"{key} takes a list of widths, such as [300, 100], got {value!r}.")


def names(pattern: str = "*") -> list[str]:
    """The networks whose name matches a shell pattern."""
    return fnmatch.filter(sorted(_records), pattern)


def info(name: str) -> Info:
    """The record of a network."""
    if name not in _records:
        raise unknown_name_error("model", name, _records)
    return _records[name]


def build(name: str, **options: Any) -> nn.Module:
    """A network with fresh weights, drawn from torch's random generator."""
    return info(name).make(**options)
