"""`compress`: a copy of a pruned model that runs on packed weights, wherever that is faster."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.targets import unwrap
from ..errors import require, unknown_name_error
from ..models.example_inputs import Example, ModelInputs
from ..sharding import refuse_sharded
from .any_mask import pack_any_mask
from .balanced_blocks import MIN_SPARSITY, find_block, is_balanced, pack_balanced
from .compression_report import DENSE_FUSED, PLANNED, TIMING_TOLERANCE, WITH_RELU, Compression, LayerReport
from .format import DTYPES, BalancedTensor
from .formats import FORMATS
from .layers import Conv2dReLU, PackedLayer, build_packed_layer, read_weights, share_inputs
from .layers.base import is_channels_last
from .model_validation import validate_model
from .network import copy_without_plan, find_shape, plan_copy, plan_network
from .packed_tensor import PackedTensor
from .quantized import CODE_BITS, QuantizedBalancedTensor
from .structured_masks import pack_structured
from .surgery import (
    choose_encoder_paths,
    copy_with_dense_layers,
    find_other_weights,
    find_packable_layers,
    find_relus_after_layers,
    find_replaced_layers,
    fuse_relus,
    replace_module,
)
from .timing import last_cache_bytes, make_cache_flusher, median_seconds

POLICIES = ("faster", "all")
SMALL_WEIGHT = 1 << 18  # weights of a layer so small that a balanced mask is packed in no other format
LAYER_PATIENCE = 1 / 3  # of the patience for the whole model

__all__ = ["DENSE_FUSED", "Compression", "LayerReport", "compress", "decompress", "find_block"]


@dataclass(frozen=True)
class LayerOptions:
    """The options of `compress` that decide about each layer."""

    block: int | None
    dtype: torch.dtype | None
    bits: int | None  # of the values of balanced blocks, where they are quantised
    policy: str
    formats: Sequence[str]
    patience: float  # seconds for which a layer is timed
    flush: Callable[[], None] | None  # empties the caches before each timed call


@torch.no_grad()
def compress(
    model: nn.Module,
    example: Example | None = None,
    *,
    block: int | None = None,
    dtype: torch.dtype | None = None,
    policy: str = "faster",
    patience: float = 1.0,
    formats: Sequence[str] | None = None,
    bits: int | None = None,
    keep: str | None = None,
) -> nn.Module:
    """Return a copy of the model that runs on packed weights; its `compression` reports the outcome for each layer.

    Linear, Conv2d and LSTM layers, and GPT-2's Conv1D, are packed where that is faster than the dense layer on this
    machine, each in the format that is fastest, for the `example`: a batch, the shape of one sample, or a tuple or
    dictionary of the model's arguments. Without one, a linear layer and an LSTM are timed on one vector, and a
    convolution stays dense. A ReLU that follows a layer in a Sequential is part of it: packed layers compute it
    themselves, and so do convolutions that stay dense on a GPU, where cuDNN's single kernel for both is faster.

    On a CPU, a network of convolutions, batch norms, ReLUs, residual sums and pools is run by one native call where
    that is faster: in evaluation mode, for float32 images of any size that need no gradient themselves.
    Layers with balanced weights that receive the same tensor, such as queries, keys and values, are one product for a
    single vector.

    Layers of a model that is larger than the last-level cache find their weights in memory, and are timed with emptied
    caches. On a GPU the device's time decides, as in a CUDA graph; the report also has the times of plain calls.

    Args:
        block: the width of the blocks; found in the weights by default.
        dtype: the type in which values are stored, such as torch.float16; that of the weights by default.
        policy: "faster" packs the layers that gain by it, "all" every layer that is sparse.
        patience: seconds for which the whole model is timed; each layer is timed for a third of that.
        formats: the storage formats to choose from, of "balanced", "unstructured", "2:4" and "blocks", for masks with
            that structure, and, on a GPU, "gaps" and "bitmap"; all by default. With a `block`, only "balanced"; with
            `bits`, only "balanced_quantized".
        bits: 4 or 8 stores balanced blocks as codes of so many bits with scales ("balanced_quantized"), which rounds
            the weights; by default no value changes.
        keep: deprecated name of `policy`.
    """
    policy = policy if keep is None else keep
    if policy not in POLICIES:
        raise unknown_name_error("policy", policy, POLICIES)
    formats = choose_formats(formats, block, bits)
    require(dtype is None or dtype in DTYPES, f"values are stored as float32, float16 or bfloat16, got {dtype}.")
    refuse_sharded(model, "pm.compress")
    dense = copy_without_plan(unwrap(model))
    validate_model(dense)
    inputs = None if example is None else ModelInputs.from_example(dense, example)
    options = LayerOptions(block, dtype, bits, policy, formats, patience * LAYER_PATIENCE, cache_flusher_for(dense))
    packed, layers, readers = pack_layers(dense, inputs, options)
    fused = [layer.name for layer in layers if layer.saved]
    fuse_relus(packed, fused)
    staying = [layer.name for layer in layers if not layer.packed]
    result = share_inputs(fuse_relus(copy_with_dense_layers(packed, staying, dense), fused), readers)
    seconds: dict[str, float] = {}
    called: dict[str, float] = {}
    copy_modes(dense, result)
    arguments = () if inputs is None or inputs.kwargs else inputs.args
    is_packed = any(isinstance(module, PackedLayer) for module in packed.modules())
    planned, is_planned = plan_copy(result, arguments) if is_packed else None, False
    if inputs is not None and (planned is not None or any(layer.seconds or layer.saved for layer in layers)):
        every = [layer.name for layer in layers]
        others = {DENSE_FUSED: fuse_relus(copy_with_dense_layers(packed, every, dense), fused)} if fused else {}
        others |= {} if planned is None else {PLANNED: planned}
        models = {"dense": dense, "all packed": share_inputs(packed, readers), "compressed": result, **others}
        seconds, called = time_models(models, inputs, patience)
        best = min((way for way in ("dense", DENSE_FUSED) if way in models), key=seconds.__getitem__)
        # Layers that gain alone may not gain together.
        if policy == "faster" and seconds["compressed"] > TIMING_TOLERANCE * seconds[best]:
            layers = [layer.revert_to_dense(best == DENSE_FUSED) for layer in layers]
            result = copy.deepcopy(models[best])
            for times in filter(None, (seconds, called)):
                times["compressed"] = times[best]
        is_planned = seconds.get(PLANNED, math.inf) < seconds["compressed"]
        if is_planned:
            layers = [layer.plan() for layer in layers]
            seconds["compressed"] = seconds[PLANNED]
    caches, count = "warm" if options.flush is None else "cold", 1 if inputs is None else inputs.batch
    reports = (*layers, *report_other_weights(dense))
    result.compression = Compression(reports, count, seconds, called, caches)  # type: ignore
    if is_planned:
        plan_network(result, find_shape(arguments))
    return result


def copy_modes(source: nn.Module, target: nn.Module) -> None:
    """Let the modules of a model be in training or evaluation mode as those of the same names in another one."""
    modes = {name: module.training for name, module in source.named_modules()}
    for name, module in target.named_modules():
        module.training = modes.get(name, source.training)


@torch.no_grad()
def decompress(model: nn.Module) -> nn.Module:
    """Return a copy of a compressed model with plain dense layers."""
    plain = copy_with_dense_layers(copy_without_plan(model), find_replaced_layers(model))
    vars(plain).pop("compression", None)
    return plain


def choose_formats(formats: Sequence[str] | None, block: int | None, bits: int | None) -> Sequence[str]:
    """Return the names of the formats to choose from; raise PomonaError for options that do not fit together."""
    quantized = QuantizedBalancedTensor.format_name
    require(bits in (None, *CODE_BITS.values()), f"values are quantised to 4 or 8 bits, got bits={bits}.")
    if formats is None and bits is None:
        return [name for name in FORMATS if name != quantized] if block is None else [BalancedTensor.format_name]
    formats = [quantized] if formats is None else formats
    for name in formats:
        if name not in FORMATS:
            raise unknown_name_error("format", name, FORMATS)
    require(bits is not None or quantized not in formats, f"the format '{quantized}' rounds weights: give bits=4 or 8.")
    require(bits is None or quantized in formats, f"bits={bits} is for the format '{quantized}': add it to formats.")
    return formats


def cache_flusher_for(model: nn.Module) -> Callable[[], None] | None:
    """Return a function that empties the caches for a model larger than the last-level cache, else None."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    device = next((t.device for t in tensors), torch.device("cpu"))
    return make_cache_flusher(device) if sum(t.nbytes for t in tensors) > last_cache_bytes(device) else None


