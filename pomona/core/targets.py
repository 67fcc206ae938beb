"""What is pruned: which parameters of a model are taken, which are left, and why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.swa_utils import AveragedModel

from ..errors import PomonaError, unknown_name_error

# What a parameter can be. A method leaves some of these dense (`Method.dense`); the default is DPF's.
KINDS = ("convolution", "linear", "recurrent", "attention", "embedding", "norm", "bias", "other")
DENSE = frozenset({"classifier", "embedding", "norm", "bias", "other"})

WHY = {
    "classifier": "the last linear layer",
    "first": "the first layer",
    "downsample": "a shortcut",
    "embedding": "an embedding",
    "norm": "part of a normalisation",
    "bias": "a bias or another vector",
    "other": "of a kind of layer not known here",
    "linear": "a linear layer",
    "recurrent": "a recurrent layer",
    "attention": "an attention layer",
}


WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


@dataclass(frozen=True)
class Target:
    """A parameter of the model and what it is."""

    name: str
    module: nn.Module = field(repr=False)
    leaf: str  # the parameter's name within its module
    shape: torch.Size
    tags: frozenset[str]
    rows: int = 0  # the dimension that counts outputs: 1 where a layer stores them second
    aliases: tuple[str, ...] = ()  # the other names of a tied parameter

    @property
    def outputs_first(self) -> torch.Size:
        """The shape with the outputs in front, as patterns see it."""
        rest = [size for i, size in enumerate(self.shape) if i != self.rows]
        return torch.Size([self.shape[self.rows], *rest]) if self.shape else self.shape

    @property
    def fan_in(self) -> int:
        """How many weights reach one output."""
        return self.outputs_first[1:].numel()

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter the model holds under this name now."""
        return self.module._parameters[self.leaf]  # type: ignore[return-value]


@dataclass(frozen=True)
class Choice:
    """One line of `prunable`: a parameter, whether it is taken, and why (not)."""

    target: Target
    taken: bool
    reason: str


@dataclass(frozen=True)
class Prunable:
    """What `prunable(model)` found, in the order of the model."""

    choices: tuple[Choice, ...]

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.choices)

    @property
    def targets(self) -> list[Target]:
        """The parameters that are taken."""
        return [c.target for c in self.choices if c.taken]

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
) -> Prunable:
    """List what is pruned by default, what is left, and why.

    Globs in `include` take the place of the default choice, those in `exclude` are left out of
    either; both match a parameter's name or its module's. A bias is taken only by a glob that ends
    in its own name ("*.bias").
    """
    include, exclude = globs(include), globs(exclude, "exclude")
    found = candidates(unwrap(model))
    for glob in (*include, *exclude):
        if not any(matches(glob, t) for t in found):
            raise unknown_name_error("layer", glob, [t.name for t in found])
    return Prunable(tuple(choose(t, include, exclude, dense) for t in found))


def choose(target: Target, include: Sequence[str], exclude: Sequence[str], dense: frozenset[str]) -> Choice:
    """Take a parameter or leave it."""
    if any(matches(glob, target) for glob in exclude):
        return Choice(target, False, "excluded")
    if include:
        taken = any(matches(glob, target) for glob in include)
        if taken and "parametrized" in target.tags:
            raise PomonaError(
                f"{target.name} is parametrized (weight_norm or the like), where a zero in it is no zero in the "
                "layer and an empty row gives NaN: remove the parametrization first, or leave the layer out."
            )
        return Choice(target, taken, "included" if taken else "not included")
    if "parametrized" in target.tags:
        return Choice(target, False, "parametrized: a zero in it is no zero in the layer")
    for tag, why in WHY.items():
        if tag in target.tags and tag in dense:
            return Choice(target, False, why)
    return Choice(target, True, next(kind for kind in KINDS if kind in target.tags))


def globs(value: str | Sequence[str], option: str = "include") -> tuple[str, ...]:
    """One glob or several, as a tuple."""
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, (list, tuple)) or not all(isinstance(glob, str) for glob in several):
        raise PomonaError(f"{option} takes a name glob or a list of them, got {value!r}.")
    return tuple(several)


