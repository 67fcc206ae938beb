"""Physical removal: a filter-pruned network becomes a smaller dense one with the same outputs.

Torch-Pruning's dependency graph says which channels are coupled: those that are added, concatenated and
normalised on their way from the layers that make them to the layers that read them. A channel whose
makers all hold zeros has one value for every input, and one forward pass shows it to us at its readers:

- zero: the channel goes;
- another constant, which a batch norm or a bias makes of nothing: of all such channels of a group one
  stays and speaks for the others, whose weights in the readers are added to its own. That is exact at
  the borders of a padded convolution too, where a bias is not.
"""

from __future__ import annotations

import copy
import io
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_leaves

from ..core.targets import output_dim, unwrap
from ..errors import PomonaError, require
from ..models.resnet_cifar import PadShortcut, ResidualBlock
from ..models.summary import make_example_batch as zeros
from ..models.summary import summary

LAYERS = (_ConvNd, nn.Linear)
NORMS = (_BatchNorm, _InstanceNorm)  # those that treat every channel for itself
ROUNDING = 1e4  # times the type's epsilon: what sums in another order may differ by, through many layers
WARMUP, REPEATS, PATIENCE = 5, 501, 3.0  # latency: turns, and the seconds after which there are no more


class Change(NamedTuple):
    """A number before and after."""

    before: float
    after: float

    @property
    def ratio(self) -> float:
        """How many times smaller it has become."""
        return self.before / self.after


@dataclass(frozen=True)
class Shrunk:
    """A smaller model, and how it differs from the one it was made of."""

    model: nn.Module = field(repr=False)
    params: Change
    macs: Change  # of one sample
    removed: dict[str, Change]  # layer → its output channels
    kept: dict[str, str]  # layer → which zero channels it still has, and why
    difference: float  # the largest between the outputs of the two on the example
    latency: Change | None = None  # milliseconds for the example on one CPU thread, where asked for

    def facts(self) -> dict[str, Any]:
        """Everything but the model, as plain values."""
        return {
            "params": self.params._asdict(),
            "macs": self.macs._asdict(),
            "latency_ms": self.latency and self.latency._asdict(),
            "difference": self.difference,
            "removed": {name: change._asdict() for name, change in self.removed.items()},
            "kept": dict(self.kept),
        }

    def __rich__(self) -> Table:
        table = Table("layer", show_footer=True)
        totals = {"parameters": self.params, "MACs": self.macs}
        rows = [(name, f"{c.before:,}", f"{c.after:,}", f"{c.ratio:.2f}×") for name, c in totals.items()]
        if self.latency is not None:
            before, after = self.latency
            rows.append(("milliseconds", f"{before:.2f}", f"{after:.2f}", f"{self.latency.ratio:.2f}×"))
        footers = ["\n".join(column) for column in zip(*rows, strict=True)]
        table.columns[0].footer = footers[0]
        for title, footer in zip(("channels", "left"), footers[1:], strict=False):
            table.add_column(title, footer=footer, justify="right", no_wrap=True)
        table.add_column("zero channels that stay", footer=footers[3])
        for name in [n for n, _ in self.model.named_modules() if n in self.removed or n in self.kept]:
            counts = self.removed.get(name, ("", ""))
            table.add_row(name, *map(str, counts), self.kept.get(name, ""))
        return table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=140, color_system=None)
        console.print(self)
        return console.file.getvalue()  # type: ignore[attr-defined]