def pack_layers(
    dense: nn.Module, inputs: ModelInputs | None, options: LayerOptions
) -> tuple[nn.Module, list[LayerReport], dict[int, list[str]]]:
    """Return a copy of the model with every layer packed that can be, the report of each layer, and which share inputs.

    The names of layers that receive the same tensor, and have no ReLU after them, are in one list.
    """
    fused = [name for name, module in dense.named_modules() if isinstance(module, Conv2dReLU)]
    model = copy_with_dense_layers(dense, fused)
    choose_encoder_paths(model, before_packing=True)
    layer_inputs = {} if inputs is None else collect_layer_inputs(model, inputs)
    relus = dict(find_relus_after_layers(model))
    reports = []
    with_relu = {name for name, layer in find_packable_layers(model) if layer in relus}
    for name, layer in list(find_packable_layers(model)):
        report, packed = assess_layer(name, layer, relus.get(layer), layer_inputs.get(name), options)
        reports.append(report)
        if packed is not None:
            model = replace_module(model, layer, packed)
    choose_encoder_paths(model)
    readers: dict[int, list[str]] = {}
    for name, given in layer_inputs.items():
        if name in with_relu:  # a product of several layers computes no ReLU
            continue
        readers.setdefault(id(given.args[0]) if given.args else id(given), []).append(name)
    return model, reports, readers


