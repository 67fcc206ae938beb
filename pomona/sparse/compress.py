"""`compress`: a balanced-pruned model becomes one that runs on packed weights, wherever that is faster."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..core.errors import require, unknown
from ..core.targets import unwrap
from ..models.summary import example as zeros
from ..patterns.base import matrix
from .balanced import DTYPES, WIDEST, BalancedTensor, index_bits
from .clock import emptying, last_cache, race
from .layers import Packed, PackedConv2d, PackedLinear, PackedLSTM, channels_last

SPARSE = 0.3  # zeros below which nothing is gained by leaving them out
SAMPLE = 256  # rows that are looked at to find the blocks
WIDE = ((32, 1.0), (64, 1.3), (128, 1.7), (WIDEST, 3.0))  # up to which width, and how much longer a survivor takes
KEEP = ("faster", "all")
NOISE = 1.02  # times the dense model's, up to which the compressed one's time is taken to be no longer
ALONE = " alone, but the whole model is faster dense"


@dataclass(frozen=True)
class Layer:
    """What became of a layer, and why. Seconds are for one call on the example's input."""

    name: str
    kind: str
    shape: tuple[int, ...]
    sparsity: float
    packed: bool
    reason: str
    block: int | None = None
    kept: int | None = None
    bytes: tuple[int, int] | None = None  # dense, packed
    seconds: tuple[float, float] | None = None  # dense, packed


@dataclass(frozen=True)
class Compression:
    """How a compressed model differs from the dense one: layer by layer, and in time where it was measured."""

    layers: tuple[Layer, ...]
    batch: int
    seconds: dict[str, float] = field(default_factory=dict)  # whole model: dense, all packed, compressed
    called: dict[str, float] = field(default_factory=dict)  # the same with the host's time, on a GPU
    caches: str = "warm"  # when a layer was timed alone; cold where the model is too large for the last of them

    @property
    def dense(self) -> dict[str, str]:
        """The layers that stayed dense, and why."""
        return {layer.name: layer.reason for layer in self.layers if not layer.packed}

    def facts(self) -> dict[str, Any]:
        """Everything as plain values."""
        layers = [asdict(layer) for layer in self.layers]
        times = {"seconds": dict(self.seconds), "called": dict(self.called)}
        return {"batch": self.batch, **times, "caches": self.caches, "layers": layers}

    def __rich__(self) -> Table:
        table = Table("layer", "shape", "zeros", "blocks", "bytes", "dense, µs", "packed, µs", "", show_footer=True)
        if any(layer.seconds for layer in self.layers):
            table.caption = f"layers timed alone, with {self.caches} caches{self.plainly()}"
        for layer in self.layers:
            sizes = "" if layer.bytes is None else f"{layer.bytes[0]:,} → {layer.bytes[1]:,}"
            times = ("", "") if layer.seconds is None else [f"{1e6 * s:,.1f}" for s in layer.seconds]
            blocks = "" if layer.block is None else f"{layer.kept} of {layer.block}"
            shape = "×".join(map(str, layer.shape))
            table.add_row(layer.name, shape, f"{layer.sparsity:.1%}", blocks, sizes, *times, layer.reason)
        if self.seconds:
            table.columns[0].footer = f"whole model, batch {self.batch}"
            table.columns[5].footer = f"{1e6 * self.seconds['dense']:,.1f}"
            table.columns[6].footer = f"{1e6 * self.seconds['compressed']:,.1f}"
            table.columns[7].footer = f"all packed {1e6 * self.seconds['all packed']:,.1f} µs"
        return table

    def plainly(self) -> str:
        """What plain calls take, where the host has a part in it, and what to do where that is longer than before."""
        if not self.called:
            return ""
        dense, small = self.called["dense"], self.called["compressed"]
        slower = "; slower that way: capture it in a CUDA graph" if small > NOISE * dense else ""
        return f"; called plainly, with the host's time, {1e6 * dense:,.1f} → {1e6 * small:,.1f} µs{slower}"

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=150, color_system=None)
        console.print(self)
        return console.file.getvalue()  # type: ignore[attr-defined]


class Fused(nn.Identity):
    """Where a ReLU was that the layer before it now does."""

    def __init__(self, relu: nn.ReLU) -> None:
        super().__init__()
        self.inplace = relu.inplace


