"""What a model must not have where examples are to stay apart, and what may stand in its place."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..errors import PomonaError, require
from ..models.layers import GROUP_NORM_GROUPS


@dataclass(frozen=True)
class Problem:
    """A layer that is not allowed."""

    name: str
    layer: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"'{self.name}' is a {self.layer}, which {self.why}: use {self.instead}"


def problems(model: nn.Module) -> list[Problem]:
    """The layers that cannot be trained privately, by their kind; `probe` finds what no list knows."""
    found = []
    for name, module in model.named_modules():
        layer = type(module).__name__
        if isinstance(module, _BatchNorm):
            found.append(Problem(name, layer, "mixes the examples of a batch", "group norm"))
        elif isinstance(module, _InstanceNorm) and module.track_running_stats:
            found.append(
                Problem(name, layer, "keeps statistics of the examples without noise", "track_running_stats=False")
            )
    return found


def validate(model: nn.Module) -> None:
    """Refuse a model with such a layer, or with nothing to train."""
    require(any(p.requires_grad for p in model.parameters()), f"{type(model).__name__} has no parameter to train.")
    found = problems(model)
    if found:
        others = f" ({len(found) - 1} more layers are not allowed either)" if len(found) > 1 else ""
        raise PomonaError(f"{found[0]}, or let privacy.fix(model) change it{others}.")


def fix(model: nn.Module) -> nn.Module:
    """Put group norm in the place of batch norm, and end running statistics; the model itself is changed.

    An optimizer that was made before holds the old layers' parameters: make it afterwards.
    """
    if isinstance(model, _BatchNorm):
        return group_norm(model)
    for problem in problems(model):
        parent, _, last = problem.name.rpartition(".")
        holder, module = model.get_submodule(parent), model.get_submodule(problem.name)
        if isinstance(module, _BatchNorm):
            setattr(holder, last, group_norm(module))
        elif isinstance(module, _InstanceNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return model


def group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    """Group norm with the weights of a batch norm, in up to 16 groups (De et al., 2022).

    After a linear layer, where a channel is one number, all channels are one group.
    """
    groups = 1 if isinstance(norm, nn.BatchNorm1d) else math.gcd(GROUP_NORM_GROUPS, norm.num_features)
    made = nn.GroupNorm(groups, norm.num_features, norm.eps, norm.affine)
    if norm.affine:
        made = made.to(norm.weight.device, norm.weight.dtype)
        made.load_state_dict({"weight": norm.weight, "bias": norm.bias})
    return made.train(norm.training)


@torch.no_grad()
def probe(model: nn.Module, inputs: Tensor) -> None:
    """Refuse a model in which examples meet, by trying: in its buffers, or in each other's outputs."""
    if len(inputs) < 2:
        return
    trial = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in trial.named_buffers()}
    one, other = inputs[[0, 1]], inputs[[0, 0]]
    with torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []):
        state = torch.get_rng_state(), torch.cuda.get_rng_state(inputs.device) if inputs.is_cuda else None
        first = trial(one)
        changed = [name for name, buffer in trial.named_buffers() if not torch.equal(buffer, before[name])]
        require(
            not changed,
            f"the buffer '{(changed or [''])[0]}' takes something from the examples at every forward pass, without "
            "noise: take that layer out, or freeze it with eval().",
        )
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], inputs.device)
        second = trial(other)
    require(
        torch.allclose(first[0], second[0], rtol=1e-3, atol=1e-4, equal_nan=True),
        f"in {type(model).__name__} what comes out for one example depends on the others of its batch: "
        "take out the layer that mixes them.",
    )
