"""Validation of models for private training: layers that mix examples are refused or replaced."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from ..errors import PomonaError, require
from ..models.layers import GROUP_NORM_GROUPS
from .example_batches import Batch, call_model, count_rows, map_tensors


@dataclass(frozen=True)
class Problem:
    """A layer that cannot be trained privately, the reason, and what to use instead."""

    name: str
    layer: str
    reason: str
    replacement: str

    def __str__(self) -> str:
        return f"'{self.name}' is a {self.layer}, which {self.reason}: use {self.replacement}"


def problems(model: nn.Module) -> list[Problem]:
    """Return the layers of known types that cannot be trained privately.

    `refuse_mixed_examples` finds layers of unknown types.
    """
    found = []
    for name, module in model.named_modules():
        layer = type(module).__name__
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            found.append(Problem(name, layer, "mixes the examples of a batch", "group norm or freeze it with eval()"))
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            found.append(Problem(name, layer, "rescales the rows that examples use, without noise", "max_norm=None"))
        elif isinstance(module, _InstanceNorm) and module.track_running_stats:
            found.append(
                Problem(name, layer, "keeps statistics of the examples without noise", "track_running_stats=False")
            )
    return found


def validate(model: nn.Module) -> None:
    """Raise PomonaError for a model with a layer that cannot be trained privately, or with nothing to train."""
    require(any(p.requires_grad for p in model.parameters()), f"{type(model).__name__} has no parameter to train.")
    found = problems(model)
    if found:
        others = f" ({len(found) - 1} more layers are not allowed either)" if len(found) > 1 else ""
        raise PomonaError(f"{found[0]}, or call privacy.fix(model){others}.")


def fix(model: nn.Module) -> nn.Module:
    """Replace batch norm by group norm and remove running statistics and max_norm, in place, and return the model.

    An optimizer that was made before holds the parameters of the replaced layers: make it afterwards.
    """
    if isinstance(model, _BatchNorm):
        return convert_to_group_norm(model)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if isinstance(module, _BatchNorm):
            setattr(model.get_submodule(parent), last, convert_to_group_norm(module))
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.max_norm = None
        elif isinstance(module, _InstanceNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return model


def convert_to_group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    """Return a group norm with the weights of a batch norm, in up to 16 groups (De et al., 2022).

    After a linear layer, where a channel is one number, all channels form one group.
    """
    groups = 1 if isinstance(norm, nn.BatchNorm1d) else math.gcd(GROUP_NORM_GROUPS, norm.num_features)
    converted = nn.GroupNorm(groups, norm.num_features, norm.eps, norm.affine)
    if norm.affine:
        converted = converted.to(norm.weight.device, norm.weight.dtype)
        converted.load_state_dict({"weight": norm.weight, "bias": norm.bias})
    return converted.train(norm.training)


@torch.no_grad()
def refuse_mixed_examples(model: nn.Module, inputs: Batch) -> bool:
    """Raise PomonaError if an example changes a buffer of the model or the output of another example.

    A copy of the model runs on the first example twice: beside the second example, and beside itself. Nothing is
    tested with fewer than two examples. Returns whether it was tested.
    """
    if count_rows(inputs) < 2:
        return False
    device = next(model.parameters()).device
    trial = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in trial.named_buffers()}
    beside_second, beside_itself = (map_tensors(itemgetter([0, k]), inputs) for k in (1, 0))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        first = call_model(trial, beside_second)
        changed = [name for name, buffer in trial.named_buffers() if not torch.equal(buffer, before[name])]
        require(
            not changed,
            f"the buffer '{(changed or [''])[0]}' is updated from the examples at every forward pass without noise: "
            "remove that layer, or freeze it with eval().",
        )
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], device)
        second = call_model(trial, beside_itself)
    require(
        all(
            torch.allclose(one[0], other[0], rtol=1e-3, atol=1e-4, equal_nan=True)
            for one, other in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True)
            if isinstance(one, Tensor) and one.dim() and len(one) == 2
        ),
        f"in {type(model).__name__} the output for one example depends on the others of its batch: "
        "remove the layer that mixes them.",
    )
    return True


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model and raise PomonaError if the block has changed one, as it had no noise."""
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    yield
    changed = []
    for name, (buffer, old) in before.items():
        parent, _, last = name.rpartition(".")
        owner = model.get_submodule(parent)
        is_replaced = getattr(owner, last, None) is not buffer
        if is_replaced or not bool(((buffer == old) | ((buffer != buffer) & (old != old))).all()):  # as NaN ≠ NaN
            setattr(owner, last, old)
            changed.append(name)
    require(
        not changed,
        f"the buffer '{(changed or [''])[0]}' was updated from the examples without noise: remove that layer, or "
        "freeze it with eval().",
    )
