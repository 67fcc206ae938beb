"""How loose the bounds of Qian & Klabjan are: what pruning does to random networks, beside what is promised.

Networks of Theorem 1's assumptions (three layers, uniform weights of variance 1/n, ReLU) lose ⌊D^(1−α)⌋ weights of
their middle layer, the smallest or any. From the truth upwards:

    found        the largest ‖f − F‖ over the unit ball that projected gradient ascent finds
    certificate  the a-posteriori bound from the norms of the matrices at hand
    sharp, corrected, printed    the theorem's three forms, over the draw of the weights; none where it is vacuous

Widths beyond those that are measured are by formula, up to where the theorems begin to speak. The norm of a 512 → 512
3×3 convolution on 32×32 is timed, too.

    python benchmarks/theory.py [--widths 64,256] [--device cuda] [--json PATH] [--plots FOLDER]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn

from pomona.lab.curves import curves
from pomona.theory import bounds, spectral
from pomona.theory.certificate import certify

WIDTHS = tuple(2**k for k in range(6, 13))
ALPHAS = (0.1, 0.2, 0.3)
INPUTS, OUTPUTS, DELTA = 32, 10, 0.05
RULES = {"magnitude": bounds.magnitude, "random": bounds.random}
TARGET, DIGITS = 2.0, 1e-5  # seconds on two cores, and the relative error that is allowed


def network(width: int, seed: int) -> nn.Sequential:
    """A draw of the theorem's network."""
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b, bias=False) for a, b in ((INPUTS, width), (width, width), (width, OUTPUTS))]
    for layer in layers:
        reach = (3 / max(layer.weight.shape)) ** 0.5
        nn.init.uniform_(layer.weight, -reach, reach)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def pruned(rule: str, weight: Tensor, count: int) -> Tensor:
    """The middle layer without its smallest weights, or without draws with replacement."""
    flat = weight.detach().clone().flatten()
    places = (
        flat.abs().topk(count, largest=False).indices if rule == "magnitude" else torch.randint(len(flat), (count,))
    )
    flat[places] = 0
    return flat.view_as(weight)


def promised(rule: str, width: int, alpha: float) -> dict[str, float | None]:
    """The error that each form promises, None where it says nothing."""
    found: dict[str, float | None] = {}
    for form in bounds.FORMS:
        try:
            one = RULES[rule]((INPUTS, width, width, OUTPUTS), alpha=alpha, delta=DELTA, **bounds.FORMS[form])
        except bounds.TooNarrow:
            one = None
        found[form] = None if one is None or one.vacuous else one.error
    return found


def measure(rule: str, width: int, alpha: float) -> dict[str, Any]:
    """One network, pruned."""
    dense = network(width, seed=width)
    count = int((width * width) ** (1 - alpha))
    state = {**dense.state_dict(), "2.weight": pruned(rule, dense[2].weight, count)}
    one = certify(dense, state, (INPUTS,), steps=60, starts=4)
    gone = int((state["2.weight"] == 0).sum())
    result = {"rule": rule, "width": width, "alpha": alpha, "sparsity": gone / width**2}
    return {**result, "found": one.found, "certificate": one.error, **promised(rule, width, alpha)}


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


def beyond(rule: str, alpha: float, last: int) -> list[dict[str, Any]]:
    """Widths by formula, until all forms speak."""
    starts = [
        bounds.narrowest(RULES[rule], (INPUTS, 1, 1, OUTPUTS), alpha=alpha, **bounds.FORMS[form])
        for form in bounds.FORMS
    ]
    end = 10 * max([start for start in starts if start is not None] + [last])
    widths = [2 * last]
    while widths[-1] < end:
        widths.append(2 * widths[-1])
    rows = [{"rule": rule, "width": w, "alpha": alpha, **promised(rule, w, alpha)} for w in widths]
    return [*rows, *({"rule": rule, "alpha": alpha, "starts": dict(zip(bounds.FORMS, starts, strict=True))},)]


def picture(rows: list[dict[str, Any]], rule: str, alpha: float) -> str:
    """Errors over widths."""
    names = ("found", "certificate", "sharp", "corrected", "printed")
    some = [row for row in rows if row["rule"] == rule and row["alpha"] == alpha and "width" in row]
    lines = {name: [(row["width"], row[name]) for row in some if row.get(name)] for name in names}
    return curves(
        lines,
        title=f"{rule.capitalize()} pruning, α = {alpha:g}: promised and found",
        subtitle=f"three layers, sparsity d^−{2 * alpha:g}, δ = {DELTA:g}; lines begin where a bound says something",
        across="width d",
        up="sup ‖f − F‖ over the unit ball",
        dashed=names[2:],
    )


def run(widths: tuple[int, ...], device: str) -> dict[str, Any]:
    """Measure, and print the table."""
    rows: list[dict[str, Any]] = []
    heads = ("found", "certificate", *reversed(list(bounds.FORMS)))
    print(f"{'rule':10}{'α':>5}{'width':>7}{'sparsity':>10}" + "".join(f"{head:>13}" for head in heads))
    for rule in RULES:
        for alpha in ALPHAS:
            for width in widths:
                row = measure(rule, width, alpha)
                rows.append(row)
                cells = "".join(f"{'vacuous' if row[head] is None else format(row[head], '.4g'):>13}" for head in heads)
                print(f"{rule:10}{alpha:>5g}{width:>7}{row['sparsity']:>10.4f}{cells}", flush=True)
                for head in heads[1:]:
                    if row[head] is not None and row["found"] > row[head] and head != "printed":
                        raise SystemExit(f"{head} promises {row[head]:.4g}, but {row['found']:.4g} was found")
            rows += beyond(rule, alpha, widths[-1])
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
        for rule in RULES:
            for alpha in ALPHAS:
                file = options.plots / f"theory-{rule}-{round(100 * alpha):02d}.svg"
                file.write_text(picture(results["theory"], rule, alpha))


if __name__ == "__main__":
    main()
