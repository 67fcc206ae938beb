"""Write the tables and pictures of docs/sparse-or-fewer-bits.md from the records of accuracy, latency and products.

python benchmarks/pages/sparse_or_fewer_bits_page.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from page_helpers import (
    DOCS,
    NOT_MEASURED,
    fill_page,
    format_sources,
    format_table,
    read_records,
    read_rows,
    write_page,
)
from tradeoff_chart import Mark, draw_tradeoff

PAGE = DOCS / "sparse-or-fewer-bits.md"
NETWORKS = {"transformer": "a small GPT-2, characters of Shakespeare", "resnet20": "ResNet-20, CIFAR-10"}
LATENCY, PRODUCTS = "sparse-or-fewer-bits-latency.json", "quantized-cpu.json"
BATCHES = {"transformer": (1, 256), "resnet20": (1, 32)}
BATCH_NAMES = {"transformer": "tokens", "resnet20": "images"}
MEASURES = {"perplexity": "perplexity of the test text", "accuracy": "test accuracy, %"}
BUDGETS = (1 / 4, 1 / 6, 1 / 8, 1 / 16, 1 / 32)  # of the bytes in float32
OVER_BUDGET = 1.1  # scales and positions may take this much more
SIZE_UNITS = {1e3: "kB", 1e6: "MB"}
TIME_UNITS = {1e-6: "µs", 1e-3: "ms"}
DENSE = "dense"

Row = dict[str, Any]


@dataclass
class Form:
    """A way to store a network: its bytes, what was measured with each seed, and its seconds by batch."""

    network: str
    measure: str
    layout: str
    sparsity: float
    values: str
    inputs: str
    sizes: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> float:
        """The mean of the bytes over the seeds."""
        return statistics.fmean(self.sizes)

    @property
    def mean(self) -> float:
        """The mean of what was measured."""
        return statistics.fmean(self.measured)

    @property
    def name(self) -> str:
        """The layout with its sparsity, and the type of values."""
        return f"{self.layout_name}, {self.values}"

    @property
    def layout_name(self) -> str:
        """The layout with its sparsity."""
        return self.layout if self.layout == DENSE else f"{self.layout} {100 * self.sparsity:.0f} %"


def record_name(network: str) -> str:
    """Return the file name of the record of a network."""
    return f"sparse-or-fewer-bits-{network}.json"


def read_forms(network: str) -> list[Form]:
    """Return the forms of a network from its record and from that of the latencies."""
    keys = ("network", "measure", "layout", "sparsity", "values", "inputs")
    forms: dict[tuple[Any, ...], Form] = {}
    for _, row in read_rows(record_name(network), "rows"):
        form = forms.setdefault(tuple(row[key] for key in keys), Form(**{key: row[key] for key in keys}))
        form.sizes.append(row["bytes"])
        form.measured.append(row["measured"])
    for _, row in read_rows(LATENCY, "rows"):
        for form in forms.values():
            if all(getattr(form, key) == row[key] for key in keys if key != "measure"):
                form.seconds[row["batch"]] = row["seconds"]
    return list(forms.values())


def is_better(form: Form, other: Form) -> bool:
    """Return whether a form measures better than another one."""
    return form.mean < other.mean if form.measure == "perplexity" else form.mean > other.mean


def best_of(forms: Sequence[Form]) -> Form | None:
    """Return the form that measures best."""
    best = None
    for form in forms:
        if best is None or is_better(form, best):
            best = form
    return best


# ---- tables


def format_measured(form: Form) -> str:
    """Return the mean and the standard deviation of what was measured."""
    deviation = statistics.stdev(form.measured) if len(form.measured) > 1 else 0.0
    return f"{form.mean:.2f} ± {deviation:.2f}"


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes in kB."""
    return f"{nbytes / 1000:,.0f} kB"


def format_seconds(seconds: float | None) -> str:
    """Return a time in µs, nothing where there is none."""
    return "" if seconds is None else f"{1e6 * seconds:,.0f}"


def format_forms(forms: Sequence[Form]) -> str:
    """Return a row for each form of a network."""
    if not forms:
        return NOT_MEASURED
    network = forms[0].network
    batches = [f"µs, {batch} {BATCH_NAMES[network]}" for batch in BATCHES[network]]
    rows = [
        [
            form.layout_name,
            form.values,
            form.inputs,
            format_bytes(form.nbytes),
            format_measured(form),
            *(format_seconds(form.seconds.get(batch)) for batch in BATCHES[network]),
        ]
        for form in forms
    ]
    return format_table(["weights", "values", "inputs", "bytes", forms[0].measure, *batches], rows)


def format_budgets(forms: Sequence[Form]) -> str:
    """Return the best dense and the best sparse form within a share of the bytes in float32."""
    full = next((form.nbytes for form in forms if (form.layout, form.values) == (DENSE, "fp32")), None)
    if full is None:
        return NOT_MEASURED
    rows = []
    for share in BUDGETS:
        within = [form for form in forms if form.nbytes <= share * full * OVER_BUDGET and form.inputs == "float"]
        cells = []
        for dense in (True, False):
            best = best_of([form for form in within if (form.layout == DENSE) == dense])
            cells.append(
                "none" if best is None else f"{best.name}: {format_measured(best)}, {format_bytes(best.nbytes)}"
            )
        rows.append([f"1/{1 / share:.0f}: {format_bytes(share * full)}", *cells])
    return format_table(["bytes at most", "the best dense form", "the best sparse form"], rows)


