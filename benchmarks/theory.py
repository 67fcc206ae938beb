"""How loose the bounds of Qian & Klabjan are: what pruning does to random networks, beside what is promised.

Networks of Theorem 1's assumptions (three layers, uniform weights of variance 1/n, ReLU) lose ⌊D^(1−α)⌋ weights of
their middle layer, the smallest or any; those of Theorem 3 (two convolutions 3×3 on 8×8 and a linear layer, Gaussian
weights of variance 1/9d) lose ⌊d^(2−α)⌋ kernels of the second. From the truth upwards:

    found        the largest ‖f − F‖ over the unit ball (of Theorem 3: the cube) that projected gradient ascent finds
    certificate  the a-posteriori bound from the norms of the matrices at hand
    sharp, corrected, printed    the theorem's three forms, over the draw of the weights; none where it is vacuous

Widths beyond those that are measured are by formula, up to where the theorems begin to speak. The norm of a 512 → 512
3×3 convolution on 32×32 is timed, too.

    python benchmarks/theory.py [--widths 64,256] [--device cuda] [--json PATH] [--plots FOLDER]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn

from pomona.lab.tables.chart import line_chart
from pomona.theory import bounds, spectral
from pomona.theory.certificate import Ball, Cube, Region, certify

WIDTHS = tuple(2**k for k in range(6, 13))
INPUTS, OUTPUTS, DELTA = 32, 10, 0.05
CHANNELS, IMAGE, KERNEL = 3, 8, 3
C1 = (IMAGE / KERNEL) ** 2
TITLES = {"magnitude": "Magnitude pruning", "random": "Random pruning", "kernels": "Random kernels"}
TARGET, DIGITS = 2.0, 1e-5  # seconds on two cores, and the relative error that is allowed


@dataclass(frozen=True)
class Rule:
    """What is pruned, by which theorem, and of what networks."""

    theorem: Callable[..., bounds.Bound]
    alphas: tuple[float, ...]
    network: Callable[[int, int], nn.Sequential]
    inputs: tuple[int, ...] = (INPUTS,)
    region: Region = field(default_factory=Ball)
    options: dict[str, Any] = field(default_factory=dict)
    narrower: int = 1  # by how much than the widths asked for
    power: float = 2.0  # a share d^(−power α) is pruned

    def widths(self, width: int) -> tuple[int, ...]:
        return self.inputs[0], width, width, OUTPUTS

    def ask(self, width: int, alpha: float, form: str) -> float | None:
        """The error that a form of the theorem promises, None where it says nothing."""
        try:
            one = self.theorem(self.widths(width), alpha=alpha, delta=DELTA, **bounds.FORMS[form], **self.options)
        except bounds.TooNarrow:
            return None
        return None if one.vacuous else one.error


def dense_network(width: int, seed: int) -> nn.Sequential:
    """A draw of Theorem 1's network."""
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b, bias=False) for a, b in ((INPUTS, width), (width, width), (width, OUTPUTS))]
    for layer in layers:
        reach = (3 / max(layer.weight.shape)) ** 0.5
        nn.init.uniform_(layer.weight, -reach, reach)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def convolutional_network(width: int, seed: int) -> nn.Sequential:
    """A draw of Theorem 3's network."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"padding": 1, "padding_mode": "circular", "bias": False}
    layers = [nn.Conv2d(channels, width, KERNEL, **options) for channels in (CHANNELS, width)]
    last = nn.Linear(width * IMAGE**2, OUTPUTS, bias=False)
    for layer in (*layers, last):
        nn.init.normal_(layer.weight, std=1 / (KERNEL * width**0.5))
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Flatten(), last)


RULES = {
    "magnitude": Rule(bounds.magnitude, (0.1, 0.2, 0.3), dense_network),
    "random": Rule(bounds.random, (0.1, 0.2, 0.3), dense_network),
    "kernels": Rule(
        bounds.cnn,
        (0.2, 0.4, 0.6),
        convolutional_network,
        inputs=(CHANNELS, IMAGE, IMAGE),
        region=Cube(),
        options={"image": IMAGE, "kernel": KERNEL, "C1": C1, "C2": 3 * C1**2},
        narrower=16,
        power=1.0,
    ),
}


def pruned(rule: str, weight: Tensor, count: int) -> Tensor:
    """The middle layer without its smallest weights, or without draws of weights or kernels with replacement."""
    parts = weight.detach().clone().flatten(2) if weight.ndim > 2 else weight.detach().clone()[..., None]
    flat = parts.flatten(0, 1)
    smallest = rule == "magnitude"
    flat[flat[:, 0].abs().topk(count, largest=False).indices if smallest else torch.randint(len(flat), (count,))] = 0
    return parts.view_as(weight)


def measure(name: str, width: int, alpha: float) -> dict[str, Any]:
    """One network, pruned."""
    rule = RULES[name]
    dense = rule.network(width, width)
    count = int(width ** (2 - rule.power * alpha))
    state = {**dense.state_dict(), "2.weight": pruned(name, dense[2].weight, count)}
    one = certify(dense, state, rule.inputs, region=rule.region, steps=60, starts=4)
    gone = float((state["2.weight"] == 0).float().mean())
    result = {"rule": name, "width": width, "alpha": alpha, "sparsity": gone}
    return result | {"found": one.found, "certificate": one.error} | promised(rule, width, alpha)


def promised(rule: Rule, width: int, alpha: float) -> dict[str, float | None]:
    return {form: rule.ask(width, alpha, form) for form in bounds.FORMS}


def convolution(device: str) -> dict[str, Any]:
    """The norm of a large convolution: the median of five, and an upper bound of its error from the proof."""
    torch.manual_seed(0)
    weight = (torch.randn(512, 512, 3, 3) / (512 * 9) ** 0.5).to(device)
    taken = []
    for _ in range(6):  # the first one warms up
        start = time.perf_counter()
        value = spectral.conv_norm(weight, 32)
        taken.append(time.perf_counter() - start)
    start = time.perf_counter()
    proven = spectral.conv_bound(weight, 32, padding="circular")
    result = {"norm": value, "proven": proven, "error": proven / value - 1, "seconds": sorted(taken[1:])[2]}
    return result | {"proof_seconds": time.perf_counter() - start, "device": device, "threads": torch.get_num_threads()}


def beyond(name: str, alpha: float, last: int) -> list[dict[str, Any]]:
    """Widths by formula, until all forms speak that ever do."""
    rule = RULES[name]
    starts = [
        bounds.narrowest(rule.theorem, rule.widths(1), alpha=alpha, **bounds.FORMS[form], **rule.options)
        for form in bounds.FORMS
    ]
    end = 10 * max([start for start in starts if start is not None] + [last])
    widths = [2 * last]
    while widths[-1] < end:
        widths.append(2 * widths[-1])
    rows = [{"rule": name, "width": w, "alpha": alpha, **promised(rule, w, alpha)} for w in widths]
    return [*rows, {"rule": name, "alpha": alpha, "starts": dict(zip(bounds.FORMS, starts, strict=True))}]


def picture(rows: list[dict[str, Any]], name: str, alpha: float) -> str:
    """Errors over widths."""
    names = ("found", "certificate", "sharp", "corrected", "printed")
    some = [row for row in rows if row["rule"] == name and row["alpha"] == alpha and "width" in row]
    lines = {line: [(row["width"], row[line]) for row in some if row.get(line)] for line in names}
    kind, over = ("network", "ball") if name != "kernels" else ("convolutional network", "cube")
    exponent = f"d^−{RULES[name].power * alpha:g}"
    return line_chart(
        lines,
        title=f"{TITLES[name]}, α = {alpha:g}: promised and found",
        subtitle=f"{kind} of three layers, sparsity {exponent}, δ = {DELTA:g}; lines begin where a bound speaks",
        x_label="channels d" if name == "kernels" else "width d",
        y_label=f"sup ‖f − F‖ over the unit {over}",
        dashed=names[2:],
    )


def run(widths: tuple[int, ...], device: str) -> dict[str, Any]:
    """Measure, and print the table."""
    rows: list[dict[str, Any]] = []
    heads = ("found", "certificate", *reversed(list(bounds.FORMS)))
    print(f"{'rule':10}{'α':>5}{'width':>7}{'sparsity':>10}" + "".join(f"{head:>13}" for head in heads))
    for rule, about in RULES.items():
        narrowed = [w // about.narrower for w in widths if w >= 16 * about.narrower] or [16]
        for alpha in about.alphas:
            for width in narrowed:
                row = measure(rule, width, alpha)
                rows.append(row)
                cells = "".join(f"{'vacuous' if row[head] is None else format(row[head], '.4g'):>13}" for head in heads)
                print(f"{rule:10}{alpha:>5g}{width:>7}{row['sparsity']:>10.4f}{cells}", flush=True)
                for head in heads[1:]:
                    if row[head] is not None and row["found"] > row[head] and head != "printed":
                        raise SystemExit(f"{head} promises {row[head]:.4g}, but {row['found']:.4g} was found")
            rows += beyond(rule, alpha, narrowed[-1])
            starts = rows[-1]["starts"].items()
            told = ", ".join(f"{form} from {width:,}" if width else f"{form} never" for form, width in starts)
            print(f"{'':22}speaks at widths: {told}")
    conv = convolution(device)
    print(f"512 → 512, 3×3 on 32×32: norm {conv['norm']:.6f} in {conv['seconds']:.4f} s on {device}, ", end="")
    print(f"error below {conv['error']:.1e}, proven in {conv['proof_seconds']:.1f} s")
    if conv["error"] > DIGITS:
        raise SystemExit(f"the norm errs by {conv['error']:.1e}, {DIGITS:.0e} are allowed")
    if conv["seconds"] > TARGET:
        print(f"slower than the {TARGET:g} s of the target")
    return {"delta": DELTA, "theory": rows, "convolution": conv}


def main() -> None:
    parser = argparse.ArgumentParser(description="The bounds of Qian & Klabjan beside what is measured.")
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="that are measured")
    parser.add_argument("--device", default="cpu", help="of the convolution's norm")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--plots", type=Path, help="write a plot for each rule and α into this folder")
    options = parser.parse_args()
    results = run(tuple(int(w) for w in options.widths.split(",")), options.device)
    record.write(options.json, **results)
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        for rule, about in RULES.items():
            for alpha in about.alphas:
                file = options.plots / f"{rule}-{round(100 * alpha):02d}.svg"
                file.write_text(picture(results["theory"], rule, alpha))


if __name__ == "__main__":
    main()