@torch.no_grad()
def compress(
    model: nn.Module,
    example: Tensor | Sequence[int] | None = None,
    *,
    block: int | None = None,
    dtype: torch.dtype | None = None,
    keep: str = "faster",
    patience: float = 1.0,
) -> nn.Module:
    """A copy of the model that runs on packed weights; its `compression` says what became of each layer.

    Linear, Conv2d and LSTM layers are packed where that is faster than the dense layer on this machine for
    the `example`, a batch or the shape of one sample; without one a linear layer and an LSTM are timed on one
    vector. Where the model is larger than the last cache its layers find their weights in memory, and so they are
    timed with emptied caches. On a GPU the device's time decides, as in a CUDA graph; what the whole model takes as
    it is called is told beside it. `keep="all"` packs all that is sparse. Blocks are found in the weights unless
    `block` names their width. `dtype` stores the values as another kind, such as torch.float16. `patience` is how
    many seconds the whole model is timed for, and each layer a third of that.
    """
    if keep not in KEEP:
        raise unknown("keep", keep, KEEP)
    require(dtype is None or dtype in DTYPES, f"values are stored as float32, float16 or bfloat16, got {dtype}.")
    dense = unwrap(model)
    batch = None if example is None else example if isinstance(example, Tensor) else zeros(dense, example)
    full = copy.deepcopy(dense)
    inputs = {} if batch is None else watch(full, batch)
    before = emptier(dense)
    layers = []
    for name, module in list(candidates(full)):
        layer, packed = consider(name, module, block, dtype, inputs.get(name), keep, before, patience / 3)
        layers.append(layer)
        if packed is not None:
            full = swap(full, module, packed)
    fuse(full)
    result = without(full, [layer.name for layer in layers if not layer.packed])
    seconds: dict[str, float] = {}
    called: dict[str, float] = {}
    if batch is not None and any(layer.seconds for layer in layers):
        sides = {"dense": dense, "all packed": full, "compressed": result}
        seconds, called = whole(sides, batch, patience)
        if keep == "faster" and seconds["compressed"] > NOISE * seconds["dense"]:  # layers gain alone, not together
            layers = [replace(layer, packed=False, reason=layer.reason + ALONE * layer.packed) for layer in layers]
            result = without(full, [layer.name for layer in layers])
            for times in filter(None, (seconds, called)):
                times["compressed"] = times["dense"]
    caches, count = "warm" if before is None else "cold", 1 if batch is None else len(batch)
    result.compression = Compression(tuple(layers), count, seconds, called, caches)  # type: ignore
    return result


def emptier(model: nn.Module) -> Callable[[], None] | None:
    """What empties the caches, for a model that the last of them cannot hold."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    device = next((t.device for t in tensors), torch.device("cpu"))
    return emptying(device) if sum(t.nbytes for t in tensors) > last_cache(device) else None


def without(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """A copy of a packed model in which the layers of these names are dense."""
    model = copy.deepcopy(model)
    for name in names:
        if isinstance(packed := model.get_submodule(name), Packed):
            model = restore(model, packed)
    return model


@torch.no_grad()
def decompress(model: nn.Module) -> nn.Module:
    """A copy of a compressed model with plain dense layers again."""
    plain = without(model, [name for name, module in model.named_modules() if isinstance(module, Packed)])
    vars(plain).pop("compression", None)
    return plain


def consider(
    name: str,
    module: nn.Module,
    block: int | None,
    dtype: torch.dtype | None,
    inputs: Any,
    keep: str,
    before: Callable[[], None] | None,
    patience: float,
) -> tuple[Layer, Packed | None]:
    """The packed form of a layer where it has one, and the record of what becomes of it."""
    weights = {leaf: p.detach() for leaf, p in module.named_parameters() if leaf.startswith("weight")}
    sparsity = 1 - sum(int(w.count_nonzero()) for w in weights.values()) / sum(w.numel() for w in weights.values())
    first = next(iter(weights.values()))
    record: dict[str, Any] = {
        "name": name,
        "kind": type(module).__name__,
        "shape": tuple(first.shape),
        "sparsity": sparsity,
    }
    if refusal := refuse(module, first):
        return Layer(**record, packed=False, reason=refusal), None
    packs = {}
    for leaf, weight in weights.items():
        if weight.count_nonzero() <= (1 - SPARSE) * weight.numel():
            pack = BalancedTensor.from_dense(weight, find_block(weight) if block is None else block)
            # Where the blocks differ in count, the fullest decides how much is stored of each.
            if pack.values[:1, :, :, 0].numel() <= (1 - SPARSE) * pack.matrix[1]:
                packs[leaf] = pack.to(dtype or weight.dtype)
    if not packs:
        why = f"{sparsity:.0%} zeros are too few" if sparsity < SPARSE else "no blocks with equal counts were found"
        return Layer(**record, packed=False, reason=why), None
    packed = make(module, packs)
    main = next(iter(packs.values()))
    bytes_ = (
        sum(w.nbytes for w in weights.values()),
        sum(packs[leaf].nbytes if leaf in packs else w.nbytes for leaf, w in weights.items()),
    )
    record |= {"block": main.block, "kept": main.kept, "bytes": bytes_}
    seconds = time_layer(module, packed, first, inputs, before, patience)
    if seconds is None or keep == "all" or seconds[1] < seconds[0]:
        why = "packed" if seconds is None else f"{seconds[0] / seconds[1]:.1f}× faster"
        return Layer(**record, packed=True, reason=why, seconds=seconds), packed
    return Layer(**record, packed=False, reason="dense is faster here", seconds=seconds), packed


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that have a packed form, exactly these: what subclasses do with their weight is not known."""
    return ((name, m) for name, m in model.named_modules() if type(m) in (nn.Linear, nn.Conv2d, nn.LSTM))


