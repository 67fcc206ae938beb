"""Running statistics of batch norms: whether they have followed the last mask change, and their re-estimation."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import require
from ..sharding import whole

NO_COUNTS: Mapping[str, int] = MappingProxyType({})
STALE_SHARE = 0.05  # statistics are stale if more of them than this is older than the last mask change


def batchnorm_layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch-norm layers that have running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def adapting_layers(model: nn.Module, counts: Mapping[str, int] = NO_COUNTS) -> list[_BatchNorm]:
    """Return the batch-norm layers with running statistics that the user has not frozen.

    A layer in evaluation mode within a model in training mode is frozen. Where all are in evaluation mode, a layer is
    frozen if it has still seen as many batches as before training: `counts`, of `count_batches`.
    """
    layers = batchnorm_layers(model)
    if model.training:
        return [norm for norm in layers if norm.training]
    now = count_batches(model) if counts else {}
    frozen = {model.get_submodule(name) for name, count in counts.items() if now.get(name) == count}
    return [norm for norm in layers if norm not in frozen]


def count_batches(model: nn.Module) -> dict[str, int]:
    """Return how many batches each batch norm with running statistics has seen, by name."""
    names = {module: name for name, module in model.named_modules()}
    counts = {names[norm]: norm.num_batches_tracked for norm in batchnorm_layers(model)}
    return {name: int(whole(count)) for name, count in counts.items() if count is not None}


def has_stale_statistics(model: nn.Module, steps: int, counts: Mapping[str, int] = NO_COUNTS) -> bool:
    """Return whether statistics from before the last `steps` steps still count in a batch norm of the model."""
    return any(old_share(norm, steps) > STALE_SHARE for norm in adapting_layers(model, counts))


def old_share(norm: _BatchNorm, steps: int) -> float:
    """Return which share of a batch norm's running statistics is older than the last `steps` steps."""
    count = int(norm.num_batches_tracked)  # type: ignore[arg-type]
    if not count:  # nothing was estimated yet
        return 0.0
    return 1 - steps / count if norm.momentum is None else (1 - norm.momentum) ** steps


def run_batch(model: nn.Module, batch: Any) -> None:
    """Run a model on the inputs of a batch, on the model's device."""
    run_inputs(model, select_inputs(batch))


def run_inputs(model: nn.Module, inputs: Any) -> Any:
    """Return the outputs of a model for inputs that are moved to its device.

    Inputs in a mapping are passed by name, without those that the model's `forward` does not take.
    """
    inputs = move_to_device(inputs, next(model.parameters()).device)
    if not isinstance(inputs, Mapping):
        return model(inputs)
    accepted = inspect.signature(model.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    return model(**{name: value for name, value in inputs.items() if takes_all or name in accepted})


def select_inputs(batch: Any) -> Any:
    """Return the inputs in a batch: the batch itself, or the first entry of a tuple or list."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def move_to_device(value: Any, device: torch.device) -> Any:
    """Return a value with all tensors in its mappings, tuples and lists on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: move_to_device(each, device) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(move_to_device(each, device) for each in value)
    return value


@contextlib.contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restore the modes of all modules and the random state at the end of a with-block."""
    modes = {module: module.training for module in model.modules()}
    gpus = [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def iterate_batches(data: Any) -> Iterator[Any]:
    """Return an iterator over the batches of a loader, or raise PomonaError where it is none."""
    require(
        isinstance(data, Iterable) and not isinstance(data, (Tensor, Mapping, str)),
        f"data is a loader or another iterable of batches, got {type(data).__name__}: put a single batch in a list.",
    )
    return iter(data)


def renew_statistics(
    model: nn.Module,
    batches: Iterable[Any] | None,
    max_batches: int | None,
    steps: int | None,
    counts: Mapping[str, int] = NO_COUNTS,
) -> None:
    """Re-estimate statistics from batches; without any, warn where a mask change `steps` ago made them stale.

    With `counts` of `count_batches`, from before training, layers that saw no batch since keep theirs.
    """
    if batches is not None:
        reestimate_statistics(model, batches, max_batches, counts=counts)
    elif steps is not None and has_stale_statistics(model, steps, counts):
        warnings.warn(
            f"the batch-norm statistics are stale, as the last mask change came {steps} steps before finish(): "
            "finish(data=loader) re-estimates them from training batches, and finish(max_batches=0) leaves them.",
            stacklevel=3,
        )


@torch.no_grad()
def reestimate_statistics(
    model: nn.Module,
    batches: Iterable[Any],
    max_batches: int | None,
    run: Callable[[nn.Module, Any], None] = run_batch,
    counts: Mapping[str, int] = NO_COUNTS,
) -> None:
    """Replace the running statistics of batch norms by their mean over at most `max_batches` batches, in place.

    Everything but the batch norms is in evaluation mode, so dropout is off. Modes, momenta and the random state are
    restored. Where anything raises, the statistics are restored too. Without batch norms no batch is read.
    """
    norms = adapting_layers(model, counts)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    statistics = [[buffer.clone() for buffer in norm.buffers(recurse=False)] for norm in norms]
    try:
        with preserve_modes(model):
            model.eval()
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # torch then takes the cumulative mean
                norm.train()
            empty = True
            for batch in itertools.islice(batches, max_batches):
                run(model, batch)
                empty = False
        require(not empty, "data has no batches to re-estimate the batch-norm statistics from: give one at least.")
    except BaseException:
        for norm, saved in zip(norms, statistics, strict=True):
            for buffer, value in zip(norm.buffers(recurse=False), saved, strict=True):
                buffer.copy_(value)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
