"""Charts of masks: the sparsity of each layer over time, how many entries flip, and when they settle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .charts import styled_runs
from .figures import Chart, Figure, compact, escape_text, layout, line_trace
from .run_data import Row, RunData, thin_updates
from .series import Group

MAX_CELLS = 600_000  # of all heat maps together: about three megabytes
UPDATE_LIMITS = 60, 600  # least and most mask updates that are shown of a run


def mask_charts(groups: Sequence[Group]) -> list[Chart]:
    """Return the charts of the masks of all runs that have mask updates."""
    limit = update_limit([run for group in groups for run in group.runs])
    thinned = {id(run): thin_updates(run.updates, limit) for group in groups for run in group.runs}
    flips, overlaps, settled = [], [], []
    for name, run, style in styled_runs(groups):
        updates, total = thinned[id(run)], sum(run.sizes.values())
        epochs = [row["step"] / run.steps_per_epoch for row in updates]
        if updates and total:
            shares = [100 * row["flips"] / total for row in updates]
            hover = "epoch %{x:.2f}: %{y:.3~g} % of the mask"
            flips.append(line_trace(epochs, shares, name, label=run.label, hover=hover, **style))
        if updates:
            ious = [row["iou"] for row in updates]
            hover = "epoch %{x:.2f}: IoU %{y:.4~g}"
            overlaps.append(line_trace(epochs, ious, name, label=run.label, hover=hover, **style))
        x, y, exact = run.settled()
        if x:
            stride = -(-len(x) // limit)
            hover = "epoch %{x:.2f}: " + "at least " * (not exact) + "%{y:.4~g} % settled"
            settled.append(line_trace(x[::stride], y[::stride], name, label=run.label, hover=hover, **style))
    charts = [
        layer_heatmaps(groups, thinned),
        final_layers(groups),
        Chart(
            "flips",
            "Mask flips",
            "Entries that one mask update changes, as a share of all entries.",
            {"": {"data": flips, "layout": layout("epoch", "entries changed, %", yaxis={"rangemode": "tozero"})}},
        ),
        Chart(
            "iou",
            "Overlap of consecutive masks",
            "Intersection over union of the kept weights before and after an update: 1 is no change.",
            {"": {"data": overlaps, "layout": layout("epoch", "IoU")}},
        ),
        Chart(
            "settled",
            "When weights settle",
            "The share of mask entries that never change after an epoch: exact for runs with train.track, for others a "
            "lower bound from the flips that follow.",
            {"": {"data": settled, "layout": layout("epoch", "settled entries, %", yaxis={"rangemode": "tozero"})}},
            wide=True,
        ),
    ]
    return [chart for chart in charts if chart.has_points]


def update_limit(runs: Sequence[RunData]) -> int:
    """Return how many mask updates of each run are shown, so that all heat maps together stay small."""
    layers = sum(len(run.layer_names) for run in runs)
    low, high = UPDATE_LIMITS
    return max(low, min(high, MAX_CELLS // max(layers, 1)))


def layer_heatmaps(groups: Sequence[Group], thinned: Mapping[int, Sequence[Row]]) -> Chart:
    """Return heat maps of the sparsity of each layer over the mask updates, given by the identity of their run."""
    choices: dict[str, Figure] = {}
    for run in sorted((run for group in groups for run in group.runs), key=lambda run: -len(run.updates)):
        updates = thinned[id(run)]
        if updates:
            rows = list(zip(*(row["layers"] for row in updates), strict=True))
            epochs = [row["step"] / run.steps_per_epoch for row in updates]
            choices[unique_label(run, choices)] = heatmap(epochs, run.layer_names, rows, "epoch", "epoch %{x:.2f}")
    caption = "From the input, above, to the output. Each column is a mask update; of very many, one in a group."
    return Chart("layers", "Sparsity of each layer over time", caption, choices, "Run", wide=True)


def final_layers(groups: Sequence[Group]) -> Chart:
    """Return heat maps of the final sparsity of each layer in the groups of a network that prune the same layers."""
    choices = {}
    for network in dict.fromkeys(group.network for group in groups):
        pruned = [g for g in groups if g.network == network and g.finished and g.finished[0].layers]
        names = list(pruned[0].finished[0].layers) if pruned else []
        same = [group for group in pruned if list(group.finished[0].layers) == names]
        if len(same) > 1:
            columns = [list(group.finished[0].layers.values()) for group in same]
            labels = [escape_text(group.label) for group in same]
            rows = list(zip(*columns, strict=True))
            choices[network] = heatmap(labels, names, rows, "", "%{x}")
    caption = "At the end of training, of the first seed of each setting."
    return Chart("final", "Where the pruned weights are", caption, choices, "Network", wide=True)


def heatmap(
    columns: Sequence[float] | Sequence[str],
    names: Sequence[str],
    rows: Sequence[Sequence[float]],
    x_title: str,
    hover: str,
) -> Figure:
    """Return a heat map of sparsities in per cent, a row for each layer."""
    labels = [escape_text(name.removesuffix(".weight")) for name in names]
    x = list(columns) if any(isinstance(one, str) for one in columns) else compact(columns)  # type: ignore[arg-type]
    trace = {
        "type": "heatmap",
        "x": x,
        "y": labels,
        "z": [[round(100 * value, 1) for value in row] for row in rows],
        "zmin": 0,
        "zmax": 100,
        "colorbar": {"ticksuffix": " %", "thickness": 12, "outlinewidth": 0},
        "hovertemplate": f"<b>%{{y}}</b><br>{hover}<br>%{{z:.1f}} % pruned<extra></extra>",
    }
    height = min(900, max(260, 20 * len(names) + 110))
    return {
        "data": [trace],
        "layout": layout(x_title, "", yaxis={"autorange": "reversed", "type": "category"}, height=height),
    }


def unique_label(run: RunData, taken: dict[str, Figure]) -> str:
    """Return the label of a run, with its folder where another run has the same label."""
    if run.label not in taken:
        return run.label
    place = f"{run.label} ({run.folder})"
    return place if place not in taken else f"{place} {len(taken)}"