def matches(glob: str, target: Target) -> bool:
    """Whether a glob means this parameter, by any of its names or its modules' names."""
    names = (target.name, *target.aliases)
    if target.tags & {"bias", "norm"}:
        return any(fnmatchcase(name, glob) and glob.endswith(name.rpartition(".")[2]) for name in names)
    return any(fnmatchcase(name, glob) or fnmatchcase(name.rpartition(".")[0], glob) for name in names)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, torch.compile, an average of weights and the like."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, WRAPPERS):
            inner = model.module
        if inner is None and type(model).__name__ == "GradSampleModule":
            inner = model._module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def candidates(model: nn.Module) -> list[Target]:
    """Every parameter once, with what it is; a tied one under its first name, with all its tags."""
    found: dict[int, Target] = {}
    first, last = ends(model)
    for prefix, module in model.named_modules(remove_duplicate=True):
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            if isinstance(parameter, UninitializedParameter):
                raise PomonaError(f"{name} has no shape yet: run one batch through the model before pruning it.")
            tags = {kind(prefix, module, leaf, parameter)}
            if leaf == "weight" and module is first:
                tags.add("first")
            if leaf == "weight" and module is last:
                tags.add("classifier")
            if {"downsample", "shortcut", "skip"} & set(prefix.split(".")):
                tags.add("downsample")
            if "parametrizations" in prefix.split(".") or normed(module, leaf):
                tags.add("parametrized")
            known = found.get(id(parameter))
            if known is not None:
                found[id(parameter)] = replace(known, tags=known.tags | tags, aliases=(*known.aliases, name))
            else:
                found[id(parameter)] = Target(
                    name, module, leaf, parameter.shape, frozenset(tags), stores_outputs_second(module)
                )
    return list(found.values())


def kind(prefix: str, module: nn.Module, leaf: str, parameter: Tensor) -> str:
    """One of KINDS."""
    if "Norm" in type(module).__name__:
        return "norm"
    if parameter.ndim < 2 or "bias" in leaf:
        return "bias"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution"
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return "recurrent"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, (nn.Linear, nn.Bilinear)) or type(module).__name__ == "Conv1D":
        return "linear"
    return "other"


def normed(module: nn.Module, leaf: str) -> bool:
    """Whether it is one half of an old-style weight_norm: w_g and w_v stand for w."""
    stem = leaf[:-2]
    return leaf[-2:] in ("_g", "_v") and {f"{stem}_g", f"{stem}_v"} <= module._parameters.keys()


def stores_outputs_second(module: nn.Module) -> int:
    """1 for layers whose weight is (in, out, …): transposed convolutions, and GPT-2's Conv1D."""
    return int(isinstance(module, nn.modules.conv._ConvTransposeNd) or type(module).__name__ == "Conv1D")


def ends(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The first layer with a weight and the last linear one: in a traced forward, else as defined."""
    order = traced(model) or list(model.modules())
    layers = [m for m in order if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase))]
    linear = [m for m in layers if isinstance(m, nn.Linear)]
    return (layers[0] if layers else None), (linear[-1] if linear else None)


def traced(model: nn.Module) -> list[nn.Module] | None:
    """The leaf modules in the order a symbolic forward calls them, or None where it cannot be traced."""
    graph = trace(model)
    if graph is None:
        return None
    return [model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]


def traced_calls(model: nn.Module, through: Callable[[Any], bool]) -> list[tuple[nn.Module, nn.Module]] | None:
    """(module, module that takes its output) pairs of a symbolic forward, or None where it cannot be traced.

    Calls that `through` lets pass are looked through, as long as nobody else takes their output.
    """
    graph = trace(model)
    if graph is None:
        return None
    pairs = []
    for node in graph.nodes:
        if node.op != "call_module":
            continue
        for user in node.users:
            while len(user.users) == 1 and through(callee(model, user)):
                user = next(iter(user.users))
            if user.op == "call_module":
                pairs.append((model.get_submodule(str(node.target)), model.get_submodule(str(user.target))))
    return pairs


def callee(model: nn.Module, node: torch.fx.Node) -> Any:
    """What a node calls: a module, a function, or the name of a method."""
    return model.get_submodule(str(node.target)) if node.op == "call_module" else node.target


class Quiet(torch.fx.Tracer):
    """A tracer that leaves buffers alone."""

    proxy_buffer_attributes = True


def trace(model: nn.Module) -> torch.fx.Graph | None:
    """The model's symbolic forward, or None where it cannot be traced."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Quiet().trace(model)
    except Exception:  # tracing runs the user's forward on proxies, which may fail in any way
        return None
    finally:
        for module, state in before:  # a forward may count its calls, or keep what it saw
            vars(module).clear()
            vars(module).update(state)