def report_other_weights(model: nn.Module) -> Iterator[LayerReport]:
    """Yield a report of each module whose weights are sparse but have no packed form."""
    for name, module, matrices in find_other_weights(model):
        sparsity = 1 - sum(int(m.count_nonzero()) for m in matrices) / sum(m.numel() for m in matrices)
        if sparsity >= MIN_SPARSITY:
            kind = type(module).__name__
            yield LayerReport(name, kind, tuple(matrices[0].shape), sparsity, False, f"{kind} has no packed form")


def assess_layer(
    name: str, layer: nn.Module, relu: nn.Module | None, inputs: ModelInputs | None, options: LayerOptions
) -> tuple[LayerReport, PackedLayer | None]:
    """Return the report of a layer, and its packed form where it has one. `relu` is the module that follows it."""
    weights = read_weights(layer)
    sparsity = 1 - sum(int(w.count_nonzero()) for w in weights.values()) / sum(w.numel() for w in weights.values())
    first = next(iter(weights.values()))
    fields: dict[str, Any] = {"name": name, "kind": type(layer).__name__, "shape": tuple(first.shape)}
    fields["sparsity"] = sparsity
    obstacle = find_obstacle(layer, weights, options.dtype, options.bits)
    candidates = {} if obstacle else pack_candidates(weights, options)
    packed_layers = {name: build_packed_layer(layer, candidate) for name, candidate in candidates.items()}
    times = time_layer(layer, packed_layers, relu, first, inputs, options.flush, options.patience)
    dense_seconds = min((times[way] for way in ("dense", "fused") if way in times), default=0.0)
    fields["saved"] = times.get("dense", 0.0) - dense_seconds
    with_relu = WITH_RELU * (fields["saved"] > 0)
    if not candidates:
        too_dense = f"{sparsity:.0%} zeros are too few"
        unequal = "no blocks with equal counts were found"
        misfit = unequal if BalancedTensor.format_name in options.formats else "the mask fits none of the formats"
        reason = obstacle or (too_dense if sparsity < MIN_SPARSITY else misfit)
        return LayerReport(**fields, packed=False, reason=reason + with_relu), None
    sizes = {name: packed_bytes(weights, candidate) for name, candidate in candidates.items()}
    chosen = min(candidates, key=lambda name: (times.get(name, 0.0), sizes[name]))
    main = next(iter(candidates[chosen].values()))
    if isinstance(main, BalancedTensor):
        bits = main.bits if isinstance(main, QuantizedBalancedTensor) else None
        fields |= {"block": main.block, "kept": main.kept, "bits": bits}
    seconds = (dense_seconds, times[chosen]) if times else None
    dense_bytes = sum(w.nbytes for w in weights.values())
    fields |= {"format": chosen, "bytes": (dense_bytes, sizes[chosen]), "seconds": seconds}
    if options.policy == "all" or (seconds is not None and seconds[1] < seconds[0]):
        reason = "packed" if seconds is None else describe_speed(*seconds)
        return LayerReport(**fields, packed=True, reason=reason), packed_layers[chosen]
    slower = "not timed without an example" if seconds is None else "dense is faster here"
    return LayerReport(**fields, packed=False, reason=slower + with_relu), packed_layers[chosen]


def packed_bytes(weights: Mapping[str, Tensor], packed: Mapping[str, PackedTensor]) -> int:
    """Return the bytes of a layer's weights, packed where they have a packed form."""
    return sum(packed[leaf].nbytes if leaf in packed else weight.nbytes for leaf, weight in weights.items())


def describe_speed(dense: float, packed: float) -> str:
    """Return how many times faster, or slower, a packed layer is than the dense one."""
    return f"{dense / packed:.1f}× faster" if packed < dense else f"{packed / dense:.1f}× slower"


def find_obstacle(
    layer: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype | None, bits: int | None
) -> str | None:
    """Return why a layer cannot be packed whatever its zeros, or None."""
    weight = next(iter(weights.values()))
    if weight.dtype not in DTYPES:
        return f"{weight.dtype} has no packed form"
    largest = max(float(w.abs().amax()) for w in weights.values() if w.numel()) if dtype is not None else 0.0
    if dtype is not None and torch.finfo(dtype).max < largest < math.inf:
        return f"a weight of {largest:.3g} is too large for {dtype}"
    if bits is not None and not all(bool(w.isfinite().all()) for w in weights.values()):
        return "a weight with an infinity or NaN cannot be quantised"
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        return "a grouped convolution"
    if isinstance(layer, nn.LSTM) and layer.proj_size:
        return "an LSTM with projections"
    return None


