"""The registry of networks: a typed description of each, whose options come from the signature of its class."""

from __future__ import annotations

import fnmatch
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import PomonaError, require, shorten, unknown_name_error
from ..registry import validate_type
from ..untrusted import describe

# More than any network has, and so little that a hostile option is refused before anything is built.
MAX_WIDTH, MAX_LAYERS = 1 << 24, 1000


@dataclass(frozen=True)
class ModelInfo:
    """Description of a network that can be built: its name, paper, input shape and options."""

    name: str
    paper: str
    input_shape: tuple[int, ...]  # one sample: (channels, height, width), or (tokens,)
    options: Mapping[str, Any]  # every option of `build`, with its default
    constructor: Callable[..., nn.Module]

    @property
    def takes_tokens(self) -> bool:
        """Whether the inputs of the network are token ids rather than images."""
        return "vocabulary" in self.options

    def fit_options(self, input_shape: tuple[int, ...], num_classes: int | None = None) -> dict[str, Any]:
        """Return the options that fit the network to samples of this shape and to this number of classes."""
        candidates = {
            "in_channels": input_shape[0],
            "in_features": prod(input_shape),
            "image_size": input_shape[-1],
        }
        if num_classes is not None:
            candidates["num_classes"] = num_classes
        return {key: value for key, value in candidates.items() if key in self.options}


_models: dict[str, ModelInfo] = {}


def register(
    name: str,
    paper: str,
    input_shape: tuple[int, ...],
    network: type[nn.Module],
    *shape: Any,
    **defaults: Any,
) -> None:
    """Register `network(*shape, **options)` under a name.

    The positional arguments `shape` belong to the name and cannot be changed by a user. The keyword-only parameters
    of the class are the options; `defaults` replaces some of their defaults.
    """
    parameters = inspect.signature(network).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | defaults
    hints = typing.get_type_hints(network.__init__)

    def construct(**given: Any) -> nn.Module:
        for key, value in given.items():
            if key not in options:
                raise unknown_name_error(f"option of model '{name}'", key, options)
            validate_option(key, value, hints[key])
        try:
            return network(*shape, **options | given)
        except PomonaError:
            raise
        except Exception as error:
            raise PomonaError(f"model '{name}' cannot be built with {shorten(given)}: {describe(error)}.") from error

    _models[name] = ModelInfo(name, paper, input_shape, MappingProxyType(options), construct)


def validate_option(key: str, value: Any, hint: Any) -> None:
    """Raise PomonaError for a value of the wrong type, outside the choices, or below 1 where a count is needed."""
    if typing.get_origin(hint) is typing.Literal:
        if not isinstance(value, str) or value not in typing.get_args(hint):
            raise unknown_name_error(key, value, typing.get_args(hint))
        return
    validate_type(key, value, hint)
    if hint is int:
        limit = MAX_LAYERS if key == "layers" else MAX_WIDTH
        require(value >= 1, f"{key} must be at least 1, got {value}.")
        require(value <= limit, f"{key} must be at most {limit:,}, got {shorten(value)}.")
    if hint is float:
        require(math.isfinite(value), f"{key} must be a finite number, got {value}.")
    if hint == tuple[int, ...]:
        counts = isinstance(value, tuple | list) and all(type(v) is int and v >= 1 for v in value)
        require(counts, f"{key} takes a list of widths, such as [300, 100], got {shorten(value)!r}.")
        require(len(value) <= MAX_LAYERS, f"{key} takes at most {MAX_LAYERS:,} widths, got {len(value):,}.")
        widest = max(value, default=1)
        require(widest <= MAX_WIDTH, f"{key} takes widths up to {MAX_WIDTH:,}, got {shorten(widest)}.")


def names(pattern: str = "*") -> list[str]:
    """Return the names of networks that match a shell pattern, sorted."""
    return fnmatch.filter(sorted(_models), pattern)


def info(name: str) -> ModelInfo:
    """Return the description of a network; raise PomonaError for an unknown name."""
    if not isinstance(name, str) or name not in _models:
        raise unknown_name_error("model", name, _models)
    return _models[name]


def build(name: str, **options: Any) -> nn.Module:
    """Build a network; its initial weights are drawn from torch's random generator."""
    return info(name).constructor(**options)


def build_on_meta(name: str, **options: Any) -> nn.Module:
    """Build a network on the meta device, which takes no memory."""
    with torch.device("meta"), _SkipInitialization():
        return build(name, **options)


def build_for_state(what: str, options: Mapping[str, Any], state: Mapping[str, Tensor]) -> nn.Module:
    """Build a network with a state; names and shapes are compared before anything of their size is made.

    `what` names the file of the state in messages.
    """
    own = {name: tensor.shape for name, tensor in build_on_meta(**options).state_dict().items()}
    for name in {**own, **state}:
        require(name in state, f"{what} has no {name}, which its network '{options['name']}' has.")
        require(name in own, f"{what} has {name}, which its network '{options['name']}' has not.")
        stored, expected = tuple(state[name].shape), tuple(own[name])
        require(stored == expected, f"{what} has {name} as {stored}, its network '{options['name']}' as {expected}.")
    model = build(**options)
    model.load_state_dict(dict(state))
    return model


class _SkipInitialization(TorchFunctionMode):
    """Skip weight initialization: meta tensors have no values, and torch would load its compiler to find that out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        in_init = getattr(func, "__module__", None) == "torch.nn.init"  # within these functions the mode is off
        initializes = in_init or func in (torch.Tensor.normal_, torch.Tensor.uniform_)
        return next(iter([*args, *kwargs.values()])) if initializes else func(*args, **kwargs)