@torch.no_grad()
def shrink(model: nn.Module, example: Tensor | Sequence[int], *, latency: bool = False) -> Shrunk:
    """A smaller copy of a filter-pruned model, without the channels that contribute nothing.

    `example` is a batch, or the shape of one sample, such as (3, 32, 32). In evaluation mode the copy
    gives the model's outputs to rounding, which is checked on the example; the model stays as it is.
    With `latency` both are timed on the example.
    """
    model = unwrap(model)
    batch = example if isinstance(example, Tensor) else noise(zeros(model, example))
    before = summary(model, batch)  # which also refuses an example that does not fit
    small = copy.deepcopy(model).eval().requires_grad_(True)
    expected = small(batch)
    with refusing(model):
        open_pads(small)
        groups = find_groups(small, batch)
        settle(groups, small, noise(batch))
        removed, kept = report(groups, model, small)
        require(bool(removed), nothing(model, before.sparsity, kept))
        for group in groups:
            group.remove()
        close_pads(small)
        difference = compare(expected, small(batch))
    restore(small, model)
    after = summary(small, batch)
    times = Change(*(1000 * t for t in seconds([model, small], batch))) if latency else None
    params, macs = Change(before.params, after.params), Change(before.macs, after.macs)
    return Shrunk(small, params, macs, removed, kept, difference, times)


def settle(groups: Sequence[Group], model: nn.Module, batch: Tensor) -> None:
    """Decide what goes, and let one channel speak for those whose constants must not be lost."""
    seen = observe(model, batch)
    for group in groups:
        group.judge(seen)
        group.raise_voice()
    heard = observe(model, batch)
    for group in groups:
        group.merge(seen, heard)


# ---- coupled channels

Values = dict[nn.Module, Tensor]  # what each layer reads in each of its input channels; NaN where that varies


@dataclass(frozen=True)
class Member:
    """A layer's part in a group: its channel `channels[i]` belongs to the group's channel `roots[i]`."""

    module: nn.Module
    channels: Tensor
    roots: Tensor

    def of(self, root: int) -> Tensor:
        """The layer's channels that belong to one of the group: several where an image was flattened."""
        return self.channels[self.roots == root].sort().values

    def weight(self, outputs: bool = False) -> Tensor:
        """A view of the layer's weight with a row for each input, or each output."""
        rows = output_dim(self.module)
        return self.module.weight.detach().movedim(rows if outputs else 1 - rows, 0)  # type: ignore

    def empty(self, outputs: bool = False) -> Tensor:
        """Which of its channels have no weight but zeros."""
        return ~self.weight(outputs).flatten(1).any(1).cpu()[self.channels]

    @property
    def whole(self) -> bool:
        """Whether all outputs of the layer belong to the group."""
        return len(self.channels) == len(self.weight(outputs=True))