def pack_candidates(weights: dict[str, Tensor], options: LayerOptions) -> dict[str, Mapping[str, PackedTensor]]:
    """Return the packed forms of the weights that are sparse enough, by format and parameter name.

    A small layer with a balanced mask has no other form: the formats hardly differ there.
    """
    sparse = {leaf: w for leaf, w in weights.items() if w.count_nonzero() <= (1 - MIN_SPARSITY) * w.numel()}
    candidates: dict[str, Mapping[str, PackedTensor]] = {}
    for name, bits in ((BalancedTensor.format_name, None), (QuantizedBalancedTensor.format_name, options.bits)):
        if name in options.formats:
            candidates[name] = pack_balanced(sparse, options.block, options.dtype, bits)
    balanced = next(iter(candidates.values()), {})
    settled = all(leaf in balanced and is_balanced(w, balanced[leaf]) for leaf, w in sparse.items())
    small = sum(weight.numel() for weight in sparse.values()) < SMALL_WEIGHT
    if not (settled and small):
        candidates |= pack_any_mask(sparse, options.formats, options.dtype)
        candidates |= pack_structured(sparse, options.formats, options.dtype)
    return {name: packed for name, packed in candidates.items() if packed}


def collect_layer_inputs(model: nn.Module, inputs: ModelInputs) -> dict[str, ModelInputs]:
    """Return the arguments that each packable layer receives when the model runs on its inputs, by layer name."""
    collected: dict[str, ModelInputs] = {}

    def collect(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            collected.setdefault(name, ModelInputs(args, kwargs))

        return hook

    hooks = [
        module.register_forward_pre_hook(collect(name), with_kwargs=True)
        for name, module in find_packable_layers(model)
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        inputs.run(model.eval())
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return collected


def time_layer(
    dense: nn.Module,
    packed: Mapping[str, PackedLayer],
    relu: nn.Module | None,
    weight: Tensor,
    inputs: ModelInputs | None,
    flush: Callable[[], None] | None,
    patience: float,
) -> dict[str, float]:
    """Return the seconds of a layer dense, in each packed form, and fused where cuDNN computes the ReLU too.

    The input is the one that the layer receives in the model, else one vector. Nothing is timed where there is no
    choice, nor a convolution whose input is unknown. The ReLU that follows is part of every time; where the output is
    in channels-last format, so is the conversion of the packed layer's output.
    """
    if inputs is None:
        if isinstance(dense, nn.Conv2d):
            return {}
        size = weight.shape[1]
        inputs = ModelInputs((torch.randn(1, *([1] * isinstance(dense, nn.LSTM)), size).to(weight),))
    layers: dict[str, nn.Module] = {"dense": dense}
    if relu is not None and Conv2dReLU.can_replace(dense):
        fused = Conv2dReLU.from_conv2d(dense)
        if inputs.call(fused.can_use_cudnn):
            layers["fused"] = fused
    layers |= packed
    if len(layers) == 1:
        return {}
    modes = {way: layer.training for way, layer in layers.items()}
    for layer in layers.values():
        layer.eval()
    channels_last = isinstance(dense, nn.Conv2d) and is_channels_last(inputs.call(dense))

    def call_dense() -> Any:
        y = inputs.call(dense)
        return y if relu is None else relu(y)

    def call_packed(layer: PackedLayer) -> Any:
        y = inputs.call(layer if relu is None else partial(layer, relu=True))
        return y.contiguous(memory_format=torch.channels_last) if channels_last else y

    calls: dict[str, Callable[[], Any]] = {"dense": call_dense, "fused": lambda: inputs.call(partial(fused, relu=True))}
    calls |= {way: partial(call_packed, layer) for way, layer in packed.items()}
    seconds = median_seconds([calls[way] for way in layers], weight.device, before=flush, patience=patience)
    for way, layer in layers.items():
        layer.train(modes[way])
    return dict(zip(layers, seconds, strict=True))


def time_models(
    models: dict[str, nn.Module], inputs: ModelInputs, patience: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each model for its inputs, and on a GPU also those of plain calls, in evaluation mode."""
    ready = [copy.deepcopy(model).eval() for model in models.values()]
    calls = [lambda model=model: inputs.call(model) for model in ready]

    def measure(include_host: bool) -> dict[str, float]:
        seconds = median_seconds(calls, inputs.device, patience=patience, include_host=include_host)
        return dict(zip(models, seconds, strict=True))

    return measure(include_host=False), measure(include_host=True) if inputs.device.type == "cuda" else {}