def format_speeds(forms: Sequence[Form]) -> str:
    """Return the fastest dense and the fastest sparse form, among those that measure about as well as dense int8."""
    rows = []
    for batch in BATCHES[forms[0].network] if forms else ():
        timed = [form for form in forms if batch in form.seconds]
        for dense in (True, False):
            own = sorted((f for f in timed if (f.layout == DENSE) == dense), key=lambda f: f.seconds[batch])
            for form in own[:3]:
                inputs = ", int8 inputs" if form.inputs == "int8" else ""
                rows.append(
                    [str(batch), f"{form.name}{inputs}", format_seconds(form.seconds[batch]), format_measured(form)]
                )
    measure = forms[0].measure if forms else ""
    unit = BATCH_NAMES[forms[0].network] if forms else ""
    return format_table([unit, "the three fastest, dense and then sparse", "µs", measure], rows)


def format_products() -> str:
    """Return how many times as fast as ONNX Runtime's fastest dense product each of ours is."""
    found: dict[tuple[str, str], dict[tuple[int, str], float]] = {}
    for _, row in read_rows(PRODUCTS, "comparisons"):
        key = f"{row['rows']}×{row['columns']}", row["side"]
        found.setdefault(key, {})[row["batch"], row["state"]] = row["ratio"]
    batches = list(dict.fromkeys(batch for ratios in found.values() for batch, _ in ratios))
    rows = [
        [*key, *(f"{ratios[batch, 'warm']:.1f} / {ratios[batch, 'cold']:.1f}" for batch in batches)]
        for key, ratios in found.items()
    ]
    return format_table(["matrix", "ours", *(f"batch {batch}" for batch in batches)], rows)


def format_product_times() -> str:
    """Return the time and the error of each product with warm caches."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    errors: dict[tuple[str, str], float] = {}
    for _, row in read_rows(PRODUCTS, "rows"):
        if row["state"] == "warm":
            key = f"{row['rows']}×{row['columns']}", row["side"]
            found.setdefault(key, {})[row["batch"]] = row["seconds"]
            errors[key] = max(errors.get(key, 0.0), row["error"])
    batches = list(dict.fromkeys(batch for times in found.values() for batch in times))
    rows = [
        [*key, *(format_seconds(times.get(batch)) for batch in batches), f"{errors[key]:.1e}"]
        for key, times in found.items()
    ]
    return format_table(["matrix", "", *(f"µs, batch {batch}" for batch in batches), "error"], rows)


# ---- pictures


def make_marks(forms: Sequence[Form], batch: int | None = None) -> list[Mark]:
    """Return the marks of a picture: over bytes, or over the seconds of a batch, with the fastest type of inputs."""
    chosen: dict[tuple[str, float, str], tuple[float, Form]] = {}
    for form in forms:
        cost = form.nbytes if batch is None else form.seconds.get(batch)
        shown = form.layout == DENSE or form.values != "fp32"
        if cost is None or not shown or (batch is None and form.inputs == "int8"):
            continue
        key = form.layout, form.sparsity, form.values
        if key not in chosen or cost < chosen[key][0]:
            chosen[key] = cost, form
    return [Mark(form.layout, form.values, cost, form.mean, label_mark(form)) for cost, form in chosen.values()]


def label_mark(form: Form) -> str:
    """Return the text beside a mark: the type of values of a dense form, the sparsity of another one."""
    return form.values if form.layout == DENSE else f"{100 * form.sparsity:.0f} %"


def draw_pictures() -> dict[str, str]:
    """Return the pictures by file name: for each network one over bytes, and one over the latency of a batch."""
    pictures = {}
    for network, what in NETWORKS.items():
        forms = read_forms(network)
        if not forms:
            continue
        measured = MEASURES[forms[0].measure]
        head = {"subtitle": what, "measured": measured}
        title = "Bytes of the weights"
        pictures[picture_name(network, None)] = draw_tradeoff(
            make_marks(forms),
            title=title,
            cost="bytes of the weights of the layers that are pruned",
            units=SIZE_UNITS,
            **head,
        )
        for batch in BATCHES[network]:
            if marks := make_marks(forms, batch):
                unit = BATCH_NAMES[network] if batch > 1 else BATCH_NAMES[network].removesuffix("s")
                pictures[picture_name(network, batch)] = draw_tradeoff(
                    marks,
                    title=f"Latency on a CPU thread, {batch} {unit}",
                    cost="median time",
                    units=TIME_UNITS,
                    **head,
                )
    return pictures


def picture_name(network: str, batch: int | None) -> str:
    """Return the file name of a picture."""
    return f"sparse-or-fewer-bits-{network}-{'bytes' if batch is None else f'latency-{batch}'}.svg"


def format_pictures(network: str, pictures: dict[str, str]) -> str:
    """Return the links to the pictures of a network."""
    names = [picture_name(network, batch) for batch in (None, *BATCHES[network])]
    alt = f"{NETWORKS[network]}: what dense and sparse weights in several types of values cost and reach"
    return "\n\n".join(f"![{alt}]({name})" for name in names if name in pictures) or NOT_MEASURED


def render() -> str:
    """Return the page with its tables filled in."""
    pictures, parts = draw_pictures(), {}
    for network in NETWORKS:
        forms = read_forms(network)
        parts[f"{network} pictures"] = format_pictures(network, pictures)
        parts[f"{network} budgets"] = format_budgets(forms)
        parts[f"{network} speeds"] = format_speeds(forms)
        parts[f"{network} forms"] = format_forms(forms)
    parts |= {"products": format_products(), "product times": format_product_times()}
    records = [record for name in (*map(record_name, NETWORKS), LATENCY, PRODUCTS) for record in read_records(name)]
    return fill_page(PAGE, {**parts, "sources": format_sources(records)})


if __name__ == "__main__":
    write_page(PAGE, render())
    for name, picture in draw_pictures().items():
        write_page(DOCS / name, picture)