@dataclass
class Group:
    """Channels that only go together, the layers that make, normalise and read them, and their fate."""

    size: int
    makers: list[Member]
    norms: list[Member]
    readers: list[Member]
    obstacle: str | None  # why all must stay
    prune: Callable[[list[int]], None]
    dead: Tensor = field(init=False)  # no maker gives them anything that depends on the input
    gone: Tensor = field(init=False)  # those that go
    leaks: Tensor = field(init=False)  # dead ones that are a constant at some reader
    spared: Tensor = field(init=False)  # those that stay for a layer's sake
    speaker: int | None = None  # the one of them that stays for all
    undo: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def everywhere(self, members: Sequence[Member], test: Callable[[Member], Tensor]) -> Tensor:
        """The channels that pass in every member."""
        passed = torch.ones(self.size, dtype=torch.bool)
        for member in members:
            passed[member.roots[~test(member)]] = False
        return passed

    def judge(self, seen: Values) -> None:
        """Find the channels that contribute nothing, and those that contribute a constant."""
        self.dead = self.everywhere(self.makers, lambda maker: maker.empty(outputs=True))
        self.spared = torch.zeros_like(self.dead)
        if self.obstacle is not None:
            self.gone = self.leaks = torch.zeros_like(self.dead)
            return

        def silent(reader: Member) -> Tensor:
            values = seen[reader.module][reader.channels]
            # A running mean that decays towards zero stops among the subnormal numbers.
            nothing = self.dead[reader.roots] & (values.abs() < torch.finfo(values.dtype).tiny)
            return nothing | reader.empty()

        self.gone = self.everywhere(self.readers, silent)
        steady = self.everywhere(self.readers, lambda reader: seen[reader.module][reader.channels].isfinite())
        self.leaks = self.dead & steady & ~self.gone
        if self.leaks.sum() > 1:
            self.speaker = self.loudest(seen)
        self.spare()

    def loudest(self, seen: Values) -> int:
        """The constant channel that is strongest where it is weakest."""
        volume = torch.full((self.size,), torch.inf, dtype=torch.float64)
        for reader in self.readers:
            volume.scatter_reduce_(0, reader.roots, seen[reader.module][reader.channels].abs().double(), "amin")
        return int(volume.where(self.leaks, -1.0).argmax())

    def spare(self) -> None:
        """Leave every layer a channel."""
        going = self.gone.clone()
        if self.speaker is not None:
            going |= self.leaks
            going[self.speaker] = False
        for maker in self.makers:
            if maker.whole and going[maker.roots].all():
                first = maker.roots[0]
                going[first] = self.gone[first] = self.leaks[first] = False
                self.spared[first] = True

    def raise_voice(self) -> None:
        """Have the norms make a constant one of the speaker, so that every reader sees it."""
        for norm in self.norms if self.speaker is not None else ():
            at, module = norm.of(self.speaker), norm.module  # type: ignore
            voice: list[tuple[Any, Any]] = []
            if module.affine:
                voice = [(module.weight, 0.0), (module.bias, 1.0)]
            elif module.running_mean is not None:
                voice = [(module.running_mean, -(module.running_var[at] + module.eps).sqrt())]  # type: ignore
            for tensor, value in voice:
                self.undo.append((tensor, at, tensor[at].clone()))
                tensor[at] = value

    def merge(self, seen: Values, heard: Values) -> None:
        """Add the weights of all constant channels to the speaker's, so that the others can go."""
        if self.speaker is None:
            return
        others = [root for root in self.leaks.nonzero().flatten().tolist() if root != self.speaker]
        sums = []
        for reader in self.readers:
            rows = reader.weight().cpu().double()
            every = [reader.of(root) for root in (self.speaker, *others)]
            parts = [rows[at] * like(rows, seen[reader.module][at]) for at in every]
            total, voice = torch.stack(parts).sum(0), heard[reader.module][every[0]]
            if total[(voice == 0) | voice.isnan()].any():  # nobody would hear: all stay as they were
                for tensor, where, value in self.undo:
                    tensor[where] = value
                self.speaker = None
                return
            sums.append((reader.weight(), every[0], total / like(rows, voice.where(voice != 0, 1.0))))
        for weight, at, total in sums:
            weight[at] = total.to(weight)
        self.gone[others] = True

    def remove(self) -> None:
        """Cut the channels out of every layer."""
        if self.gone.any():
            self.prune(self.gone.nonzero().flatten().tolist())


def like(rows: Tensor, values: Tensor) -> Tensor:
    """One value for each row, in a shape that can be multiplied with them."""
    return values.double().view(-1, *[1] * (rows.ndim - 1))


def find_groups(model: nn.Module, batch: Tensor) -> list[Group]:
    """The groups of Torch-Pruning's dependency graph."""
    pruning = library()
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = pruning.DependencyGraph().build_dependency(model, batch, verbose=False)
        return [read_group(graph, group, batch.ndim) for group in graph.get_all_groups()]


def read_group(graph: Any, group: Any, ndim: int) -> Group:
    """A group of the library's as we use it."""
    root, handler = group[0].dep.target.module, group[0].dep.handler
    makers: list[Member] = []
    norms: list[Member] = []
    readers: list[Member] = []
    obstacles: list[str | None] = []
    for item in group:
        node, module = item.dep.target, item.dep.target.module
        member = Member(module, torch.tensor(item.idxs), torch.tensor(item.root_idxs))
        reads = isinstance(module, LAYERS) and graph.is_in_channel_pruning_fn(item.dep.handler)
        if isinstance(module, LAYERS):
            (readers if reads else makers).append(member)
        elif isinstance(module, NORMS):
            norms.append(member)
        obstacles.append(obstacle(node, ndim))
        if not reads and not node.outputs:
            obstacles.append("they are the model's output")
    if not readers:
        obstacles.append("no layer reads them")
    return Group(
        size=len(group[0].idxs),
        makers=makers,
        norms=norms,
        readers=readers,
        obstacle=next(filter(None, obstacles), None),
        prune=lambda channels: graph.get_pruning_group(root, handler, channels).prune(),
    )


