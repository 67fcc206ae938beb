"""Validation of models for private training: layers that mix examples are refused or replaced."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree

from ..errors import PomonaError, require
from ..models.layers import GROUP_NORM_GROUPS
from .example_batches import Batch, call_model, count_rows, map_tensors
from .model_state import ModelState, copy_model, refuse_changes, repeatable_random_numbers

HOOKS = {WeightNorm: "weight_norm", SpectralNorm: "spectral_norm in eval()"}  # and the parametrizations to use


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
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    require(bool(trained), f"{type(model).__name__} has no parameter to train.")
    other = [name for name, p in trained.items() if not p.is_floating_point()]
    require(
        not other,
        f"the parameter '{(other or [''])[0]}' has complex numbers, and the norm and noise of a private step are those "
        "of real ones: keep the real and the imaginary part as parameters, and use torch.complex of both.",
    )
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            require(
                type(hook) not in HOOKS,
                f"'{name or type(module).__name__}' has a hook of {type(hook).__name__}, which leaves a computed "
                f"weight in the model: use torch.nn.utils.parametrizations.{HOOKS.get(type(hook), '')}.",
            )
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
    """Raise PomonaError if an example changes the state of the model or the output of another example.

    The output of the first example beside the second is compared with that beside itself, and that of the first as
    second row with that beside the second. The former two come from copies of their own, so that nothing that a first
    pass sets is common to both; the third comes from a copy that has seen another batch. The random numbers are the
    same in each pass. Nothing is tested with fewer than two examples. Returns whether it was tested.
    """
    if count_rows(inputs) < 2:
        return False

    def run(trial: nn.Module, *rows: int) -> list[Tensor]:
        repeat()
        outputs = pytree.tree_leaves(call_model(trial, map_tensors(itemgetter(list(rows)), inputs)))
        return [output for output in outputs if isinstance(output, Tensor) and output.dim() and len(output) == 2]

    with repeatable_random_numbers(next(model.parameters()).device) as repeat:
        trial, other = copy_model(model), copy_model(model)
        before = ModelState(trial)
        first, itself = run(trial, 0, 1), run(other, 0, 0)
        refuse_changes(before, before.changed())
        second = run(trial, 1, 0)
    for k, found in enumerate((first, second)):
        require(
            all(
                torch.allclose(one[k], other[k], rtol=1e-3, atol=1e-4, equal_nan=True)
                for one, other in zip(found, itself, strict=True)
            ),
            f"in {type(model).__name__} the output for one example depends on the others of its batch or on earlier "
            "ones: remove the layer that mixes them.",
        )
    return True


def is_test_due(count: int) -> bool:
    """Return whether the tests of a model are repeated at a step, numbered from 1: at the powers of two."""
    return count & (count - 1) == 0
