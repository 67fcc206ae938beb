"""Appendix D of Qian & Klabjan, ICML 2021, made anew: Tables 1 to 3, Figures 1 and 2.

Tables 2 and 3 measure the constants of Lemmas 3 and 4 on random matrices, as many as the document took. Table 1 and the
figures look at trained weights; the networks are ours, so that orders of magnitude count: E w² = O(1/d) and
E w⁴ = O(1/d²) are what Theorem 2 assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAPER = "Qian & Klabjan, ICML 2021"
Progress = Callable[[int, int], None]  # done, total
Cell = dict[str, Any]
CHUNK = 2**23  # numbers held at a time

# Table 1: layers 1 to 6 of the trained network.
MEANS = (-0.0309, -0.0215, -0.0078, -0.0119, -0.0092, -0.0275)
VARIANCES = (0.0155, 0.0035, 0.0022, 0.0019, 0.0016, 0.0057)

# Table 2: (n1, n2), then for K = 1 and √3 the mean and standard deviation of ‖B‖ and c0 for each q.
QUANTILES = (0.95, 0.99, 0.999, 0.9999)
LEMMA3: dict[tuple[int, int], tuple[tuple[float, ...], tuple[float, ...]]] = {
    (32, 32): ((1.087, 0.038, 1.15, 1.183, 1.206, 1.218), (1.882, 0.066, 1.996, 2.044, 2.069, 2.131)),
    (32, 64): ((0.941, 0.027, 0.988, 1.015, 1.039, 1.042), (1.631, 0.046, 1.707, 1.743, 1.786, 1.797)),
    (32, 128): ((0.836, 0.018, 0.867, 0.878, 0.895, 0.902), (1.449, 0.032, 1.503, 1.528, 1.577, 1.579)),
    (32, 256): ((0.762, 0.013, 0.784, 0.794, 0.806, 0.811), (1.319, 0.022, 1.357, 1.371, 1.39, 1.393)),
    (32, 512): ((0.708, 0.009, 0.723, 0.731, 0.74, 0.747), (1.226, 0.016, 1.253, 1.267, 1.278, 1.283)),
    (64, 64): ((1.114, 0.026, 1.158, 1.183, 1.205, 1.209), (1.932, 0.045, 2.009, 2.045, 2.07, 2.086)),
    (64, 128): ((0.959, 0.018, 0.992, 1.005, 1.04, 1.054), (1.66, 0.031, 1.711, 1.743, 1.782, 1.785)),
    (64, 256): ((0.848, 0.012, 0.868, 0.88, 0.887, 0.888), (1.47, 0.021, 1.508, 1.523, 1.53, 1.554)),
    (64, 512): ((0.77, 0.008, 0.785, 0.792, 0.796, 0.801), (1.333, 0.015, 1.359, 1.371, 1.388, 1.392)),
    (128, 128): ((1.131, 0.017, 1.159, 1.173, 1.199, 1.205), (1.956, 0.029, 2.008, 2.024, 2.044, 2.045)),
    (128, 256): ((0.969, 0.012, 0.99, 0.999, 1.012, 1.013), (1.679, 0.019, 1.712, 1.728, 1.743, 1.746)),
    (128, 512): ((0.856, 0.008, 0.87, 0.875, 0.881, 0.885), (1.482, 0.014, 1.507, 1.52, 1.527, 1.528)),
    (256, 256): ((1.14, 0.011, 1.16, 1.17, 1.18, 1.181), (1.976, 0.021, 2.01, 2.027, 2.036, 2.036)),
    (256, 512): ((0.976, 0.008, 0.989, 0.995, 1.002, 1.014), (1.691, 0.013, 1.714, 1.727, 1.735, 1.735)),
    (512, 512): ((1.146, 0.007, 1.159, 1.163, 1.172, 1.174), (1.985, 0.012, 2.006, 2.015, 2.033, 2.04)),
}

# Table 3: (law, α, d), then the three terms of Lemma 4, E‖A‖ and C.
TERMS = ("rows", "columns", "fourth", "norm", "C")
LEMMA4: dict[tuple[str, float | None, int], tuple[float, ...]] = {
    ("U(−√3/√d, √3/√d)", None, 32): (1.006, 1.006, 1.159, 1.888, 0.596),
    ("U(−√3/√d, √3/√d)", None, 64): (1.006, 1.005, 1.159, 1.934, 0.61),
    ("U(−√3/√d, √3/√d)", None, 128): (1.005, 1.005, 1.159, 1.958, 0.618),
    ("U(−√3/√d, √3/√d)", None, 256): (1.004, 1.003, 1.158, 1.976, 0.624),
    ("U(−√3/√d, √3/√d)", None, 512): (1.003, 1.002, 1.158, 1.985, 0.627),
    ("N(0, 1/d)", None, 32): (1.011, 1.014, 1.314, 1.905, 0.571),
    ("N(0, 1/d)", None, 64): (1.008, 1.008, 1.315, 1.947, 0.585),
    ("N(0, 1/d)", None, 128): (1.005, 1.007, 1.316, 1.965, 0.59),
    ("N(0, 1/d)", None, 256): (1.005, 1.006, 1.316, 1.979, 0.595),
    ("N(0, 1/d)", None, 512): (1.004, 1.004, 1.316, 1.988, 0.598),
    ("N(0, 3/d)", None, 32): (1.751, 1.745, 2.279, 3.295, 0.571),
    ("N(0, 3/d)", None, 64): (1.755, 1.744, 2.28, 3.361, 0.582),
    ("N(0, 3/d)", None, 128): (1.742, 1.743, 2.28, 3.405, 0.591),
    ("N(0, 3/d)", None, 256): (1.743, 1.742, 2.28, 3.428, 0.595),
    ("N(0, 3/d)", None, 512): (1.74, 1.739, 2.279, 3.441, 0.598),
    ("N(0, 1/d)", 0.01, 32): (0.626, 0.63, 1.033, 1.237, 0.54),
    ("N(0, 1/d)", 0.01, 64): (0.632, 0.629, 1.035, 1.239, 0.54),
    ("N(0, 1/d)", 0.01, 128): (0.63, 0.63, 1.037, 1.242, 0.541),
    ("N(0, 1/d)", 0.01, 256): (0.63, 0.63, 1.039, 1.246, 0.542),
    ("N(0, 1/d)", 0.1, 32): (0.714, 0.713, 1.103, 1.379, 0.545),
    ("N(0, 1/d)", 0.1, 64): (0.729, 0.729, 1.117, 1.426, 0.554),
    ("N(0, 1/d)", 0.1, 128): (0.744, 0.744, 1.129, 1.459, 0.558),
    ("N(0, 1/d)", 0.1, 256): (0.758, 0.756, 1.14, 1.491, 0.562),
    ("N(0, 1/d)", 0.5, 32): (0.928, 0.925, 1.258, 1.759, 0.565),
    ("N(0, 1/d)", 0.5, 64): (0.95, 0.948, 1.275, 1.831, 0.577),
    ("N(0, 1/d)", 0.5, 128): (0.964, 0.964, 1.288, 1.883, 0.586),
    ("N(0, 1/d)", 0.5, 256): (0.975, 0.974, 1.296, 1.92, 0.592),
}


# ---- random matrices


def table2(seed: int = 0, progress: Progress | None = None, *, runs: int = 1000, widest: int = 512) -> dict[str, Any]:
    """Table 2: the norm of a uniform random matrix, and the c0 of Lemma 3.

    K only scales, so that both K share their draws. δ0 = log(2/(1 − q)) / 4n needs no measuring.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [(shape, both) for shape, both in LEMMA3.items() if max(shape) <= widest]
    cells: list[Cell] = []
    for done, ((n1, n2), both) in enumerate(rows, 1):
        scale = 1 / math.sqrt(max(n1, n2))
        draws = matrices(lambda *s: torch.rand(*s, generator=generator) * 2 - 1, runs, n1, n2)
        unit = torch.cat([norms(scale * part) for part in draws])
        for K, name, printed in ((1.0, "1", both[0]), (math.sqrt(3), "√3", both[1])):
            found, where = K * unit, {"n1": n1, "n2": n2, "K": name}
            mean, std = float(found.mean()), float(found.std())
            cells.append(cell(f"{n1}×{n2}", "uniform", {**where, "quantity": "‖B‖"}, mean, std, runs, *printed[:2]))
            for q, paper in zip(QUANTILES, printed[2:], strict=True):
                delta0 = round(math.log(2 / (1 - q)) / (4 * max(n1, n2)), 3)
                setting = {**where, "quantity": "c0", "q": q, "delta0": delta0}
                cells.append(cell(f"{n1}×{n2}", "uniform", setting, float(found.quantile(q)), None, runs, paper))
        if progress:
            progress(done, len(rows))
    return {"title": f"Constants of Lemma 3, {runs} matrices", "paper": f"{PAPER}, Table 2", "cells": cells}


