"""`compress`: a balanced-pruned model becomes one that runs on packed weights, wherever that is faster."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..core.targets import unwrap
from ..errors import require, unknown_name_error
from ..masking import matrix_shape
from ..models.summary import make_example_batch as zeros
from .format import DTYPES, WIDEST, BalancedTensor, index_bits
from .layers import Conv2dReLU, Packed, PackedConv2d, PackedLinear, PackedLSTM, Weighted, channels_last
from .timing import emptying, last_cache, race

SPARSE = 0.3  # zeros below which nothing is gained by leaving them out
SAMPLE = 256  # rows that are looked at to find the blocks
WIDE = ((32, 1.0), (64, 1.3), (128, 1.7), (WIDEST, 3.0))  # up to which width, and how much longer a survivor takes
KEEP = ("faster", "all")
NOISE = 1.02  # times the dense model's, up to which the compressed one's time is taken to be no longer
ALONE = " alone, but the whole model is faster dense"
TOGETHER = ", with its ReLU in one kernel"
FUSED = "dense, fused"  # a whole model in which nothing is packed, and convolutions do their ReLU where that is faster


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
    seconds: tuple[float, float] | None = None  # dense, packed; with the ReLU that follows
    saved: float = 0.0  # seconds that cuDNN saves dense with the ReLU in the same kernel; if any, that is dense here


@dataclass(frozen=True)
class Compression:
    """How a compressed model differs from the dense one: layer by layer, and in time where it was measured."""

    layers: tuple[Layer, ...]
    batch: int
    # Whole model: dense, all packed, compressed, and FUSED where convolutions gain by it, whether packed or not.
    seconds: dict[str, float] = field(default_factory=dict)
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
            others = [way for way in ("all packed", FUSED) if way in self.seconds]
            table.columns[7].footer = "; ".join(f"{way} {1e6 * self.seconds[way]:,.1f} µs" for way in others)
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

    Linear, Conv2d and LSTM layers are packed where that is faster than the dense layer on this machine for the
    `example`, a batch or the shape of one sample; without one a linear layer and an LSTM are timed on one vector. A
    ReLU that follows a layer in a Sequential is part of it: packed layers do it themselves, and on a GPU convolutions
    that stay dense, where cuDNN's one kernel for both is faster. Where the model is larger than the last cache its
    layers find their weights in memory, and so they are timed with emptied caches. On a GPU the device's time decides,
    as in a CUDA graph; what the whole model takes as it is called is told beside it. `keep="all"` packs all that is
    sparse. Blocks are found in the weights unless `block` names their width. `dtype` stores the values as another kind,
    such as torch.float16. `patience` is how many seconds the whole model is timed for, and each layer a third of that.
    """
    if keep not in KEEP:
        raise unknown_name_error("keep", keep, KEEP)
    require(dtype is None or dtype in DTYPES, f"values are stored as float32, float16 or bfloat16, got {dtype}.")
    dense = unwrap(model)
    batch = None if example is None else example if isinstance(example, Tensor) else zeros(dense, example)
    full = without(dense, [name for name, module in dense.named_modules() if isinstance(module, Conv2dReLU)])
    inputs = {} if batch is None else watch(full, batch)
    before, relus = emptier(dense), {layer: siblings[relu] for layer, siblings, relu in followers(full)}
    layers = []
    for name, module in list(candidates(full)):
        given, relu = inputs.get(name), relus.get(module)
        layer, packed = consider(name, module, relu, block, dtype, given, keep, before, patience / 3)
        layers.append(layer)
        if packed is not None:
            full = swap(full, module, packed)
    gain = [layer.name for layer in layers if layer.saved]
    fuse(full, gain)
    result = fuse(without(full, [layer.name for layer in layers if not layer.packed]), gain)
    seconds: dict[str, float] = {}
    called: dict[str, float] = {}
    if batch is not None and any(layer.seconds or layer.saved for layer in layers):
        sides = {"dense": dense, "all packed": full, "compressed": result}
        if gain:
            sides[FUSED] = fuse(without(full, [layer.name for layer in layers]), gain)
        seconds, called = whole(sides, batch, patience)
        best = min((way for way in ("dense", FUSED) if way in sides), key=seconds.__getitem__)
        if keep == "faster" and seconds["compressed"] > NOISE * seconds[best]:  # layers gain alone, not together
            layers = [undo(layer, best == FUSED) for layer in layers]
            result = copy.deepcopy(sides[best])
            for times in filter(None, (seconds, called)):
                times["compressed"] = times[best]
    caches, count = "warm" if before is None else "cold", 1 if batch is None else len(batch)
    result.compression = Compression(tuple(layers), count, seconds, called, caches)  # type: ignore
    return result


