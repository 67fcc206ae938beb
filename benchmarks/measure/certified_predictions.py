"""Measure certificates: how many predictions are proven unchanged, how loose the bounds are, and certified pruning.

    python benchmarks/measure/certified_predictions.py --json results/certificates.json

predictions   A digits MLP and a small CIFAR-10 CNN are pruned by magnitude. For regions around held-out examples, and
              for the cube of all images: the share of predictions that are proven unchanged, by norms alone (before)
              and by linear bounds (after), beside the share that an attack does not change, which bounds the truth from
              above.
looseness     Random ReLU networks of depth 2, 4 and 8 lose 30 % of each layer: the certified error over the error that
              an attack finds, over the unit ball and small cubes, before and after.
transformer   The certified error of a transformer encoder of two blocks over small cubes, beside the found one.
pruning       pm.Certified against magnitude: the sparsity reached with 99 % of the predictions certified, and the share
              that is certified on held-out examples.

CIFAR-10 is read from $POMONA_DATA. All runs on one thread.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from certificate_networks import Trained, cifar_cnn, digits_mlp, random_relu_network, random_transformer
from record_file import write_record
from torch import Tensor, nn

import pomona as pm
from pomona.theory.certificate import Ball, Cube, Region, certify, prune_by_magnitude
from pomona.theory.certificate.domains import bound_by_intervals, input_set, summarize_output
from pomona.theory.certificate.gradient_attack import attack_graph
from pomona.theory.certificate.linear_bounds import Effort, linear_bounds
from pomona.theory.certificate.norm_bounds import norm_bounds
from pomona.theory.certificate.paired_graph import PairedGraph, pair_networks

SPARSITIES = (0.05, 0.1, 0.2, 0.5)
RADII = {"digits MLP": (0.01, 0.05), "CIFAR-10 CNN": (0.001, 0.004)}
EXAMPLES = {"digits MLP": 100, "CIFAR-10 CNN": 24}  # held-out ones whose regions are certified
DEPTHS, DEPTH_SPARSITY, SEEDS = (2, 4, 8), 0.3, 3
TRANSFORMER_SPARSITIES, TRANSFORMER_NEURONS = (0.05, 0.2), 64
SMALL_CUBES = Cube(0.49, 0.51), Cube(0.499, 0.501)
BUDGET = 0.99
PRUNING_RADII = {"digits MLP": (0.0, 0.01, 0.02), "CIFAR-10 CNN": (0.0, 0.001)}
PRUNING_EXAMPLES = {"digits MLP": (1000, 150), "CIFAR-10 CNN": (1000, 16)}  # at radius 0, and at others
HALVINGS = 6  # of the search for the largest sparsity of magnitude pruning


@dataclass(frozen=True)
class Neighbourhood:
    """The ball that contains the box around an example, for bounds by norms."""

    example: Tensor
    radius: float

    def centre(self, shape: tuple[int, ...]) -> tuple[Tensor, float]:
        """Return the example, and the distance to the farthest point of its box."""
        return self.example.double()[None], self.radius * math.sqrt(self.example.numel())


# ---- predictions


def measure_predictions(network: Trained) -> list[dict[str, Any]]:
    """Return the shares of unchanged predictions at each sparsity: proven before, proven after, and not attacked."""
    rows = []
    x = network.held_out[: EXAMPLES[network.name]]
    for sparsity in SPARSITIES:
        pruned = prune_by_magnitude(network.model, sparsity)
        graph = pair_networks(network.model, pruned, x[:1])
        for radius in RADII[network.name]:
            found = pm.certify_predictions(network.model, pruned, x, radius=radius, low=0, high=1)
            before = share([is_proven_by_norms(graph, example, radius) for example in x])
            rows.append(
                prediction_row(network, sparsity, f"radius {radius:g}", before, found.share, found.largest_share)
            )
        found = pm.certify_predictions(network.model, pruned, network.held_out, region=Cube())
        with torch.no_grad():
            top = graph.run(0, network.held_out.double()).flatten(1).topk(2, 1).values
        gap = norm_bounds(graph, Cube()).output.gap
        before = share((top[:, 0] - top[:, 1] > math.sqrt(2) * gap).tolist())
        rows.append(prediction_row(network, sparsity, "all images", before, found.share, found.largest_share))
    return rows


def is_proven_by_norms(graph: PairedGraph, example: Tensor, radius: float) -> bool:
    """Return whether norms alone prove the class of an example in both networks; a margin has the norm √2."""
    output = norm_bounds(graph, Neighbourhood(example, radius)).output  # type: ignore[arg-type]
    dense, pruned = output.dense.flatten(), output.pruned.flatten()
    margins = [float(values.topk(2).values.diff().abs()) for values in (dense, pruned)]
    spreads = [math.sqrt(2) * spread for spread in (output.dense_spread, output.pruned_spread)]
    within = dense.argmax() == pruned.argmax() and margins[0] > spreads[0]
    return bool(within and max(margins[1] - spreads[1], margins[0] - spreads[0] - math.sqrt(2) * output.gap) > 0)


def prediction_row(
    network: Trained, sparsity: float, region: str, before: float, after: float, true: float
) -> dict[str, Any]:
    """Return one row of the predictions, and print it."""
    row = {"network": network.name, "sparsity": sparsity, "region": region}
    row |= {"before": before, "after": after, "true": true}
    print(
        f"{network.name:14}{sparsity:>6.0%}  {region:14}before {before:6.1%}  after {after:6.1%}  true ≤ {true:6.1%}",
        flush=True,
    )
    return row


def share(flags: list[bool]) -> float:
    """Return the share of true entries."""
    return sum(flags) / len(flags)


# ---- looseness


def measure_looseness() -> list[dict[str, Any]]:
    """Return the certified error over the found one of random networks, before and after: medians over seeds."""
    rows = []
    for depth in DEPTHS:
        for region in (Ball(1.0), *SMALL_CUBES):
            ratios = [compare_bounds(random_relu_network(depth, seed), (32,), region) for seed in range(SEEDS)]
            row: dict[str, Any] = {"depth": depth, "region": repr(region), "sparsity": DEPTH_SPARSITY}
            row |= {key: sorted(one[key] for one in ratios)[SEEDS // 2] for key in ("before", "after")}
            print(
                f"depth {depth}  {row['region']:24} before {row['before']:.4g}×  after {row['after']:.4g}×", flush=True
            )
            rows.append(row)
    return rows


def compare_bounds(dense: nn.Module, shape: tuple[int, ...], region: Region) -> dict[str, float]:
    """Return the certified error over the found one, by norms alone and by the best bounds."""
    pruned = prune_every_layer(dense, DEPTH_SPARSITY)
    after = certify(dense, pruned, shape, region=region)
    before = norm_bounds(pair_networks(dense, pruned, torch.zeros(1, *shape)), region).output.gap
    return {"before": before / after.found, "after": after.error / after.found}


def prune_every_layer(model: nn.Module, sparsity: float) -> nn.Module:
    """Return a copy of a network without the smallest weights of each matrix, the last one too."""
    pruned = copy.deepcopy(model)
    with torch.no_grad():
        for weight in (
            parameter for name, parameter in pruned.named_parameters() if parameter.ndim > 1 and name != "position"
        ):
            smallest = weight.abs().flatten().argsort()[: round(sparsity * weight.numel())]
            weight.view(-1)[smallest] = 0
    return pruned


def measure_transformer() -> list[dict[str, Any]]:
    """Return the certificates of a transformer with two blocks over small cubes, at several sparsities."""
    dense = random_transformer()
    rows = []
    for sparsity in TRANSFORMER_SPARSITIES:
        pruned = prune_every_layer(dense, sparsity)
        for region in SMALL_CUBES:
            graph = pair_networks(dense, pruned, torch.zeros(1, *dense.input_shape))
            intervals = bound_by_intervals(graph, region)
            bounds = linear_bounds(graph, input_set(graph, region), Effort(neurons=TRANSFORMER_NEURONS))
            linear = summarize_output("linear", graph, region, bounds[-1])
            found = attack_graph(graph, region=region)
            if found > linear.error:
                raise SystemExit(f"{linear.error:.4g} is certified, but {found:.4g} was found")
            row = {"region": repr(region), "sparsity": sparsity, "intervals": intervals.error, "linear": linear.error}
            row |= {"found": found, "output": linear.output}
            print(
                f"transformer {sparsity:4.0%}  {row['region']:28} by intervals {intervals.error:.4g}, by linear forms "
                f"{linear.error:.4g}, found {found:.4g}, outputs move by {linear.output:.4g} at most",
                flush=True,
            )
            rows.append(row)
    return rows


# ---- pruning


def measure_pruning(network: Trained) -> list[dict[str, Any]]:
    """Return the sparsity that certified pruning and magnitude reach with the same share of certified predictions."""
    rows = []
    for radius in PRUNING_RADII[network.name]:
        count = PRUNING_EXAMPLES[network.name][int(radius > 0)]
        x, held_out = network.examples[:count], network.held_out[:count]
        options: dict[str, Any] = {"radius": radius, "low": 0, "high": 1}
        whole, whole_held_out = (certified_share(network.model, network.model, part, options) for part in (x, held_out))
        pruners: dict[str, Callable[[], nn.Module]] = {
            "certified": lambda x=x, o=options: prune_certified(network.model, x, o),
            "certified, holdout": lambda x=x, o=options: prune_certified(network.model, x, o | {"holdout": 0.3}),
            "magnitude, global": lambda x=x, o=options, w=whole: prune_largest(network.model, x, o, w, "global"),
            "magnitude, uniform": lambda x=x, o=options, w=whole: prune_largest(network.model, x, o, w, "uniform"),
        }
        if radius > 0:
            del pruners["certified, holdout"]  # of few examples
        for method, prune in pruners.items():
            start = time.perf_counter()
            pruned = prune()
            seconds = time.perf_counter() - start
            targets = pm.prunable(network.model).targets
            zeros = sum(int((pruned.get_parameter(t.name) == 0).sum()) for t in targets)
            row: dict[str, Any] = {"network": network.name, "radius": radius, "examples": count, "method": method}
            row |= {"sparsity": zeros / sum(t.shape.numel() for t in targets), "seconds": seconds}
            row |= {"certifiable": whole, "certified": certified_share(network.model, pruned, x, options)}
            row |= {"held_out_certifiable": whole_held_out}
            row |= {"held_out": certified_share(network.model, pruned, held_out, options)}
            print(
                f"{network.name:14}radius {radius:<6g}{method:20}sparsity {row['sparsity']:6.1%}  certified "
                f"{row['certified']:6.1%} of {whole:6.1%}, held out {row['held_out']:6.1%} of {whole_held_out:6.1%}"
                f"  {seconds:.0f} s",
                flush=True,
            )
            rows.append(row)
    return rows


def certified_share(dense: nn.Module, pruned: nn.Module, x: Tensor, options: dict[str, Any]) -> float:
    """Return the share of predictions that are proven robust in both networks."""
    return float(pm.certify_predictions(dense, pruned, x, steps=0, **options).robust.double().mean())


def prune_certified(model: nn.Module, x: Tensor, options: dict[str, Any]) -> nn.Module:
    """Return a copy of a network that pm.Certified has pruned."""
    pruned = copy.deepcopy(model)
    pm.Certified(BUDGET, **options).prune(pruned, x)
    return pruned


def prune_largest(model: nn.Module, x: Tensor, options: dict[str, Any], whole: float, allocation: str) -> nn.Module:
    """Return a copy of a network, pruned by magnitude to the largest sparsity that keeps the budget."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        pruned = prune_by_magnitude(model, middle, allocation=allocation)
        kept = certified_share(model, pruned, x, options) if agrees(model, pruned, x, whole) else 0.0
        low, high = (middle, high) if kept >= BUDGET * whole - 1e-12 else (low, middle)
    return prune_by_magnitude(model, low, allocation=allocation)


@torch.no_grad()
def agrees(model: nn.Module, pruned: nn.Module, x: Tensor, whole: float) -> bool:
    """Return whether the predictions at the examples themselves leave room for the budget, which is quick to see."""
    return float((model(x).argmax(1) == pruned(x).argmax(1)).double().mean()) >= BUDGET * whole - 1e-12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    results: dict[str, Any] = {"looseness": measure_looseness(), "transformer": measure_transformer()}
    networks = [digits_mlp(), cifar_cnn()]
    results["networks"] = [{"name": n.name, "accuracy": n.accuracy} for n in networks]
    results["predictions"] = [row for network in networks for row in measure_predictions(network)]
    results["pruning"] = [row for network in networks for row in measure_pruning(network)]
    seconds = time.perf_counter() - start
    print(f"{seconds:.0f} s")
    write_record(options.json, budget=BUDGET, seconds=seconds, **results)


if __name__ == "__main__":
    main()