def table3(seed: int = 0, progress: Progress | None = None, *, runs: int = 500, widest: int = 512) -> dict[str, Any]:
    """Table 3: the constant of Latała's inequality (Lemma 4).

    The expectations of w² and w⁴ are means over the matrices, entry by entry, as in the document; the maximum over rows
    is therefore a little above the true one.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [(key, printed) for key, printed in LEMMA4.items() if key[2] <= widest]
    cells: list[Cell] = []
    for done, ((law, alpha, d), printed) in enumerate(rows, 1):
        found = terms((part for part in drawn(law, alpha, d, runs, generator)), d)
        gone = 0.0 if alpha is None else 1 - math.exp(-math.floor(d ** (2 - alpha)) / d**2)
        for name, paper in zip(TERMS, printed, strict=True):
            setting = {"d": d, "alpha": alpha, "quantity": name}
            cells.append(cell(law, "random" if alpha else "none", setting, *found[name], runs, paper, sparsity=gone))
        if progress:
            progress(done, len(rows))
    notes = (
        "The rows with α are said to align with (19), where A is what ⌊d^(2−2α)⌋ draws remove. They hold what is kept "
        "after ⌊d^(2−α)⌋ draws: with replacement a share exp(−d^−α) of the entries is left, whose root is the row norm "
        "(0.617 at d = 32, α = 0.01, where the removed part has 0.787)."
    )
    return {
        "title": f"The constant of Lemma 4, {runs} matrices",
        "paper": f"{PAPER}, Table 3",
        "notes": notes,
        "cells": cells,
    }


def matrices(draw: Callable[..., Tensor], runs: int, rows: int, columns: int) -> Iterator[Tensor]:
    """`runs` random matrices in float64, some at a time."""
    size = max(1, CHUNK // (rows * columns))
    for start in range(0, runs, size):
        yield draw(min(size, runs - start), rows, columns).double()


def drawn(law: str, alpha: float | None, d: int, runs: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The matrices of a row of Table 3."""

    def draw(*shape: int) -> Tensor:
        if law.startswith("U"):
            return (torch.rand(*shape, generator=generator) * 2 - 1) * math.sqrt(3 / d)
        return torch.randn(*shape, generator=generator) * math.sqrt((3 if "3/d" in law else 1) / d)

    for part in matrices(draw, runs, d, d):
        if alpha is not None:
            places = torch.randint(d * d, (len(part), math.floor(d ** (2 - alpha))), generator=generator)
            part.flatten(1).scatter_(1, places, 0.0)
        yield part