def refuse(module: nn.Module, weight: Tensor) -> str | None:
    """Why a layer cannot be packed whatever its zeros."""
    if weight.dtype not in DTYPES:
        return f"{weight.dtype} has no packed form"
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        return "a grouped convolution"
    if isinstance(module, nn.LSTM) and module.proj_size:
        return "an LSTM with projections"
    return None


def make(module: nn.Module, packs: dict[str, BalancedTensor]) -> Packed:
    """The packed layer that stands for a dense one."""
    if isinstance(module, nn.LSTM):
        return PackedLSTM(module, packs)
    kind: Callable[..., Packed] = PackedLinear if isinstance(module, nn.Linear) else PackedConv2d
    return kind(module, packs["weight"])


def find_block(weight: Tensor) -> int:
    """The width of blocks that takes the fewest bytes and the fastest kernel, judged by some rows."""
    rows, columns = matrix(weight.shape)
    flat = weight.reshape(rows, columns)
    some = flat[torch.linspace(0, rows - 1, min(rows, SAMPLE), device=weight.device).long()] != 0
    total = torch.nn.functional.pad(some.int().cumsum(1), (1, 0))
    widths = {*range(2, 129), *(2**power for power in range(8, 17))}

    def cost(width: int) -> float:
        edges = torch.arange(0, columns + width, width, device=weight.device).clamp_(max=columns)
        kept = max(1, int(total[:, edges].diff(dim=1).max()))
        words = math.ceil(kept / (16 // index_bits(width)))
        slower = next(factor for limit, factor in WIDE if width <= limit)
        return math.ceil(columns / width) * (kept * weight.element_size() + 2 * words) * slower

    return min(sorted(w for w in widths if w <= max(2, columns)), key=lambda w: (cost(w), abs(w - 32)))


def watch(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    """What each layer is given when the model sees the batch."""
    inputs: dict[str, Any] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, given, name=name: inputs.setdefault(name, given))
        for name, module in candidates(model)
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()(batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return inputs


def time_layer(
    dense: nn.Module, packed: Packed, weight: Tensor, given: Any, before: Callable[[], None] | None, patience: float
) -> tuple[float, float] | None:
    """Seconds of both on the input that was seen, or on one vector; None for a convolution of unknown images.

    Where images have their channels last, the packed layer's time is that of giving them so, too.
    """
    if given is None:
        if isinstance(dense, nn.Conv2d):
            return None
        size = weight.shape[1]
        given = (torch.randn(1, *([1] * isinstance(dense, nn.LSTM)), size).to(weight),)
    modes = dense.training, packed.training
    dense.eval(), packed.eval()
    turn = isinstance(dense, nn.Conv2d) and channels_last(dense(*given))

    def small() -> Any:
        y = packed(*given)
        return y.contiguous(memory_format=torch.channels_last) if turn else y

    sides = [lambda: dense(*given), small]
    one, other = race(sides, weight.device, before=before, patience=patience)
    dense.train(modes[0]), packed.train(modes[1])
    return one, other


def whole(models: dict[str, nn.Module], batch: Tensor, patience: float) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each model for the batch, in evaluation mode; on a GPU, besides, as it is called."""
    ready = [copy.deepcopy(model).eval() for model in models.values()]

    def times(called: bool) -> dict[str, float]:
        sides = [lambda model=model: model(batch) for model in ready]
        return dict(zip(models, race(sides, batch.device, patience=patience, called=called), strict=True))

    return times(called=False), times(called=True) if batch.is_cuda else {}


def places(model: nn.Module, module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where in a model a module is: its siblings, and its name among them."""
    for parent in list(model.modules()):
        for leaf, child in list(parent._modules.items()):
            if child is module:
                yield parent._modules, leaf


def swap(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put a module in all places of another, which may be the model itself."""
    for siblings, leaf in places(model, old):
        siblings[leaf] = new
    return new if model is old else model


def fuse(model: nn.Module) -> None:
    """Let packed layers do the ReLU that follows them in a Sequential."""
    for container in [m for m in model.modules() if type(m) is nn.Sequential]:
        for one, other in pairwise(container._modules):
            layer, relu = container._modules[one], container._modules[other]
            alone = isinstance(layer, (PackedLinear, PackedConv2d)) and len(list(places(model, layer))) == 1
            if alone and type(relu) is nn.ReLU:
                layer.relu = True  # type: ignore[assignment]
                container._modules[other] = Fused(relu)


def restore(model: nn.Module, packed: Packed) -> nn.Module:
    """Put the dense layer back, and the ReLU that it had taken over."""
    for siblings, leaf in places(model, packed):
        following = dict(pairwise(siblings)).get(leaf, leaf)
        if isinstance(fused := siblings[following], Fused):
            siblings[following] = nn.ReLU(fused.inplace)
    return swap(model, packed, packed.dense())
