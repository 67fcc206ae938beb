"""The report of a shrunk model: what was removed, what stays and why, and what both models cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.table import Table
from torch import Tensor, nn

from ...core.targets import output_dim as find_output_dim
from ...table_view import TableView
from .channel_group import ChannelGroup, LayerChannels
from .unit_group import UnitGroup, count_columns


class Change(NamedTuple):
    """A number before and after shrinking."""

    before: float
    after: float

    @property
    def ratio(self) -> float:
        """Return how many times smaller the number has become."""
        return self.before / self.after


DIVIDED_INTO_HEADS = "because the forward pass divides them, as into heads"
Counts = tuple[dict[str, Change], dict[str, str]]  # `Shrunk.removed` and `Shrunk.kept`


@dataclass(frozen=True)
class Shrunk(TableView):
    """A shrunk model and how it differs from the model it was made from."""

    model: nn.Module = field(repr=False)
    params: Change
    macs: Change  # of one sample
    removed: dict[str, Change]  # layer → its number of output channels
    kept: dict[str, str]  # layer → how many zero channels it still has, and why
    difference: float  # largest absolute difference between the outputs of both models on the example
    latency: Change | None = None  # milliseconds for the example on one CPU thread, if measured

    def facts(self) -> dict[str, Any]:
        """Return everything but the model as values that JSON can hold."""
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

    def __repr__(self) -> str:
        params, macs = (f"{change.before:,} → {change.after:,}" for change in (self.params, self.macs))
        return f"<Shrunk: {params} parameters, {macs} MACs, channels removed from {len(self.removed)} layers>"


def count_channels(groups: Sequence[ChannelGroup], model: nn.Module, small: nn.Module) -> Counts:
    """Return `Shrunk.removed` and `Shrunk.kept`, in the order of the model's layers.

    The groups must be classified and not removed yet; `small` is the copy of `model` that they belong to.
    """
    removed_counts: Counter[nn.Module] = Counter()
    reason_counts: dict[nn.Module, Counter[str]] = defaultdict(Counter)
    for group in groups:
        for producer in group.producers:
            removed_counts[producer.module] += int(group.removed[producer.group_channels].sum())
            reason_counts[producer.module].update(count_remaining_by_reason(group, producer))
    removed, kept = {}, {}
    for name, _ in model.named_modules():
        module = small.get_submodule(name)
        if removed_counts[module]:
            weight: Tensor = module.weight  # type: ignore[assignment]
            channels = weight.shape[find_output_dim(module)]
            removed[name] = Change(channels, channels - removed_counts[module])
        if reason_counts[module]:
            kept[name] = "; ".join(f"{count} {reason}" for reason, count in reason_counts[module].items())
    return removed, kept


def count_remaining_by_reason(group: ChannelGroup, producer: LayerChannels) -> dict[str, int]:
    """Return how many zero channels of a layer stay, by the reason why they do."""
    remaining = producer.has_zero_weights(outputs=True) & ~group.removed[producer.group_channels]
    if group.obstacle is not None:
        cases = {f"because {group.obstacle}": remaining}
    else:
        input_independent = group.input_independent[producer.group_channels]
        only_channel = group.only_channel[producer.group_channels]
        representative = producer.group_channels == (-1 if group.representative is None else group.representative)
        cases = {
            "coupled with channels that are not zero": remaining & ~input_independent,
            "in place of all constant channels": remaining & representative,
            "constant because of a batch norm or a bias": (
                remaining & input_independent & ~only_channel & ~representative
            ),
            "so that the layer has a channel": remaining & only_channel,
        }
    return {reason: int(channels.sum()) for reason, channels in cases.items() if channels.any()}


def count_units(groups: Sequence[UnitGroup], model: nn.Module) -> Counts:
    """Return `Shrunk.removed` and `Shrunk.kept` of a transformer; the groups must be classified and not removed yet."""
    names = {module: name for name, module in model.named_modules()}
    removed: dict[str, Change] = {}
    kept: dict[str, str] = {}
    for group in groups:
        if group.removed.any():
            removed |= {names[layer]: Change(*sizes) for layer, sizes in group.count_outputs().items()}
        if group.constant.any():
            reason = f"constant, and {names[group.reader]} has no bias to take them"
            kept[names[group.values[-1].layer]] = f"{int(group.constant.sum())} {group.kind}s, {reason}"
        elif group.kind == "head":
            zeros = group.count_zero_outputs()
            kept |= {names[layer]: f"{count} {DIVIDED_INTO_HEADS}" for layer, count in zeros.items()}
    return removed, kept


def explain_no_unit_removed(model: nn.Module, groups: Sequence[UnitGroup]) -> str:
    """Return the error message for a transformer in which nothing can be removed."""
    names = {module: name for name, module in model.named_modules()}
    readers = {group.kind: (count_columns(group.reader) // group.units, names[group.reader]) for group in groups}
    advice = [f"{kind}s with pattern=Block((None, {n})) in '{name}'" for kind, (n, name) in readers.items()]
    return (
        f"nothing to remove: {type(model).__name__} has no attention head or neuron without effect; prune the layers "
        f"that read them, {' and '.join(advice)}."
    )


def explain_nothing_removed(model: nn.Module, sparsity: float, kept: dict[str, str]) -> str:
    """Return the error message for a model in which no channel can be removed."""
    name = type(model).__name__
    if not kept:
        return (
            f"nothing to remove: {name} has {sparsity:.0%} zeros but no whole channel is zero; "
            "prune with pattern=Filter()."
        )
    layer, reason = next(iter(kept.items()))
    return (
        f"nothing to remove: {name} has zero channels in {len(kept)} layers, but none of them can be removed; "
        f"{layer} has {reason}."
    )
