"""Cost of a model, layer by layer: parameters, non-zeros and multiply-accumulate operations (MACs)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm

from ..errors import require
from ..table_view import TableView
from .example_inputs import Example, ModelInputs
from .mac_counter import MacCounter, Macs, own_weights

NORMS = (batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.GroupNorm, nn.LayerNorm)


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
    activation_macs: int = 0  # of `macs` and `macs_left`: products without a weight, as of queries and keys

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
        """The MACs of all matrix products, convolutions and recurrent layers, with dense weights."""
        return sum(layer.macs for layer in self.layers)

    @property
    def macs_left(self) -> int:
        """The number of MACs without those whose weight is zero."""
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


def summary(model: nn.Module, input_shape: Example | ModelInputs) -> Summary:
    """Count parameters, non-zeros and MACs with one forward pass, which does not change the model.

    `input_shape` is the shape of one sample, a batch, or a tuple or dictionary of the model's arguments. Models that
    begin with an embedding receive token ids. On the meta device nothing is computed and every weight counts as
    non-zero. Raises PomonaError for an invalid shape, and if the model does not run on samples of that shape.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model does not call the hooks of its modules
    inputs = ModelInputs.from_example(model, input_shape)
    shape = tuple(inputs.tensors[0].shape)
    require(len(shape) > 0 and shape[0] > 0, f"an example needs a batch of samples, got shape {shape}.")
    counter, counts = MacCounter(model), Counter[str]()
    with evaluation_mode(model), count_elementwise(model, counts), counter.observe():
        inputs.run(model)
    return Summary(tuple(list_layers(model, counter, shape[0])), counts["elementwise"] // shape[0])


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode without gradients, and put every module back into its own mode at the end."""
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def count_elementwise(model: nn.Module, counts: Counter[str]) -> Iterator[None]:
    """Add the operations outside MACs, in `counts["elementwise"]`, while the model runs."""

    def add(module: nn.Module, inputs: Any, output: Tensor) -> None:
        counts["elementwise"] += (1 if isinstance(module, nn.ReLU) else 2) * output.numel()

    hooks = [m.register_forward_hook(add) for m in model.modules() if isinstance(m, (*NORMS, nn.ReLU))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def list_layers(model: nn.Module, counter: MacCounter, samples: int) -> Iterator[Layer]:
    """Yield the cost of every module that has parameters or performed MACs, in the model's order."""
    seen: set[Tensor] = set()
    for name, module in model.named_modules():
        counted = counter.dense_forms.get(module, module)
        own = [p for p in counted.parameters(recurse=False) if p not in seen]
        seen.update(own)
        if own or counted in counter.macs:
            shape = next((tuple(w.shape) for w in own_weights(counted)), ())
            params, nonzeros = sum(p.numel() for p in own), sum(map(counter.count_nonzeros, own))
            macs = counter.macs.get(counted, Macs())
            each = (macs.all // samples, macs.left // samples, macs.activations // samples)
            yield Layer(name, type(module).__name__, shape, params, nonzeros, *each)