def obstacle(node: Any, ndim: int) -> str | None:
    """Why channels that pass this node of the graph cannot be removed one by one."""
    kinds, module = library().ops.OPTYPE, node.module
    if node.type == kinds.OUTPUT:
        return "they are the model's output"
    if isinstance(module, _ConvNd):
        return "a grouped convolution reads or makes them" if module.groups > 1 else None
    if node.type == kinds.SLICE:
        return "the forward pass picks some by number" if module.dim == 1 else None
    if node.type == kinds.ELEMENTWISE and "ConstantPad" in str(module):
        across = any(node.grad_fn._saved_pad[2 * (ndim - 2) :])
        return "the forward pass adds channels of zeros" if across else None
    easy = (kinds.LINEAR, kinds.BN, kinds.IN, kinds.PRELU, kinds.CONCAT, kinds.ELEMENTWISE, kinds.RESHAPE)
    return None if node.type in easy else f"{type(module).__name__.strip('_')} mixes them with others"


def observe(model: nn.Module, batch: Tensor) -> Values:
    """What the layers read in each input channel, where it is the same for all samples and places."""
    values: Values = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        channels = inputs[0].movedim(-1 if isinstance(module, nn.Linear) else 1, 0).flatten(1)
        low, high = channels.aminmax(dim=1)
        # The head and the tail of a vectorised loop may round the same number in two ways.
        steady = high - low <= 64 * torch.finfo(low.dtype).eps * torch.maximum(low.abs(), high.abs())
        now = high.where(steady, torch.nan).cpu()
        values[module] = now.where(values.get(module, now) == now, torch.nan)

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, LAYERS)]
    try:
        model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return values


def report(groups: Sequence[Group], model: nn.Module, small: nn.Module) -> tuple[dict[str, Change], dict[str, str]]:
    """How many channels each layer loses, and which zero channels stay, in the model's order."""
    lost: Counter[nn.Module] = Counter()
    stay: dict[nn.Module, Counter[str]] = defaultdict(Counter)
    for group in groups:
        for maker in group.makers:
            lost[maker.module] += int(group.gone[maker.roots].sum())
            stay[maker.module].update(why(group, maker))
    removed, kept = {}, {}
    for name, _ in model.named_modules():
        module = small.get_submodule(name)
        if lost[module]:
            weight: Tensor = module.weight  # type: ignore[assignment]
            channels = weight.shape[output_dim(module)]
            removed[name] = Change(channels, channels - lost[module])
        if stay[module]:
            kept[name] = "; ".join(f"{count} {reason}" for reason, count in stay[module].items())
    return removed, kept


def why(group: Group, maker: Member) -> dict[str, int]:
    """How many of a layer's zero channels stay, for each reason."""
    stay = maker.empty(outputs=True) & ~group.gone[maker.roots]
    dead, spared = group.dead[maker.roots], group.spared[maker.roots]
    if group.obstacle is not None:
        cases = {f"because {group.obstacle}": stay}
    else:
        speaks = maker.roots == (-1 if group.speaker is None else group.speaker)
        cases = {
            "coupled with channels that are not zero": stay & ~dead,
            "in place of all that are constant": stay & speaks,
            "constant, by a batch norm or a bias": stay & dead & ~spared & ~speaks,
            "so that the layer has a channel": stay & spared,
        }
    return {reason: int(which.sum()) for reason, which in cases.items() if which.any()}


def nothing(model: nn.Module, sparsity: float, kept: dict[str, str]) -> str:
    """What is said where no channel can go."""
    name = type(model).__name__
    if not kept:
        return (
            f"nothing to remove: {name} has {sparsity:.0%} zeros but no whole channel is zero; "
            "prune with pattern=Filter()."
        )
    layer, reason = next(iter(kept.items()))
    return f"nothing to remove: {name} has zero channels in {len(kept)} layers, but all stay; {layer} has {reason}."


# ---- shortcut A


