"""Gradients of each example from one forward and one backward pass over all examples, recorded layer by layer.

`RecordedLayers` replaces the calls of convolutions, linear layers, norms and embeddings by autograd functions that
compute, in their backward pass, the weight gradient of each example and give it to a recorder instead of autograd. All
other operations run as they are. A weight may be a parameter, or computed from parameters alone, as a standardized
weight is: its gradients are then pulled back to those of the parameters, example by example.

If a parameter is used by any other operation, autograd finds a gradient for it, and `UnrecordedUse` is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from . import layer_gradients as layers
from .batchable_ops import extract_patches
from .example_batches import Batch, call_model, count_rows, map_tensors
from .gradient_recorder import Recorder, UnrecordedUse
from .outer_products import Gradients, MixedGradients, OuterProducts, as_tensor
from .product_sums import ProductShape

Loss = Callable[[Any, Any], Tensor]


class RecordedLayers(TorchFunctionMode):
    """A mode in which layers give the weight gradients of each example to a recorder, and compute in its dtype."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = CALLS.get(func)
        return call(self.recorder, *args, **(kwargs or {})) if call else func(*args, **(kwargs or {}))


# ---- the calls that are recorded; their arguments are those of torch.nn.functional


def call_conv2d(
    recorder: Recorder,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Return conv2d of a batch, and record the gradients of its weight and bias."""
    if isinstance(padding, str):
        raise UnrecordedUse(f'padding="{padding}"')
    geometry = layers.Geometry.of(weight, stride, padding, dilation, groups)
    inputs = cast(inputs, recorder.dtype)
    return RecordedConv2d.apply(inputs, recorder.anchor, (weight, bias), geometry, recorder)


def call_linear(recorder: Recorder, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a linear map of a batch, and record the gradients of its weight and bias."""
    inputs = cast(inputs, recorder.dtype)
    return RecordedLinear.apply(inputs, recorder.anchor, (weight, bias), recorder)


def call_group_norm(
    recorder: Recorder,
    inputs: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return the group norm of a batch, and record the gradients of its weight and bias."""
    return RecordedGroupNorm.apply(inputs, recorder.anchor, num_groups, (weight, bias), eps, recorder)


def call_layer_norm(
    recorder: Recorder,
    inputs: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return the layer norm of a batch, and record the gradients of its weight and bias."""
    normalized = F.layer_norm(inputs if recorder.dtype is None else inputs.float(), normalized_shape, None, None, eps)
    return RecordedScale.apply(normalized, recorder.anchor, (weight, bias), recorder).to(inputs.dtype)


def call_embedding(
    recorder: Recorder,
    inputs: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return the vectors of a batch of indices, and record the gradients of the vectors."""
    if scale_grad_by_freq or max_norm is not None:  # `sparse` changes nothing: recorded gradients are dense
        raise UnrecordedUse("an option of embedding")
    found = RecordedEmbedding.apply(inputs, recorder.anchor, (weight,), padding_idx, recorder)
    return found if recorder.dtype is None else found.to(recorder.dtype)


CALLS: dict[Any, Callable[..., Tensor]] = {
    F.conv2d: call_conv2d,
    F.linear: call_linear,
    F.group_norm: call_group_norm,
    F.layer_norm: call_layer_norm,
    F.embedding: call_embedding,
}


def cast(inputs: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return inputs in the dtype of the computation; images on a GPU have their channels last in 16 bits."""
    if dtype is None:
        return inputs
    if inputs.dim() == 4 and inputs.is_cuda:
        return inputs.to(dtype, memory_format=torch.channels_last)
    return inputs.to(dtype)


# ---- autograd functions. The anchor is an input that requires a gradient, so that their outputs do. The weights are in
# a tuple, where autograd does not see them.

Weights = tuple[Tensor | None, ...]


class RecordedConv2d(torch.autograd.Function):
    """conv2d."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, anchor: Tensor, weights: Weights, geometry: layers.Geometry, recorder: Recorder
    ) -> Tensor:
        values, bias = convert(weights, inputs.dtype)
        values = cast(values, recorder.dtype)
        ctx.save_for_backward(inputs, values)
        ctx.rest = weights, geometry, recorder
        return torch.conv2d(inputs, values, bias, *geometry.options)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs, values), ((weight, bias), geometry, recorder) = ctx.saved_tensors, ctx.rest
        each = recorder.split_rows(gradient)
        for_inputs = None
        if ctx.needs_input_grad[0]:
            for_inputs = layers.conv2d_input_gradient(inputs, values, gradient, geometry)
        positions = each.shape[1] * each[0, 0, 0].numel()
        shape = ProductShape(positions, gradient.shape[1], inputs.shape[1] * geometry.kernel[0] * geometry.kernel[1])
        if geometry.groups == 1 and recorder.prefers_products(weight, shape, gradient, is_conv=True):
            recorder.add(weight, lambda: unfold(inputs, gradient, geometry, recorder.rows))
        else:
            recorder.add(weight, lambda: layers.conv2d_weight_gradient(inputs, gradient, geometry, recorder.rows))
        recorder.add(bias, lambda: each.sum((1, 3, 4)))
        return for_inputs, None, None, None, None


class RecordedLinear(torch.autograd.Function):
    """A linear map."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, anchor: Tensor, weights: Weights, recorder: Recorder) -> Tensor:
        weight, bias = convert(weights, inputs.dtype)
        ctx.save_for_backward(inputs, weight)
        ctx.rest = weights, recorder
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs, values), ((weight, bias), recorder) = ctx.saved_tensors, ctx.rest
        ours, theirs = (recorder.split_rows(part).flatten(1, -2) for part in (gradient, inputs))
        if recorder.prefers_products(weight, ProductShape.of(OuterProducts(ours, theirs)), ours):
            recorder.add(weight, lambda: OuterProducts(ours, theirs))
        else:
            recorder.add(weight, lambda: ours.mT @ theirs)
        recorder.add(bias, lambda: ours.sum(1))
        return (gradient @ values if ctx.needs_input_grad[0] else None), None, None, None


class RecordedGroupNorm(torch.autograd.Function):
    """Group norm."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, anchor: Tensor, groups: int, weights: Weights, eps: float, recorder: Recorder
    ) -> Tensor:
        weight, bias = map(detach, weights)
        outputs, mean, scale = layers.group_norm(inputs, groups, weight, bias, eps)
        ctx.save_for_backward(inputs, mean, scale)
        ctx.rest = groups, weights, recorder
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs, mean, scale), (groups, (weight, bias), recorder) = ctx.saved_tensors, ctx.rest
        found = layers.group_norm_gradients(gradient, inputs, mean, scale, groups, detach(weight))
        recorder.add(weight, lambda: recorder.split_rows(found[1]).sum(1))
        recorder.add(bias, lambda: recorder.split_rows(found[2]).sum(1))
        return found[0], None, None, None, None, None


class RecordedScale(torch.autograd.Function):
    """weight · inputs + bias, where both have the last dimensions of the inputs."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, anchor: Tensor, weights: Weights, recorder: Recorder) -> Tensor:
        weight, bias = map(detach, weights)
        ctx.save_for_backward(inputs)
        ctx.rest = weights, recorder
        outputs = inputs.clone() if weight is None else inputs * weight
        return outputs if bias is None else outputs + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), ((weight, bias), recorder) = ctx.saved_tensors, ctx.rest
        if weight is None:
            return gradient, None, None, None
        each = recorder.split_rows(gradient)
        places = list(range(1, each.dim() - weight.dim()))
        recorder.add(weight, lambda: recorder.split_rows(gradient * inputs).sum(places))
        recorder.add(bias, lambda: each.sum(places))
        return gradient * weight.detach(), None, None, None


class RecordedEmbedding(torch.autograd.Function):
    """Vectors looked up by index."""

    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, anchor: Tensor, weights: tuple[Tensor], padding_idx: int | None, recorder: Recorder
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rest = weights[0], padding_idx, recorder
        return F.embedding(indices, weights[0].detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (indices,), (weight, padding_idx, recorder) = ctx.saved_tensors, ctx.rest
        places, vectors = recorder.split_rows(indices).flatten(1), recorder.split_rows(gradient).flatten(1, -2)
        recorder.add(weight, lambda: layers.embedding_gradient(places, vectors, len(weight), padding_idx))
        return None, None, None, None, None


def unfold(inputs: Tensor, gradient: Tensor, geometry: layers.Geometry, rows: int) -> OuterProducts:
    """Return the gradients of a convolution's weight as outer products of output gradients and input patches."""
    size = geometry.kernel, gradient.shape[2:]
    patches = extract_patches(inputs, *size, geometry.stride, geometry.padding, geometry.dilation)
    ours = gradient.flatten(2).mT.unflatten(0, (rows, -1)).flatten(1, 2)
    theirs = patches.flatten(3).flatten(1, 2).mT.unflatten(0, (rows, -1)).flatten(1, 2)
    return OuterProducts(ours, theirs)


def convert(weights: Weights, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return weights in a dtype, without autograd."""
    return tuple(None if part is None else part.detach().to(dtype) for part in weights)


def detach(weight: Tensor | None) -> Tensor | None:
    """Return a weight without autograd."""
    return None if weight is None else weight.detach()


# ---- all examples


def compute_recorded_gradients(
    model: nn.Module,
    loss: Loss,
    parameters: Mapping[str, Tensor],
    inputs: Batch,
    targets: Batch,
    views: int = 1,
    dtype: torch.dtype | None = None,
) -> tuple[Gradients, Tensor]:
    """Return what `compute_per_example_gradients` returns, from one pass over all examples and views.

    With a `dtype` the layers compute in it, and their weight gradients have it. Raises `UnrecordedUse`, or another
    error of the model, where that is not possible.
    """
    recorder = Recorder(parameters, count_rows(targets), dtype)
    found, losses = record(recorder, model, loss, inputs, targets, views)
    return {name: as_tensor(part) for name, part in found.items()}, losses


def compute_recorded_products(
    model: nn.Module,
    loss: Loss,
    parameters: Mapping[str, Tensor],
    inputs: Batch,
    targets: Batch,
    views: int = 1,
    dtype: torch.dtype | None = None,
) -> tuple[MixedGradients, Tensor]:
    """Return the same with outer products in place of gradients, where these cost less."""
    recorder = Recorder(parameters, count_rows(targets), dtype, products=True)
    return record(recorder, model, loss, inputs, targets, views)


def record(
    recorder: Recorder, model: nn.Module, loss: Loss, inputs: Batch, targets: Batch, views: int
) -> tuple[MixedGradients, Tensor]:
    """Return the gradients that a recorder finds in a forward and a backward pass, and the losses."""
    parameters, dtype = recorder.parameters, recorder.dtype
    with RecordedLayers(recorder):
        outputs = call_model(model, map_tensors(lambda part: part.flatten(0, 1), inputs) if views > 1 else inputs)

    def row_loss(output: Any, target: Batch) -> Tensor:
        return loss(output, map_tensors(lambda part: part.expand(views, *part.shape), target))

    outputs = pytree.tree_map_only(Tensor, lambda part: widen(recorder.split_rows(part), dtype), outputs)
    losses = vmap(row_loss, randomness="different")(outputs, targets)
    leaves = [recorder.anchor, *parameters.values()]
    _, *others = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    used = [name for name, other in zip(parameters, others, strict=True) if other is not None]
    if used:
        raise UnrecordedUse(f"'{used[0]}' is used by an operation that is not recorded")
    return recorder.gradients(), losses.detach()


def widen(outputs: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return floating-point outputs in float32 if the layers computed in another dtype."""
    return outputs.float() if dtype is not None and outputs.is_floating_point() else outputs
