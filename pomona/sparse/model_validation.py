"""What `compress` refuses before it copies a model: what its report would replace, and tensors that hooks compute."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ..errors import PomonaError, require
from .compression_report import Compression
from .surgery import find_packable_layers

REPORT = "compression"  # the attribute for the report
REMEDY = "make it permanent first, by torch.nn.utils' prune.remove or remove_weight_norm"


def validate_model(model: nn.Module) -> None:
    """Raise PomonaError for a model that cannot be copied, packed and given a report."""
    require_place_for_report(model)
    refuse_computed_parameters(model)
    refuse_recorded_tensors(model)


def require_place_for_report(model: nn.Module) -> None:
    """Raise PomonaError where the model has a `compression` that is not the report of an earlier call."""
    of_class = hasattr(type(model), REPORT)
    own = getattr(type(model) if of_class else model, REPORT, None)
    is_free = not of_class and (isinstance(own, Compression) or not hasattr(model, REPORT))
    kind = type(own).__name__
    require(
        is_free,
        f"the model has a part of its own called '{REPORT}', a {kind}, where the report would be: rename it.",
    )


def refuse_computed_parameters(model: nn.Module) -> None:
    """Raise PomonaError for a packable layer with a hook that computes its weight or bias anew at each call."""
    for name, layer in find_packable_layers(model):
        own = set(layer._flat_weights_names) if isinstance(layer, nn.LSTM) else {"weight", "bias"}
        for kind in ("weight", "bias"):
            sources = [leaf for leaf, _ in layer.named_parameters() if leaf.startswith(kind) and leaf not in own]
            message = f"{name} computes its {kind} from {', '.join(sources)} at each call"
            require(not sources, f"{message}: {REMEDY}.")


def refuse_recorded_tensors(model: nn.Module) -> None:
    """Raise PomonaError for a module that holds a tensor which autograd has computed: PyTorch cannot copy it."""
    for name, module in model.named_modules():
        recorded = sorted(find_recorded_tensors(module), reverse=True)  # names that begin with "_" are last
        if recorded:
            place = f"{name}.{recorded[0]}".lstrip(".")
            raise PomonaError(f"{place} is computed with a gradient and cannot be copied: {REMEDY}, or detach it.")


def find_recorded_tensors(module: nn.Module) -> Iterator[str]:
    """Yield the attributes of a module that hold a tensor which autograd has computed, alone or in a list."""
    for attribute, value in vars(module).items():
        tensors = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(tensor, Tensor) and not tensor.is_leaf for tensor in tensors):
            yield attribute