class Frame(nn.Module):
    """Shortcut A in a form the graph can follow: its new channels come from convolutions that hold zeros."""

    def __init__(self, pad: PadShortcut, channels: int, like: Tensor) -> None:
        super().__init__()
        self.pad, left = pad, pad.channels // 2
        self.left, self.right = (
            nn.Conv2d(channels, new, 1, bias=False, device=like.device, dtype=like.dtype)
            for new in (left, pad.channels - left)
        )
        for side in (self.left, self.right):
            nn.init.zeros_(side.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.pad.stride, :: self.pad.stride]
        return torch.cat((self.left(x), x, self.right(x)), 1)

    def close(self) -> nn.Module:
        """The shortcut without parameters again."""
        sides = self.left.out_channels, self.right.out_channels
        old = self.pad.channels // 2
        return self.pad if sides == (old, self.pad.channels - old) else Sides(self.pad.stride, *sides)


class Sides(nn.Module):
    """Shortcut A whose sides differ: every stride-th pixel, and zeros for the channels that are new."""

    def __init__(self, stride: int, left: int, right: int) -> None:
        super().__init__()
        self.stride, self.left, self.right = stride, left, right

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.left, self.right))


def open_pads(model: nn.Module) -> None:
    """Put frames in the place of our parameter-free shortcuts."""
    for block in model.modules():
        if isinstance(block, ResidualBlock) and isinstance(block.shortcut, PadShortcut):
            block.shortcut = Frame(block.shortcut, block.conv1.in_channels, block.conv1.weight)


def close_pads(model: nn.Module) -> None:
    """Take the frames away again."""
    for block in model.modules():
        if isinstance(block, ResidualBlock) and isinstance(block.shortcut, Frame):
            block.shortcut = block.shortcut.close()


# ---- before and after


def library() -> Any:
    """Torch-Pruning, which only this function needs."""
    try:
        import torch_pruning
    except ImportError as error:
        raise PomonaError("shrink needs Torch-Pruning, which is not installed: pip install torch-pruning.") from error
    return torch_pruning


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """Turn what fails in somebody else's forward pass, or in the library, into a refusal."""
    try:
        yield
    except PomonaError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PomonaError(
            f"{type(model).__name__} cannot be shrunk: Torch-Pruning does not follow its forward pass ({reason})."
        ) from error


def noise(batch: Tensor) -> Tensor:
    """Random numbers in the shape of a batch; token ids stay as they are."""
    if not batch.is_floating_point():
        return batch
    return torch.randn(batch.shape, generator=torch.Generator().manual_seed(0)).to(batch)


def compare(expected: Any, actual: Any) -> float:
    """The largest difference between two outputs, refused where rounding cannot explain it."""
    largest = 0.0
    for one, other in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        difference, scale = float((one - other).abs().max()), float(one.abs().max())
        allowed = ROUNDING * torch.finfo(one.dtype).eps * scale
        if not difference <= allowed:
            raise ValueError(f"outputs differ by {difference:.2g}, more than the {allowed:.2g} of rounding")
        largest = max(largest, difference)
    return largest


def restore(small: nn.Module, model: nn.Module) -> None:
    """Give a copy the modes of its modules and the parameters' requires_grad."""
    modes = {name: module.training for name, module in model.named_modules()}
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, module in small.named_modules():
        module.training = modes[name]
    for name, parameter in small.named_parameters():
        parameter.requires_grad_(trained[name])


@torch.no_grad()
def seconds(models: Sequence[nn.Module], batch: Tensor) -> list[float]:
    """The median time of each model for a batch, in turns, on one CPU thread."""
    models = [copy.deepcopy(model).cpu().eval() for model in models]
    batch, threads = batch.cpu(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times: list[list[float]] = [[] for _ in models]
        for repeat in range(-WARMUP, REPEATS):
            for model, taken in zip(models, times, strict=True):
                start = time.perf_counter()
                model(batch)
                if repeat >= 0:
                    taken.append(time.perf_counter() - start)
            if sum(times[0]) > PATIENCE:
                break
        return [statistics.median(taken) for taken in times]
    finally:
        torch.set_num_threads(threads)
