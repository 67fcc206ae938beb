"""Targets: which parameters of a model are pruned, which are left dense, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn.parameter import UninitializedParameter
from torch.optim.swa_utils import AveragedModel

from ..errors import PomonaError, unknown_name_error
from ..patterns import PATTERNS, Pattern
from ..table_view import TableView
from .layer_kind import layer_kind, stores_outputs_second
from .output_layers import find_output_weights, find_uncalled_weights
from .tracing import called_modules, trace_both_modes

# What a parameter can be. A method leaves some of these dense (`Method.left_dense`); the default is that of DPF.
KINDS = ("convolution", "linear", "recurrent", "attention", "embedding", "norm", "bias", "other")
DENSE = frozenset({"classifier", "embedding", "norm", "bias", "other", "frozen"})

REASONS = {
    "uncalled": "not called by the traced forward, so that its outputs may be the network's",
    "classifier": "a layer whose outputs are the network's",
    "first": "the first layer",
    "downsample": "a shortcut",
    "embedding": "an embedding",
    "norm": "part of a normalisation",
    "bias": "a bias or another vector",
    "other": "part of a layer of unknown kind",
    "linear": "a linear layer",
    "recurrent": "a recurrent layer",
    "attention": "an attention layer",
    "frozen": "frozen: training could not make up for what is pruned",
}


WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


@dataclass(frozen=True)
class Target:
    """A parameter of the model, its shape and its tags."""

    name: str
    module: nn.Module = field(repr=False)
    leaf: str  # the parameter's name within its module
    shape: torch.Size
    tags: frozenset[str]
    output_dim: int = 0  # the dimension that counts outputs: 1 where a layer stores them second
    output_groups: int = 1  # how many outputs share an entry of that dimension: the groups of a transposed convolution
    aliases: tuple[str, ...] = ()  # the other names of a tied parameter

    @property
    def outputs_first(self) -> torch.Size:
        """The shape with the output dimension in front, as patterns see it."""
        rest = [size for i, size in enumerate(self.shape) if i != self.output_dim]
        return torch.Size([self.shape[self.output_dim], *rest]) if self.shape else self.shape

    @property
    def outputs(self) -> int:
        """The number of outputs of the layer."""
        return self.shape[self.output_dim] * self.output_groups

    @property
    def fan_in(self) -> int:
        """The number of weights of one output."""
        return self.outputs_first[1:].numel()

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the model holds under this name now."""
        return self.module._parameters[self.leaf]  # type: ignore[return-value]


@dataclass(frozen=True)
class Choice:
    """One line of `prunable`: a parameter, whether it is pruned (`taken`), and the reason."""

    target: Target
    taken: bool
    reason: str
    misfit: bool = False  # whether it is left dense only because the pattern does not fit it


@dataclass(frozen=True)
class Prunable(TableView):
    """The result of `prunable(model)`: one choice for each parameter, in the order of the model."""

    choices: tuple[Choice, ...]

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.choices)

    @property
    def targets(self) -> list[Target]:
        """The parameters that are pruned."""
        return [c.target for c in self.choices if c.taken]

    @property
    def misfits(self) -> list[Choice]:
        """The choices of parameters that are left dense because the pattern does not fit them."""
        return [c for c in self.choices if c.misfit]

    @property
    def uncalled(self) -> list[Choice]:
        """The choices of layers that are left dense because no traced forward calls them."""
        return [c for c in self.choices if not c.taken and c.reason == REASONS["uncalled"]]

    def __rich__(self) -> Table:
        table = Table("pruned", "parameter", "shape", "reason")
        for c in self.choices:
            table.add_row("✂" if c.taken else "", c.target.name, "×".join(map(str, c.target.shape)), c.reason)
        return table

    def __repr__(self) -> str:
        return f"<Prunable: {len(self.targets)} of {len(self.choices)} parameters are pruned>"

    def __str__(self) -> str:
        width = max((len(c.target.name) for c in self.choices), default=0)
        return "\n".join(
            f"{'✂' if c.taken else ' '} {c.target.name:<{width}}  {'×'.join(map(str, c.target.shape)):<16} {c.reason}"
            for c in self.choices
        )


def prunable(
    model: nn.Module,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    dense: frozenset[str] = DENSE,
    pattern: Pattern | str = "unstructured",
) -> Prunable:
    """List the parameters of a model that are pruned by default, those that are left dense, and why.

    Globs in `include` replace the default choice, and globs in `exclude` are left out of either; both match a
    parameter's name or its module's. A bias is included only by a glob that ends in its own name ("*.bias"). Layers
    whose outputs are the network's and frozen parameters are left dense unless they are included. A parameter that the
    `pattern` does not fit is left dense too, and raises PomonaError where it is included.
    """
    include, exclude, pattern = globs(include), globs(exclude, "exclude"), PATTERNS.resolve(pattern)
    found = find_parameters(unwrap(model))
    for glob in (*include, *exclude):
        if not any(matches(glob, t) for t in found):
            raise unknown_name_error("layer", glob, [t.name for t in found])
    choices = [choose(t, include, exclude, dense) for t in found]
    return Prunable(tuple(leave_misfit_out(c, pattern, bool(include)) if c.taken else c for c in choices))