def norms(batch: Tensor) -> Tensor:
    """‖A‖₂ of each matrix, by the eigenvalues of the smaller Gram matrix."""
    gram = batch @ batch.mT if batch.shape[1] <= batch.shape[2] else batch.mT @ batch
    return torch.linalg.eigvalsh(gram)[:, -1].sqrt()


def terms(batches: Iterable[Tensor], d: int) -> dict[str, tuple[float, float]]:
    """The three terms of Lemma 4, E‖A‖ and their ratio: the value, and the standard deviation of one matrix's share."""
    count, fourths, sizes = 0, [], []
    sums = {axis: torch.zeros(2, d, dtype=torch.float64) for axis in (1, 2)}
    for part in batches:
        count += len(part)
        squares = part**2
        for axis, total in sums.items():
            along = squares.sum(3 - axis)
            total += torch.stack((along.sum(0), (along**2).sum(0)))
        fourths.append((squares**2).sum((1, 2)))
        sizes.append(norms(part))
    found: dict[str, tuple[float, float]] = {}
    for name, total in (("rows", sums[1]), ("columns", sums[2])):
        mean, square = (total / count)[:, int(total[0].argmax())].tolist()
        found[name] = math.sqrt(mean), math.sqrt(max(0.0, square - mean**2)) / (2 * math.sqrt(mean))
    fourth, norm = torch.cat(fourths), torch.cat(sizes)
    mean = float(fourth.mean())
    found["fourth"] = mean**0.25, float(fourth.std()) / (4 * mean**0.75)
    found["norm"] = float(norm.mean()), float(norm.std())
    right = sum(found[name][0] for name in TERMS[:3])
    ratio = found["norm"][0] / right
    spread = math.hypot(found["norm"][1], *(ratio * found[name][1] for name in TERMS[:3])) / right
    return found | {"C": (ratio, spread)}


