"""Cost of a model, layer by layer: parameters, non-zeros and multiply-accumulate operations (MACs)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.nn.modules import batchnorm, conv, instancenorm

from ..errors import PomonaError, require
from ..table_view import TableView
from .example_inputs import Example, ModelInputs

NORMS = (batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.GroupNorm, nn.LayerNorm)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class Layer:
    """Cost of one module that has its own parameters or performs MACs."""

    name: str
    kind: str
    shape: tuple[int, ...]  # of the first weight
    params: int  # a tensor shared by several layers is counted in the first
    nonzeros: int
    macs: int
    macs_left: int  # MACs whose weight is not zero

    @property
    def sparsity(self) -> float:
        """The fraction of the layer's parameters that are zero."""
        return 1 - self.nonzeros / self.params if self.params else 0.0


@dataclass(frozen=True)
class Summary(TableView):
    """Cost of a model for one sample."""

    layers: tuple[Layer, ...]
    elementwise: int  # operations outside MACs: 2 for each output element of a norm, 1 for each of a ReLU module

    @property
    def params(self) -> int:
        """The number of parameters, with tied parameters counted once."""
        return sum(layer.params for layer in self.layers)

    @property
    def nonzeros(self) -> int:
        """The number of parameters that are not zero (in a new model most biases are zero)."""
        return sum(layer.nonzeros for layer in self.layers)

    @property
    def macs(self) -> int:
        """The MACs of convolutions, linear and recurrent layers and attention projections with dense weights."""
        return sum(layer.macs for layer in self.layers)

    @property
    def macs_left(self) -> int:
        """The number of MACs whose weight is not zero."""
        return sum(layer.macs_left for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """The fraction of all parameters that are zero."""
        return 1 - self.nonzeros / self.params if self.params else 0.0

    def __rich__(self) -> Table:
        table = Table("layer", "kind", "weight", show_footer=True)
        table.columns[0].footer = "total"
        titles = ("params", "non-zeros", "sparsity", "MACs", "MACs left")
        for title, total in zip(titles, format_cells(self), strict=True):
            table.add_column(title, footer=total, justify="right", no_wrap=True)
        for layer in self.layers:
            table.add_row(layer.name, layer.kind, "×".join(map(str, layer.shape)), *format_cells(layer))
        return table

    def __repr__(self) -> str:
        return (
            f"<Summary of {len(self.layers)} layers: {self.nonzeros:,} of {self.params:,} parameters are not zero, "
            f"{self.macs_left:,} of {self.macs:,} MACs left>"
        )


def format_cells(of: Layer | Summary) -> tuple[str, ...]:
    """Return the numbers of a table row as text, without a sparsity for biases and norms, whose zeros are values."""
    share = "" if isinstance(of, Layer) and len(of.shape) < 2 else f"{of.sparsity:.2%}"
    return f"{of.params:,}", f"{of.nonzeros:,}", share, f"{of.macs:,}", f"{of.macs_left:,}"


def summary(model: nn.Module, input_shape: Example) -> Summary:
    """Count parameters, non-zeros and MACs with one forward pass, which does not change the model.

    `input_shape` is the shape of one sample, a batch, or a tuple or dictionary of the model's arguments. Models that
    begin with an embedding receive token ids. On the meta device nothing is computed and every weight counts as
    non-zero. Raises PomonaError for an invalid shape, and if the model does not run on samples of that shape.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model does not call the hooks of its modules
    inputs = ModelInputs.from_example(model, input_shape)
    shape = tuple(inputs.tensors[0].shape)
    require(len(shape) > 0 and shape[0] > 0, f"an example needs a batch of samples, got shape {shape}.")
    counter = CostCounter(shape[0])
    with counting_hooks(model, counter):
        try:
            inputs.call(model)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            name = type(model).__name__
            raise PomonaError(f"{name} does not run on samples of shape {shape[1:]}: {reason}") from error
    return counter.summarize(model)


@contextmanager
def counting_hooks(model: nn.Module, counter: CostCounter) -> Iterator[None]:
    """Run the model in evaluation mode without gradients, with `counter` as a forward hook of every module."""
    training = {module: module.training for module in model.modules()}
    hooks = [module.register_forward_hook(counter, with_kwargs=True) for module in training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in training.items():
            module.training = mode


@dataclass
class CostCounter:
    """Forward hook that counts MACs: every weight performs one at each position that it is applied to."""

    samples: int
    elementwise: int = 0
    macs: dict[nn.Module, list[int]] = field(default_factory=dict)  # [of all weights, of non-zero weights]
    nonzero_counts: dict[torch.Tensor, int] = field(default_factory=dict)
    dense_forms: dict[nn.Module, nn.Module] = field(default_factory=dict)  # of packed layers, which cost the same

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = (*args, *kwargs.values())
        if hasattr(module, "packed_weights"):
            module = self.dense_forms.setdefault(module, module.dense())  # type: ignore[operator]
        if isinstance(module, nn.Linear):
            self.add_macs(module, out.numel() // module.out_features, module.weight)
        elif isinstance(module, conv._ConvTransposeNd):
            self.add_macs(module, inputs[0].numel() // module.in_channels, module.weight)
        elif isinstance(module, conv._ConvNd):
            self.add_macs(module, out.numel() // module.out_channels, module.weight)
        elif isinstance(module, RECURRENT):
            steps = inputs[0].data.numel() // module.input_size  # a packed sequence has its elements in `data`
            self.add_macs(module, steps, *own_weights(module))
        elif isinstance(module, nn.MultiheadAttention):
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            self.add_attention(module, named["query"], named["key"], named["value"])
        elif isinstance(module, NORMS):
            self.elementwise += 2 * out.numel() // self.samples
        elif isinstance(module, nn.ReLU):
            self.elementwise += out.numel() // self.samples

    def add_attention(
        self, module: nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Add the MACs of the four projections; the products of queries, keys and values have no weights."""
        if module.in_proj_weight is None:
            parts = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        else:
            parts = module.in_proj_weight.chunk(3)
        for tensor, weight in zip((query, key, value), parts, strict=True):
            self.add_macs(module, tensor.numel() // tensor.shape[-1], weight)
        self.add_macs(module.out_proj, query.numel() // query.shape[-1], module.out_proj.weight)

    def add_macs(self, module: nn.Module, positions: int, *tensors: torch.Tensor) -> None:
        """Add the MACs of weights that are applied at `positions` positions of the whole batch."""
        macs = self.macs.setdefault(module, [0, 0])
        macs[0] += positions * sum(t.numel() for t in tensors) // self.samples
        macs[1] += positions * sum(map(self.count_nonzeros, tensors)) // self.samples

    def count_nonzeros(self, tensor: torch.Tensor) -> int:
        """Return the number of non-zero entries of a tensor, counted once and then cached."""
        if tensor not in self.nonzero_counts:
            self.nonzero_counts[tensor] = tensor.numel() if tensor.is_meta else int(tensor.count_nonzero())
        return self.nonzero_counts[tensor]

    def summarize(self, model: nn.Module) -> Summary:
        """Return the summary of all modules that have parameters or performed MACs, in the model's order."""
        seen: set[torch.Tensor] = set()
        layers = []
        for name, module in model.named_modules():
            counted = self.dense_forms.get(module, module)
            own = [p for p in counted.parameters(recurse=False) if p not in seen]
            seen.update(own)
            if own or counted in self.macs:
                shape = next((tuple(w.shape) for w in own_weights(counted)), ())
                params, nonzeros = sum(p.numel() for p in own), sum(map(self.count_nonzeros, own))
                macs, left = self.macs.get(counted, (0, 0))
                layers.append(Layer(name, type(module).__name__, shape, params, nonzeros, macs, left))
        return Summary(tuple(layers), self.elementwise)


def own_weights(module: nn.Module) -> list[torch.Tensor]:
    """Return the weights that belong to a module itself, without its biases."""
    return [p for name, p in module.named_parameters(recurse=False) if "weight" in name]