def choose(target: Target, include: Sequence[str], exclude: Sequence[str], dense: frozenset[str]) -> Choice:
    """Decide whether a parameter is pruned."""
    if any(matches(glob, target) for glob in exclude):
        return Choice(target, False, "excluded")
    if include:
        taken = any(matches(glob, target) for glob in include)
        if taken and "parametrized" in target.tags:
            raise PomonaError(
                f"{target.name} is parametrized (weight_norm or the like): a zero in it is no zero in the layer, and "
                "an empty row gives NaN; remove the parametrization first, or leave the layer out."
            )
        return Choice(target, taken, "included" if taken else "not included")
    if "parametrized" in target.tags:
        return Choice(target, False, "parametrized: a zero in it is no zero in the layer")
    if "classifier" in dense:
        dense |= {"uncalled"}
    for tag, why in REASONS.items():
        if tag in target.tags and tag in dense:
            return Choice(target, False, why)
    return Choice(target, True, next(kind for kind in KINDS if kind in target.tags))


def leave_misfit_out(choice: Choice, pattern: Pattern, included: bool) -> Choice:
    """Return the choice of a taken parameter, which is left dense where the pattern does not fit it."""
    try:
        pattern.validate_shape(choice.target.name, choice.target.outputs_first)
    except PomonaError as error:
        if included:
            raise
        return Choice(choice.target, False, str(error), misfit=True)
    return choice


def globs(value: str | Sequence[str], option: str = "include") -> tuple[str, ...]:
    """Return one glob or several as a tuple."""
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, (list, tuple)) or not all(isinstance(glob, str) for glob in several):
        raise PomonaError(f"{option} takes a name glob or a list of them, got {value!r}.")
    return tuple(several)


def matches(glob: str, target: Target) -> bool:
    """Return whether a glob matches a parameter by any of its names or its modules' names."""
    names = (target.name, *target.aliases)
    if target.tags & {"bias", "norm"}:
        return any(fnmatchcase(name, glob) and glob.endswith(name.rpartition(".")[2]) for name in names)
    return any(fnmatchcase(name, glob) or fnmatchcase(name.rpartition(".")[0], glob) for name in names)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DistributedDataParallel, torch.compile, AveragedModel and the like."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, WRAPPERS):
            inner = model.module
        if inner is None and type(model).__name__ == "GradSampleModule":
            inner = model._module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def find_parameters(model: nn.Module) -> list[Target]:
    """Return every parameter once; a tied parameter is listed under its first name, with all its tags."""
    found: dict[int, Target] = {}
    graphs = trace_both_modes(model)
    first = find_first_layer(model, graphs[0] if graphs else None)
    output_weights, uncalled_weights = find_output_weights(model, graphs), find_uncalled_weights(model, graphs)
    for prefix, module in model.named_modules(remove_duplicate=True):
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            if isinstance(parameter, UninitializedParameter):
                raise PomonaError(f"{name} has no shape yet: run one batch through the model before pruning it.")
            tags = {parameter_kind(module, leaf, parameter)}
            if leaf == "weight" and module is first:
                tags.add("first")
            if id(parameter) in output_weights:
                tags.add("classifier")
            if id(parameter) in uncalled_weights:
                tags |= {"classifier", "uncalled"}
            if not parameter.requires_grad:
                tags.add("frozen")
            if {"downsample", "shortcut", "skip"} & set(prefix.split(".")):
                tags.add("downsample")
            if "parametrizations" in prefix.split(".") or is_weight_normed(module, leaf):
                tags.add("parametrized")
            known = found.get(id(parameter))
            if known is not None:
                found[id(parameter)] = replace(known, tags=known.tags | tags, aliases=(*known.aliases, name))
            else:
                layout = (output_dim(module), output_groups(module)) if parameter.ndim > 1 else (0, 1)
                found[id(parameter)] = Target(name, module, leaf, parameter.shape, frozenset(tags), *layout)
    return list(found.values())


def parameter_kind(module: nn.Module, leaf: str, parameter: Tensor) -> str:
    """Return which of KINDS a parameter is."""
    kind = layer_kind(module)
    return "bias" if kind != "norm" and (parameter.ndim < 2 or "bias" in leaf) else kind


def is_weight_normed(module: nn.Module, leaf: str) -> bool:
    """Return whether a parameter is one half of an old-style weight_norm, where w_g and w_v stand for w."""
    stem = leaf[:-2]
    return leaf[-2:] in ("_g", "_v") and {f"{stem}_g", f"{stem}_v"} <= module._parameters.keys()


def output_dim(module: nn.Module) -> int:
    """Return the dimension of a layer's weight that counts outputs: 1 where it is (in, out, …), else 0."""
    return int(stores_outputs_second(module))


def output_groups(module: nn.Module) -> int:
    """Return the number of groups that share the output dimension of a layer's weight.

    A transposed convolution stores (in, out / groups, …): entry j of dimension 1 is output j of every group.
    """
    return module.groups if isinstance(module, nn.modules.conv._ConvTransposeNd) else 1


def find_first_layer(model: nn.Module, graph: Graph | None) -> nn.Module | None:
    """Return the first layer with a weight, in the order of a traced forward, else in that of definition."""
    order = (called_modules(model, graph) if graph is not None else []) or list(model.modules())
    return next((m for m in order if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase))), None)
