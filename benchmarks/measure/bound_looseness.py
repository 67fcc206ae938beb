"""Measure how loose the bounds of Qian and Klabjan (2021) are: the error of pruned random networks beside the bounds.

    python benchmarks/measure/bound_looseness.py [--widths 64,256] [--device cuda] [--json PATH] [--plots FOLDER]

Networks that satisfy the assumptions of Theorem 1 (three layers, uniform weights of variance 1/n, ReLU) lose ⌊D^(1−α)⌋
weights of their middle layer, either the smallest or random ones. Networks of Theorem 3 (two 3×3 convolutions on 8×8
and a linear layer, Gaussian weights of variance 1/9d) lose ⌊d^(2−α)⌋ kernels of the second. From small to large:

    found        the largest ‖f − F‖ over the unit ball (of Theorem 3: the cube) that projected gradient ascent finds
    certificate  the a-posteriori bound from the norms of the actual matrices
    sharp, corrected, printed    the three forms of the theorem, over the draw of the weights; None where it is vacuous

For widths beyond the measured ones, the forms are computed up to the width where all of them are no longer vacuous. The
norm of a 512 → 512 3×3 convolution on 32×32 is timed, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from record_file import write_record
from torch import Tensor, nn

from pomona.lab.tables.chart import line_chart
from pomona.theory import bounds, spectral
from pomona.theory.certificate import Ball, Cube, Region, certify

WIDTHS = tuple(2**k for k in range(6, 13))
INPUTS, OUTPUTS, DELTA = 32, 10, 0.05
CHANNELS, IMAGE, KERNEL = 3, 8, 3
C1 = (IMAGE / KERNEL) ** 2
TITLES = {"magnitude": "Magnitude pruning", "random": "Random pruning", "kernels": "Random kernels"}
TARGET_SECONDS = 2.0  # of the norm of a convolution on two cores
MAX_RELATIVE_ERROR = 1e-5


@dataclass(frozen=True)
class Rule:
    """A pruning rule: what is pruned, the theorem that bounds the error, and the networks it holds for."""

    theorem: Callable[..., bounds.Bound]
    alphas: tuple[float, ...]
    network: Callable[[int, int], nn.Sequential]
    inputs: tuple[int, ...] = (INPUTS,)
    region: Region = field(default_factory=Ball)
    options: dict[str, Any] = field(default_factory=dict)
    width_divisor: int = 1  # the widths of the command line are divided by it
    power: float = 2.0  # a share d^(−power α) is pruned

    def layer_widths(self, width: int) -> tuple[int, ...]:
        """Return the widths of all layers, from the input to the output."""
        return self.inputs[0], width, width, OUTPUTS

    def error_bound(self, width: int, alpha: float, form: str) -> float | None:
        """Return the error bound of a form of the theorem, or None where it is vacuous."""
        try:
            one = self.theorem(self.layer_widths(width), alpha=alpha, delta=DELTA, **bounds.FORMS[form], **self.options)
        except bounds.TooNarrow:
            return None
        return None if one.vacuous else one.error


def dense_network(width: int, seed: int) -> nn.Sequential:
    """Return a random network of Theorem 1."""
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b, bias=False) for a, b in ((INPUTS, width), (width, width), (width, OUTPUTS))]
    for layer in layers:
        reach = (3 / max(layer.weight.shape)) ** 0.5
        nn.init.uniform_(layer.weight, -reach, reach)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def convolutional_network(width: int, seed: int) -> nn.Sequential:
    """Return a random network of Theorem 3."""
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
        width_divisor=16,
        power=1.0,
    ),
}


def prune_weight(rule: str, weight: Tensor, count: int) -> Tensor:
    """Return a weight without its `count` smallest entries, or without `count` entries or kernels drawn at random.

    Random draws are with replacement.
    """
    parts = weight.detach().clone().flatten(2) if weight.ndim > 2 else weight.detach().clone()[..., None]
    flat = parts.flatten(0, 1)
    smallest = rule == "magnitude"
    flat[flat[:, 0].abs().topk(count, largest=False).indices if smallest else torch.randint(len(flat), (count,))] = 0
    return parts.view_as(weight)


def measure_network(name: str, width: int, alpha: float) -> dict[str, Any]:
    """Prune one random network, and return the error found, its certificate and the bounds of the theorem."""
    rule = RULES[name]
    dense = rule.network(width, width)
    count = int(width ** (2 - rule.power * alpha))
    state = {**dense.state_dict(), "2.weight": prune_weight(name, dense[2].weight, count)}
    one = certify(dense, state, rule.inputs, region=rule.region, steps=60, starts=4)
    pruned_share = float((state["2.weight"] == 0).float().mean())
    result = {"rule": name, "width": width, "alpha": alpha, "sparsity": pruned_share}
    return result | {"found": one.found, "certificate": one.error} | compute_bounds(rule, width, alpha)


def compute_bounds(rule: Rule, width: int, alpha: float) -> dict[str, float | None]:
    """Return the error bound of each form of the theorem."""
    return {form: rule.error_bound(width, alpha, form) for form in bounds.FORMS}


def time_convolution_norm(device: str) -> dict[str, Any]:
    """Time the norm of a large convolution (the median of five), and bound its error by the proven norm."""
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


def compute_wider_bounds(name: str, alpha: float, last: int) -> list[dict[str, Any]]:
    """Return the bounds for widths above `last`, up to ten times the smallest width at which no form is vacuous."""
    rule = RULES[name]
    starts = [
        bounds.narrowest(rule.theorem, rule.layer_widths(1), alpha=alpha, **bounds.FORMS[form], **rule.options)
        for form in bounds.FORMS
    ]
    end = 10 * max([start for start in starts if start is not None] + [last])
    widths = [2 * last]
    while widths[-1] < end:
        widths.append(2 * widths[-1])
    rows = [{"rule": name, "width": w, "alpha": alpha, **compute_bounds(rule, w, alpha)} for w in widths]
    return [*rows, {"rule": name, "alpha": alpha, "starts": dict(zip(bounds.FORMS, starts, strict=True))}]


def draw_errors(rows: list[dict[str, Any]], name: str, alpha: float) -> str:
    """Return an SVG of the errors over the widths."""
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


def measure_all(widths: tuple[int, ...], device: str) -> dict[str, Any]:
    """Measure all rules and widths, print the table and return the results."""
    rows: list[dict[str, Any]] = []
    heads = ("found", "certificate", *reversed(list(bounds.FORMS)))
    print(f"{'rule':10}{'α':>5}{'width':>7}{'sparsity':>10}" + "".join(f"{head:>13}" for head in heads))
    for name, rule in RULES.items():
        narrowed = [w // rule.width_divisor for w in widths if w >= 16 * rule.width_divisor] or [16]
        for alpha in rule.alphas:
            for width in narrowed:
                row = measure_network(name, width, alpha)
                rows.append(row)
                cells = "".join(f"{'vacuous' if row[head] is None else format(row[head], '.4g'):>13}" for head in heads)
                print(f"{name:10}{alpha:>5g}{width:>7}{row['sparsity']:>10.4f}{cells}", flush=True)
                for head in heads[1:]:
                    if row[head] is not None and row["found"] > row[head] and head != "printed":
                        raise SystemExit(f"{head} promises {row[head]:.4g}, but {row['found']:.4g} was found")
            rows += compute_wider_bounds(name, alpha, narrowed[-1])
            starts = rows[-1]["starts"].items()
            smallest = ", ".join(f"{form} from {width:,}" if width else f"{form} never" for form, width in starts)
            print(f"{'':22}not vacuous at widths: {smallest}")
    conv = time_convolution_norm(device)
    print(f"512 → 512, 3×3 on 32×32: norm {conv['norm']:.6f} in {conv['seconds']:.4f} s on {device}, ", end="")
    print(f"error below {conv['error']:.1e}, proven in {conv['proof_seconds']:.1f} s")
    if conv["error"] > MAX_RELATIVE_ERROR:
        raise SystemExit(f"the norm errs by {conv['error']:.1e}, {MAX_RELATIVE_ERROR:.0e} are allowed")
    if conv["seconds"] > TARGET_SECONDS:
        print(f"slower than the {TARGET_SECONDS:g} s of the target")
    return {"delta": DELTA, "theory": rows, "convolution": conv}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="widths to measure, separated by commas")
    parser.add_argument("--device", default="cpu", help="device of the convolution's norm")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--plots", type=Path, help="write a plot for each rule and α into this folder")
    options = parser.parse_args()
    results = measure_all(tuple(int(w) for w in options.widths.split(",")), options.device)
    write_record(options.json, **results)
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        for name, rule in RULES.items():
            for alpha in rule.alphas:
                file = options.plots / f"{name}-{round(100 * alpha):02d}.svg"
                file.write_text(draw_errors(results["theory"], name, alpha))


if __name__ == "__main__":
    main()
