"""The history of mask updates: how many entries flip, how alike consecutive masks are, what pruning costs.

Nothing here changes a weight or a mask. Figures on a GPU stay there until `to_plain` reads them, so that an update
needs no host synchronization. On a CPU they become numbers at once: small tensors that live on keep the memory of large
ones around them from being returned. A long training keeps `MAX_ENTRIES` of its entries, dense at the end and sparser
towards the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import require
from ..masking import fill_pruned
from ..native import step
from ..sharding import sum_parts
from .method import TrainingProgress

if TYPE_CHECKING:
    from .fused.flat_buffers import FlatBuffers

MAX_COPIED_WEIGHTS = 1 << 22  # up to which an update on a CPU is measured at once; larger models layer by layer
MAX_ENTRIES = 10_000  # of a history; with one more, every second entry of the older half is dropped
COLUMNS = {"step": int, "sparsity": float, "delta": float, "flips": int, "iou": float}  # the figures of an entry
COLUMN_DTYPES = {int: torch.int64, float: torch.float64}


class UpdateHistory:
    """The entries of a training's mask updates, the latest and some of the earlier ones."""

    def __init__(self, entries: Sequence[dict[str, Any]] = (), count: int | None = None) -> None:
        self.entries = list(entries)
        self.count = len(self.entries) if count is None else count  # of all updates, with those that were dropped

    def append(self, entry: dict[str, Any]) -> None:
        """Append the entry of an update; an old entry may be dropped for it."""
        self.entries.append(entry)
        self.count += 1
        if len(self.entries) > MAX_ENTRIES:
            half = MAX_ENTRIES // 2
            self.entries = [*self.entries[:half:2], *self.entries[half:]]

    def read(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the entries as plain numbers, with layers in the order of `names`."""
        self.entries = [to_plain(entry, names) for entry in self.entries]
        return [dict(entry) for entry in self.entries]

    def to_columns(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the history for a checkpoint: a tensor for each figure, and one for the sparsity of all layers."""
        entries = self.read(names)
        columns = {
            key: torch.tensor([e[key] for e in entries], dtype=COLUMN_DTYPES[kind]) for key, kind in COLUMNS.items()
        }
        layers = torch.tensor([e["layers"] for e in entries], dtype=torch.float64).view(len(entries), len(names))
        return {"count": self.count, **columns, "layers": layers}

    @classmethod
    def from_state(cls, saved: Any, layers: int) -> UpdateHistory:
        """Return the history of a checkpoint, also of an older one, which has a list of entries.

        Raise PomonaError where it is not one of so many layers.
        """
        damaged = "the pruner's state is damaged: its history is not that of this model; use an earlier checkpoint."
        if isinstance(saved, list):
            require(all(isinstance(e, dict) and {*COLUMNS, "layers"} <= e.keys() for e in saved), damaged)
            return cls([dict(entry) for entry in saved[-MAX_ENTRIES:]], len(saved))
        require(isinstance(saved, Mapping) and {*COLUMNS, "layers", "count"} <= saved.keys(), damaged)
        columns = {key: saved[key] for key in (*COLUMNS, "layers")}
        kinds = COLUMNS | {"layers": float}
        valid = all(isinstance(c, Tensor) and c.dtype == COLUMN_DTYPES[kinds[key]] for key, c in columns.items())
        require(valid and type(saved["count"]) is int, damaged)
        rows = len(columns["step"]) if columns["step"].ndim == 1 else -1
        require(rows <= saved["count"] and columns["layers"].shape == (rows, layers), damaged)
        require(all(columns[key].shape == (rows,) for key in COLUMNS), damaged)
        lists = {key: column.tolist() for key, column in columns.items()}
        return cls([{key: values[i] for key, values in lists.items()} for i in range(rows)], saved["count"])


def observe_update(
    buffers: Sequence[FlatBuffers], before: Sequence[Tensor], progress: TrainingProgress, sparsity: float
) -> dict[str, Any]:
    """Return the history entry of an update, given the masks `before` it (of `updates.snapshot_masks`).

    Where mask entries are tracked, the step at which each last changed is noted.
    """
    parts = [
        {
            "names": group.names,
            "sizes": [slot.parameter.numel() for slot in group.targets],
            "figures": to_numbers(measure(group, old)),
        }
        for group, old in zip(buffers, before, strict=True)
        if group.targets
    ]
    for group, old in zip(buffers, before, strict=True):
        group.track_flips(old, progress.step)
    return {"step": progress.step, "sparsity": sparsity, "parts": parts}


def is_finite(entry: dict[str, Any]) -> bool:
    """Return whether the weights of an entry have a finite norm; on a GPU, where nobody has read it yet, assume so."""
    lists = [part["figures"] for part in entry["parts"] if isinstance(part["figures"][0], list)]
    return all(math.isfinite(figures[-1][0]) for figures in lists)


def measure(buffers: FlatBuffers, before: Tensor) -> Tensor | list[Tensor]:
    """Return an update's figures: the kept count of each target, then flips, kept before, ‖w − w̃‖ and ‖w‖."""
    fused = buffers.measure_update()
    if buffers.is_sharded:
        return measure_shards(buffers, measure_parts(buffers, before) if fused is None else fused)
    if fused is not None:
        return fused
    mask, norms = buffers.target_mask, [total[None] for total in weight_norms(buffers)]
    if mask.device.type == "cpu":
        parts = zip(mask.split(buffers.sizes), before.split(buffers.sizes), strict=True)
        kept, kept_before, flips = torch.tensor([count_changes(*part) for part in parts]).unbind(1)
        return [kept, flips.sum()[None], kept_before.sum()[None], *norms]
    kept_up_to = mask.cumsum(0)[buffers.last_entries]
    totals = (before ^ mask).sum()[None], before.sum()[None]
    return [kept_up_to.diff(prepend=kept_up_to.new_zeros(1)), *totals, *norms]


def measure_shards(buffers: FlatBuffers, own: Tensor) -> list[Tensor]:
    """Return the figures of `measure` over all ranks among which the weights are divided, given those of this rank."""
    squares = torch.cat([own[:3], own[3:] ** 2]).t().contiguous()
    figures = sum_parts(squares, [slot.parameter for slot in buffers.targets])
    return [figures[:, 0], *(total[None] for total in (*figures[:, 1:3].sum(0), *figures[:, 3:].sum(0).sqrt()))]


def measure_parts(buffers: FlatBuffers, before: Tensor) -> Tensor:
    """Return kept entries, flips, entries kept before, ‖w − w̃‖ and ‖w‖ of this rank's part of each target."""
    rows = []
    for slot, old in zip(buffers.targets, before.split(buffers.sizes), strict=True):
        old = old.as_strided(slot.mask.shape, slot.mask.stride(), old.storage_offset())
        counts = [slot.mask.count_nonzero(), (slot.mask ^ old).count_nonzero(), old.count_nonzero()]
        dense = slot.dense.detach()
        norms = norm(dense - slot.projected()), norm(dense)
        rows.append(torch.stack([figure.double() for figure in (*counts, *norms)]))
    return torch.stack(rows, 1)


def count_changes(mask: Tensor, before: Tensor) -> tuple[int, int, int]:
    """Return how many entries are set in a mask on the CPU, in the one before, and in just one of them."""
    counts = step.count_changes(mask, before)
    return counts or tuple([int(m.count_nonzero()) for m in (mask, before, mask ^ before)])  # type: ignore[return-value]


def weight_norms(buffers: FlatBuffers) -> tuple[Tensor, Tensor]:
    """Return ‖w − w̃‖ and ‖w‖ over the targets."""
    flat = buffers.latent if buffers.weight is None else buffers.weight
    if flat is not None and buffers.projection_is_mask and (flat.is_cuda or buffers.count <= MAX_COPIED_WEIGHTS):
        dense = flat[: buffers.count]
        return norm(fill_pruned(dense, ~buffers.target_mask, 0)), norm(dense)
    losses = []
    for slot in buffers.targets:
        projected = slot.projected()
        losses.append(norm(torch.sub(slot.dense.detach(), projected, out=projected)))
    whole = [norm(slot.dense.detach()) for slot in buffers.targets]
    return norm(torch.stack(losses)), norm(torch.stack(whole))


def norm(x: Tensor) -> Tensor:
    """Return ‖x‖ in a dtype in which its square does not overflow."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))


def to_plain(entry: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an entry of `observe_update` as plain numbers, with layers in the order of `names`."""
    if "parts" not in entry:
        return entry
    parts = [[part["names"], part["sizes"], *to_lists(part["figures"])] for part in entry["parts"]]
    found, sizes, kept, *rows = ([one for part in parts for one in part[i]] for i in range(7))
    flips, before = (int(sum(row)) for row in rows[:2])
    lost, whole = (sum(norm**2 for norm in row) for row in rows[2:])
    kept_of = dict(zip(found, zip(kept, sizes, strict=True), strict=True))
    common = int(sum(kept)) + before - flips  # 2 |A ∩ B|, from |A|, |B| and |A △ B|
    return {
        "step": entry["step"],
        "sparsity": entry["sparsity"],
        "delta": lost / whole if whole else 0.0,
        "flips": flips,
        "iou": common / (common + 2 * flips) if common + flips else 1.0,
        "layers": [1 - kept_of[name][0] / kept_of[name][1] for name in names],
    }


Figures = Tensor | list[Tensor] | list[list[float]]


def to_numbers(figures: Tensor | list[Tensor]) -> Figures:
    """Return figures on the CPU as numbers, and those on another device as they are."""
    first = figures if isinstance(figures, Tensor) else figures[0]
    return to_lists(figures) if first.device.type == "cpu" else figures


def to_lists(figures: Figures) -> list[list[float]]:
    """Return figures as lists on the host."""
    if isinstance(figures, Tensor):
        return figures.tolist()
    return [figure.tolist() if isinstance(figure, Tensor) else figure for figure in figures]


def settled_shares(last_flips: Sequence[Tensor], steps_per_epoch: int) -> list[float]:
    """Return the share of mask entries that never change after epoch 0, 1, 2, … (Figure 4 of Lin et al., 2020)."""
    last = torch.cat([flips.flatten() for flips in last_flips])
    epochs = torch.div(last + steps_per_epoch - 1, steps_per_epoch, rounding_mode="floor")
    return (torch.bincount(epochs).cumsum(0) / len(last)).tolist()
