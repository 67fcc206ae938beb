"""Write the figures of docs/durability.md: faults, fuzzed inputs, long and large runs, draws of ranks, image readers.

python benchmarks/pages/durability_page.py
"""

from __future__ import annotations

from collections.abc import Sequence

from page_helpers import (
    DOCS,
    NOT_MEASURED,
    Record,
    fill_page,
    format_sources,
    format_table,
    read_records,
    write_page,
)

PAGE = DOCS / "durability.md"
RECORD = "chaos.json"
READERS = {
    "loader": "`torch.utils.data.DataLoader` with Pillow",
    "loader_bytes": "the same, normalized in batches",
    "stream_pillow": "pomona with Pillow",
    "stream": "pomona with simplejpeg",
}


def format_faults(records: Sequence[Record]) -> str:
    """Return how many faults of each kind were injected, survived and lost."""
    rows: list[list[str]] = []
    for record in records:
        faults = record["faults"]
        kinds = sorted(faults["kinds"].items(), key=lambda pair: (-pair[1], pair[0]))
        rows += [[kind, f"{count:,}"] for kind, count in kinds]
        totals = f"**{faults['injected']:,} injected, {faults['survived']:,} survived, {faults['lost']:,} lost**"
        rows.append([totals, f"in {faults['seconds'] / 60:.0f} minutes"])
    return format_table(["fault", "times"], rows)


def format_subjects(records: Sequence[Record]) -> str:
    """Return how many runs of each kind met the faults."""
    rows = [
        [kind, f"{counts['cases']:,}", f"{counts['faults']:,}", f"{counts['lost']:,}"]
        for record in records
        for kind, counts in record["faults"]["subjects"].items()
    ]
    return format_table(["what was harmed", "times begun", "faults", "lost"], rows)


def format_fuzz(records: Sequence[Record]) -> str:
    """Return what became of the inputs of each parser."""
    rows: list[list[str]] = []
    for record in records:
        fuzz = record.get("fuzz")
        if fuzz is None:
            continue
        totals = {"all": {key: fuzz[key] for key in ("inputs", "accepted", "refused", "failed")}}
        for name, one in {**fuzz["parsers"], **totals}.items():
            rows.append([name, *(f"{one[key]:,}" for key in ("inputs", "accepted", "refused", "failed"))])
    table = format_table(["parser", "inputs", "read", "refused with a sentence", "failed"], rows)
    return table if rows else NOT_MEASURED


def format_long_runs(soaks: Sequence[Record], listings: Sequence[Record]) -> str:
    """Return the memory of long trainings and of many pruners, and the time to list many runs."""
    rows: list[list[str]] = []
    for soak in soaks:
        steps, cycles = soak["steps"], soak["cycles"]
        entries = f"{steps['history_entries']:,} of {steps['updates']:,} mask updates in the history"
        rows.append([f"{steps['count']:,} steps of a tiny model", f"{format_growth(steps['mb'])}; {entries}"])
        rows.append([f"{cycles['count']:,} pruners, attached and finished in turn", format_growth(cycles["mb"])])
    for listing in listings:
        first, second = listing["seconds"]["first"], listing["seconds"]["second"]
        cells = f"{listing['runs']:,} finished runs in {listing['cells']:,} cells"
        rows.append([f"`sweep --only-missing` on {cells}", f"{first:.0f} s, and again {second:.0f} s"])
    return format_table(["what", "measured"], rows)


def format_growth(megabytes: Sequence[float]) -> str:
    """Return the memory after a tenth of the way and at its end."""
    return f"{megabytes[0]:.1f} MB after a tenth, {megabytes[-1]:.1f} MB at the end"


def format_large_runs(records: Sequence[Record]) -> str:
    """Return what training a large model costs with each method and without one."""
    rows = [
        [
            f"{name}, {row['weights'] / 1e6:,.0f} M weights",
            f"{row['attach_s']:.1f} s" if "attach_s" in row else "—",
            f"{row['step_s']:.2f} s",
            f"{row['update_s']:.2f} s" if "update_s" in row else "—",
            f"{row['peak_gb']:.1f} GB",
        ]
        for record in records
        for name, row in record["methods"].items()
    ]
    return format_table(["training", "attach", "step", "mask update, besides", "peak memory"], rows)


def format_readers(records: Sequence[Record]) -> str:
    """Return the images per second of each reader, and the range of its turns."""
    rows = []
    for record in records:
        speeds = record["images_per_second"]
        for name, speed in speeds.items():
            turns, ratio = speed["turns"], speed["median"] / speeds["loader"]["median"]
            spread = f" ({min(turns):.0f} to {max(turns):.0f}, {len(turns)} turns)" if len(turns) > 1 else " (one turn)"
            rows.append([READERS[name], f"{record['images']:,}", f"{speed['median']:.0f}{spread}", f"{ratio:.2f}"])
    return format_table(["reader", "images", "images per second", "over the DataLoader"], rows)


def format_draws(records: Sequence[Record]) -> str:
    """Return what was drawn of the trainings on several ranks, and how many failed."""
    rows = []
    for record in records:
        counts = record["counts"]
        rows += [
            ["draws", f"{record['draws']:,}"],
            ["with FSDP2, with DistributedDataParallel", f"{counts['fsdp']:,}, {counts['ddp']:,}"],
            ["on 2 ranks, on 4 ranks", f"{counts['2 ranks']:,}, {counts['4 ranks']:,}"],
            ["interrupted and resumed", f"{counts['killed']:,}"],
            ["of these on another number of ranks", f"{counts['another number of ranks']:,}"],
            ["of these after a SIGKILL", f"{counts['SIGKILL']:,}"],
            ["with other masks or weights than one process", f"**{len(record['failed']):,}**"],
            ["largest difference of a weight, in float64", f"{record['largest_weight_difference']:.1e}"],
        ]
    return format_table(["what", "number"], rows)


def format_selection(records: Sequence[Record]) -> str:
    """Return what a mask update over ranks costs in the training of a ResNet-50."""
    rows = [
        [
            f"`{row['method']}`",
            f"{1e3 * record['plain_step_seconds']:.1f} ms",
            f"{1e3 * row['pruned_step_seconds']:.1f} ms",
            f"{1e3 * row['update_seconds']:.1f} ms",
            f"{row['share_of_one_step']:.1%}",
            f"{row['share_of_the_steps_between_updates']:.2%}",
        ]
        for record in records
        for row in record["methods"].values()
    ]
    heads = ["method", "plain step", "pruned step", "mask update, besides", "of one step", "of 16 steps"]
    return format_table(heads, rows)


def render() -> str:
    """Return the text of the page with its tables filled in."""
    chaos, draws, readers = (
        read_records(RECORD),
        read_records("distributed-draws.json"),
        read_records("image-reader*.json"),
    )
    soaks, listings, large = (read_records(f"{name}.json") for name in ("soak", "sweep-listing", "large-training"))
    selection = read_records("selection-cost.json")
    parts = {
        "faults": format_faults(chaos),
        "subjects": format_subjects(chaos),
        "sources": format_sources(chaos),
        "long": format_long_runs(soaks, listings),
        "large": format_large_runs(large),
        "long sources": format_sources([*soaks, *listings, *large]),
        "fuzz": format_fuzz(chaos),
        "draws": format_draws(draws),
        "selection": format_selection(selection),
        "rank sources": format_sources([*draws, *selection]),
        "readers": format_readers(readers),
        "reader sources": format_sources(readers),
    }
    return fill_page(PAGE, parts)


if __name__ == "__main__":
    write_page(PAGE, render())