def emptier(model: nn.Module) -> Callable[[], None] | None:
    """What empties the caches, for a model that the last of them cannot hold."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    device = next((t.device for t in tensors), torch.device("cpu"))
    return emptying(device) if sum(t.nbytes for t in tensors) > last_cache(device) else None


def undo(layer: Layer, fused: bool) -> Layer:
    """The record of a layer that is dense after all, with its ReLU in the same kernel or not."""
    saved = layer.saved if fused else 0.0
    reason = layer.reason.removesuffix(TOGETHER) + ALONE * layer.packed + TOGETHER * (saved > 0)
    return replace(layer, packed=False, reason=reason, saved=saved)


def without(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """A copy of a compressed model in which the layers of these names are dense, and do nothing else."""
    model = copy.deepcopy(model)
    for name in names:
        if isinstance(layer := model.get_submodule(name), (Packed, Conv2dReLU)):
            model = restore(model, layer)
    return model


@torch.no_grad()
def decompress(model: nn.Module) -> nn.Module:
    """A copy of a compressed model with plain dense layers again."""
    ours = [name for name, module in model.named_modules() if isinstance(module, (Packed, Conv2dReLU))]
    plain = without(model, ours)
    vars(plain).pop("compression", None)
    return plain


def consider(
    name: str,
    module: nn.Module,
    relu: nn.Module | None,
    block: int | None,
    dtype: torch.dtype | None,
    given: Any,
    keep: str,
    before: Callable[[], None] | None,
    patience: float,
) -> tuple[Layer, Packed | None]:
    """The packed form of a layer where it has one, and the record of what becomes of it. `relu` is what follows it."""
    weights = {leaf: p.detach() for leaf, p in module.named_parameters() if leaf.startswith("weight")}
    sparsity = 1 - sum(int(w.count_nonzero()) for w in weights.values()) / sum(w.numel() for w in weights.values())
    first = next(iter(weights.values()))
    record: dict[str, Any] = {
        "name": name,
        "kind": type(module).__name__,
        "shape": tuple(first.shape),
        "sparsity": sparsity,
    }
    refusal = refuse(module, first)
    packs = {} if refusal else pack(weights, block, dtype)
    packed = make(module, packs) if packs else None
    if isinstance(packed, Weighted):
        packed.relu = relu is not None
    times = time_layer(module, packed, relu, first, given, before, patience)
    dense = min((times[way] for way in ("dense", "fused") if way in times), default=0.0)
    record["saved"] = times.get("dense", 0.0) - dense
    together = TOGETHER * (record["saved"] > 0)
    if packed is None:
        few = f"{sparsity:.0%} zeros are too few" if sparsity < SPARSE else "no blocks with equal counts were found"
        return Layer(**record, packed=False, reason=(refusal or few) + together), None
    main = next(iter(packs.values()))
    bytes_ = (
        sum(w.nbytes for w in weights.values()),
        sum(packs[leaf].nbytes if leaf in packs else w.nbytes for leaf, w in weights.items()),
    )
    seconds = (dense, times["packed"]) if times else None
    record |= {"block": main.block, "kept": main.kept, "bytes": bytes_, "seconds": seconds}
    if seconds is None or keep == "all" or seconds[1] < seconds[0]:
        why = "packed" if seconds is None else f"{seconds[0] / seconds[1]:.1f}× faster"
        return Layer(**record, packed=True, reason=why), packed
    return Layer(**record, packed=False, reason="dense is faster here" + together), packed


def pack(weights: dict[str, Tensor], block: int | None, dtype: torch.dtype | None) -> dict[str, BalancedTensor]:
    """The packed forms of those weights of a layer that gain by it."""
    packs = {}
    for leaf, weight in weights.items():
        if weight.count_nonzero() <= (1 - SPARSE) * weight.numel():
            packed = BalancedTensor.from_dense(weight, find_block(weight) if block is None else block)
            # Where the blocks differ in count, the fullest decides how much is stored of each.
            if packed.values[:1, :, :, 0].numel() <= (1 - SPARSE) * packed.matrix[1]:
                packs[leaf] = packed.to(dtype or weight.dtype)
    return packs


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
    rows, columns = matrix_shape(weight.shape)
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
    dense: nn.Module,
    packed: Packed | None,
    relu: nn.Module | None,
    weight: Tensor,
    given: Any,
    before: Callable[[], None] | None,
    patience: float,
) -> dict[str, float]:
    """Seconds on the input that was seen, or on one vector: dense, packed, and fused where cuDNN does the ReLU, too.

    Nothing is told where there is nothing to choose, and of a convolution of unknown images. The ReLU that follows is
    part of every time; where images have their channels last, so is giving them back that way for the packed layer.
    """
    if given is None:
        if isinstance(dense, nn.Conv2d):
            return {}
        size = weight.shape[1]
        given = (torch.randn(1, *([1] * isinstance(dense, nn.LSTM)), size).to(weight),)
    ways = {"dense": dense}
    if relu is not None and Conv2dReLU.takes(dense) and (fused := Conv2dReLU.of(dense)).at_once(*given):
        ways["fused"] = fused
    if packed is not None:
        ways["packed"] = packed
    if len(ways) == 1:
        return {}
    modes = {way: layer.training for way, layer in ways.items()}
    for layer in ways.values():
        layer.eval()
    turn = isinstance(dense, nn.Conv2d) and channels_last(dense(*given))

    def plain() -> Any:
        y = dense(*given)
        return y if relu is None else relu(y)

    def small() -> Any:
        y = packed(*given)  # type: ignore[misc]
        return y.contiguous(memory_format=torch.channels_last) if turn else y

    sides = {"dense": plain, "fused": lambda: fused(*given), "packed": small}
    taken = race([sides[way] for way in ways], weight.device, before=before, patience=patience)
    for way, layer in ways.items():
        layer.train(modes[way])
    return dict(zip(ways, taken, strict=True))


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


def followers(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any], str]]:
    """Every layer in one place alone, with a ReLU behind it in a Sequential: it, its siblings, the ReLU's name."""
    for container in [m for m in model.modules() if type(m) is nn.Sequential]:
        for one, other in pairwise(container._modules):
            layer = container._modules[one]
            if type(container._modules[other]) is nn.ReLU and len(list(places(model, layer))) == 1:
                yield layer, container._modules, other


def fuse(model: nn.Module, convolutions: Collection[str] = ()) -> nn.Module:
    """Let packed layers, and the dense convolutions of these names, do the ReLU that follows them in a Sequential."""
    chosen = {model.get_submodule(name) for name in convolutions}
    for layer, siblings, relu in list(followers(model)):
        if isinstance(layer, Weighted):
            layer.relu = True
        elif layer in chosen and Conv2dReLU.takes(layer):
            swap(model, layer, Conv2dReLU.of(layer))
        else:
            continue
        siblings[relu] = Fused(siblings[relu])
    return model


def restore(model: nn.Module, layer: Packed | Conv2dReLU) -> nn.Module:
    """Put the dense layer back, and the ReLU that it had taken over."""
    for siblings, leaf in places(model, layer):
        following = dict(pairwise(siblings)).get(leaf, leaf)
        if isinstance(fused := siblings[following], Fused):
            siblings[following] = nn.ReLU(fused.inplace)
    return swap(model, layer, layer.dense())