# ---- trained weights


def table1(
    seed: int = 0,
    progress: Progress | None = None,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    width: int = 1024,
    epochs: int = 3,
) -> dict[str, Any]:
    """Table 1: the moments of the weights of a network trained on Covertype."""
    model = covertype(seed, progress, data, width, epochs)
    cells = []
    layers = linear(model)
    for k, weight in enumerate(layers, 1):
        w = weight.double()
        inner, n = 1 < k < len(layers), max(weight.shape)
        facts = {"mean": (float(w.mean()), MEANS), "variance": (float(w.var()), VARIANCES)}
        for name, (value, printed) in facts.items():
            paper = printed[k - 1] if k <= len(printed) else None
            cells.append(cell(f"5×{width}", "dense", {"layer": k, "quantity": name}, value, None, w.numel(), paper))
        if inner:
            for name, power in (("d E w²", 2), ("d² E w⁴", 4)):
                value = float((w**power).mean()) * n ** (power // 2)
                setting = {"layer": k, "quantity": name}
                cells.append(cell(f"5×{width}", "dense", setting, value, None, w.numel(), None))
    notes = (
        f"The rows of Covertype are scaled and fewer than the document's, and were seen {epochs} times, not 20: what "
        "counts is that d E w² and d² E w⁴ of layers 2 to 5 are of order 1."
    )
    return {"title": "Moments of trained weights", "paper": f"{PAPER}, Table 1", "notes": notes, "cells": cells}


def figure1(
    seed: int = 0,
    progress: Progress | None = None,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    width: int = 1024,
    epochs: int = 3,
) -> dict[str, Any]:
    """Figure 1: histograms of the weights of a network trained on Covertype."""
    cells = histograms(f"5×{width}", linear(covertype(seed, progress, data, width, epochs)))
    return {"title": "Weights of a trained network", "paper": f"{PAPER}, Figure 1", "cells": cells}


def figure2(seed: int = 0, progress: Progress | None = None, *, rho: float = 2.0, epochs: int = 10) -> dict[str, Any]:
    """Figure 2: histograms of the weights of a convolutional network, here one trained on the digits."""
    from .. import data, models

    digits = data.load("digits")
    torch.manual_seed(seed)
    model = models.build("digits_cnn", rho=rho)
    x = digits.train.x.float().sub(255 * digits.mean[0]).div(255 * digits.std[0])  # type: ignore[index]
    fit(model, x, digits.train.y, epochs, 64, seed, progress)
    layers = [m.weight.detach() for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    cells = histograms(f"digits_cnn(rho={rho:g})", layers)
    notes = "The document has an ImageNet VGG16, whose weights are not here; this is a network of ours."
    return {"title": "Weights of a trained CNN", "paper": f"{PAPER}, Figure 2", "notes": notes, "cells": cells}


def covertype(
    seed: int, progress: Progress | None, given: tuple[Tensor, Tensor] | None, width: int, epochs: int
) -> nn.Module:
    """Section D.1's network: 54 inputs, five hidden layers with ReLU, seven classes; Adam at 0.001, batches of 512."""
    from .. import data, models

    if given is None:
        rows = data.load("covertype").train
        given = rows.x, rows.y
    x, y = given
    torch.manual_seed(seed)
    # Columns of mean 0 and variance 1, as the document has its numerical ones.
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6)
    model = models.build("mlp", in_features=x.shape[1], num_classes=7, hidden=(width,) * 5)
    fit(model, x, y, epochs, 512, seed, progress)
    return model


def fit(
    model: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int, seed: int, progress: Progress | None = None
) -> None:
    """Cross-entropy by Adam at 0.001."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    total = epochs * -(-len(x) // batch)
    done = 0
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            done += 1
            if progress:
                progress(done, total)
    model.eval()


def linear(model: nn.Module) -> list[Tensor]:
    return [m.weight.detach() for m in model.modules() if isinstance(m, nn.Linear)]


def histograms(name: str, layers: list[Tensor], bins: int = 61) -> list[Cell]:
    """One cell a layer: mean and standard deviation, the excess over a Gaussian's fourth moment, and the histogram."""
    cells = []
    for k, weight in enumerate(layers, 1):
        w = weight.double().flatten()
        mean, std = float(w.mean()), float(w.std())
        reach = 4 * std
        counts = torch.histc(w, bins, mean - reach, mean + reach)
        one = cell(name, "dense", {"layer": k, "quantity": "weights"}, mean, std, w.numel(), None)
        one["kurtosis"] = float(((w - mean) ** 4).mean()) / std**4 if std else None
        one["histogram"] = {"low": mean - reach, "high": mean + reach, "counts": [int(c) for c in counts]}
        cells.append(one)
    return cells


def cell(
    model: str,
    method: str,
    setting: Mapping[str, Any],
    mean: float,
    std: float | None,
    runs: int,
    paper: float | None,
    paper_std: float | None = None,
    sparsity: float = 0.0,
) -> Cell:
    """A cell of a table, as `pomona table --json` has them."""
    return {
        "model": model,
        "method": method,
        "sparsity": sparsity,
        "setting": dict(setting),
        "mean": mean,
        "std": std,
        "runs": runs,
        "paper": paper,
        "paper_std": paper_std,
    }


def apart(one: Mapping[str, Any], printing: float = 0.0005) -> float | None:
    """How far ours is from the document's, in combined standard errors beyond what rounding in print explains.

    Both have as many matrices; where the document gives no standard deviation it is taken to be ours.
    """
    if one["std"] is None or one["paper"] is None:
        return None
    error = math.hypot(one["std"], one["paper_std"] or one["std"]) / math.sqrt(one["runs"])
    return max(0.0, abs(one["mean"] - one["paper"]) - printing) / error


TABLES: dict[str, Callable[..., dict[str, Any]]] = {
    "qian-table1": table1,
    "qian-table2": table2,
    "qian-table3": table3,
    "qian-figure1": figure1,
    "qian-figure2": figure2,
}
