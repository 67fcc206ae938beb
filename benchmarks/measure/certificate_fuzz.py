"""Attack the certificates of random networks: no bound of any value may be exceeded at any point that is found.

    python benchmarks/measure/certificate_fuzz.py [--graphs 2000] [--first 0] [--workers 2] [--json PATH]

For each seed, a random network of all supported operations (random_networks.py) is pruned at random, and bounded over
a random region by each domain: norms, intervals, linear bounds and norms of the linearised network. Points of the
region are drawn at random, at its corners, and by gradient ascent on the distance of the outputs and on single entries
of inner values. At each point the values of both networks and their gap must lie within the bounds, for every step of
the graph. A network is refused if no domain supports it. The run fails if a single bound is exceeded.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from random_networks import random_network, random_pruning
from record_file import write_record
from torch import Tensor, nn

from pomona.errors import PomonaError
from pomona.theory.certificate.domains import input_set
from pomona.theory.certificate.exported_network import evaluation_copy, export_network, output_nodes, tensors_of
from pomona.theory.certificate.forward import interval_bounds
from pomona.theory.certificate.intervals import PairBounds
from pomona.theory.certificate.linear_bounds import Effort, linear_bounds
from pomona.theory.certificate.linearised_norms import is_supported, linearised_norms
from pomona.theory.certificate.norm_bounds import NormBounds, norm_bounds
from pomona.theory.certificate.paired_graph import (
    DENSE,
    PRUNED,
    PairedGraph,
    build_steps,
    pair_steps,
    require_faithful,
)
from pomona.theory.certificate.regions import Ball, Cube, Region

TOLERANCE = 1e-9  # relative to the largest value of a step: the rounding of the values at the attacked points
SAMPLES, STARTS, ASCENT_STEPS = 48, 6, 12
TOGETHER = 20  # networks in one export
LONGEST = 50  # steps of a graph whose linear bounds are always computed; every fourth of the longer ones has them
NEURONS = 48  # entries of each value that linear bounds refine


@dataclass
class Result:
    """What became of the network of one seed."""

    seed: int
    operations: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)  # those that support the network
    refused: str = ""
    broken: list[str] = field(default_factory=list)  # a sentence for each bound that was exceeded
    looseness: float | None = None  # of the certificate, relative to the attack
    best: str = ""


class Joint(nn.Module):
    """Several networks, each on an input of its own: one export for all of them takes little more than for one."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [network(x) for network, x in zip(self.networks, inputs, strict=True)]


def check_seeds(seeds: Sequence[int]) -> list[Result]:
    """Return what becomes of the random networks of some seeds."""
    torch.set_num_threads(1)
    results = []
    for result, graph in pair_seeds(seeds):
        results.append(result if graph is None else check_graph(graph, random_region(result.seed), result))
    return results


def pair_seeds(seeds: Sequence[int]) -> Iterator[tuple[Result, PairedGraph | None]]:
    """Yield the graph of the random network of each seed and of its pruned copy, or None where it is refused."""
    drawn = [random_network(seed) for seed in seeds]
    examples = [torch.zeros(1, *shape, dtype=torch.float64) for _, shape in drawn]
    joint = evaluation_copy(Joint([model for model, _ in drawn]))
    try:
        program = export_network(joint, *[x.clone() for x in examples])
    except PomonaError as error:
        if len(seeds) == 1:
            yield Result(seeds[0], list(drawn[0][0].names), refused=str(error)), None
        else:
            for seed in seeds:
                yield from pair_seeds([seed])
        return
    tensors = tensors_of(program)
    for k, (seed, output) in enumerate(zip(seeds, output_nodes(program), strict=True)):
        network, result = joint.networks[k], Result(seed, list(drawn[k][0].names))
        pruned = {f"networks.{k}.{name}": tensor for name, tensor in random_pruning(network, seed).items()}
        try:
            steps = pair_steps(build_steps(program, tensors, output), build_steps(program, tensors | pruned, output))
            graph = PairedGraph(steps)
            require_faithful(graph, DENSE, network, examples[k])
        except PomonaError as error:
            result.refused = str(error)
            yield result, None
        else:
            yield result, graph


def check_graph(graph: PairedGraph, region: Region, result: Result) -> Result:
    """Bound a graph over a region by all domains, and compare the bounds with the values at attacked points."""
    points = attack_points(graph, region, result.seed)
    values = [torch.func.vmap(lambda x, side=side: graph.evaluate(side, x))(points) for side in (DENSE, PRUNED)]
    inputs = input_set(graph, region)
    errors = {}
    for name, bound in (
        ("norms", lambda: norm_bounds(graph, region)),
        ("intervals", lambda: interval_bounds(graph, inputs)),
        ("linear", lambda: linear_bounds(graph, inputs, Effort(neurons=NEURONS))),
        ("linearised", lambda: linearised_norms(graph, inputs)),
    ):
        if name == "linear" and len(graph.steps) > LONGEST and result.seed % 4:
            continue  # recurrent networks take seconds
        try:
            if name == "linearised" and not is_supported(graph):
                continue
            bounds = bound()
        except PomonaError as error:
            result.refused = str(error)
            continue
        result.domains.append(name)
        spread = None
        if isinstance(bounds, tuple):
            spread, bounds = bounds
            largest = float((values[DENSE][-1] - values[PRUNED][-1]).flatten(1).norm(dim=1).max())
            scale = float(values[DENSE][-1].flatten(1).norm(dim=1).max())
            if not largest <= spread.gap + TOLERANCE * scale + 1e-12:
                result.broken.append(f"{name}: the gap of the output is {largest:.6g}, certified {spread.gap:.6g}")
        check = exceeded_norms if isinstance(bounds, NormBounds) else exceeded_intervals
        result.broken += [f"{name}: {sentence}" for sentence in check(graph, bounds, values)]
        gap = bounds.output.gap if isinstance(bounds, NormBounds) else float(largest_gap(bounds[-1]).norm())
        errors[name] = gap if spread is None else min(gap, spread.gap)
    if errors:
        result.refused = ""
        result.best = min(errors, key=lambda name: errors[name])
        found = float((values[DENSE][-1] - values[PRUNED][-1]).flatten(1).norm(dim=1).max())
        result.looseness = errors[result.best] / found if found > 0 else None
    return result


def largest_gap(bounds: PairBounds) -> Tensor:
    """Return the largest absolute gap of each entry."""
    return torch.maximum(bounds.gap.high, -bounds.gap.low)


def random_region(seed: int) -> Region:
    """Return a ball or a cube of a random size; in a small one the bounds are tight, so that a wrong one shows."""
    draw = random.Random(seed)
    if draw.random() < 0.4:
        return Ball(10 ** draw.uniform(-4, 0.5))
    low = draw.uniform(-2, 2)
    return Cube(low, low + 10 ** draw.uniform(-5, 0))


# ---- points


def attack_points(graph: PairedGraph, region: Region, seed: int) -> Tensor:
    """Return points of the region (count × 1 × shape): random ones, corners, and ends of gradient ascents."""
    shape, generator = tuple(graph.input_shape[1:]), torch.Generator().manual_seed(seed)
    points = region.sample(SAMPLES, shape, generator)
    corners = region.step(points, torch.randn(points.shape, generator=generator, dtype=torch.float64), 10.0)
    parts = [points, corners, region.centre(shape)[0]]
    draw = random.Random(seed)
    targets = [len(graph.steps) - 1] + [draw.randrange(1, len(graph.steps)) for _ in range(2)]
    for target in targets:
        parts.extend(climb_step(graph, region, target, points[:STARTS], draw))
    return torch.cat(parts).unsqueeze(1)


def climb_step(graph: PairedGraph, region: Region, target: int, x: Tensor, draw: random.Random) -> Iterator[Tensor]:
    """Yield the points of a gradient ascent on the gap of one step: on its norm, or on one entry of it."""
    entry, sign = draw.randrange(graph.steps[target].shape.numel()), draw.choice((-1, 1))
    side = draw.choice((None, DENSE, PRUNED))  # the gap, or the value of one network
    for k in range(ASCENT_STEPS):
        x = x.detach().requires_grad_()
        dense, pruned = (
            torch.func.vmap(lambda v, s=s: graph.evaluate(s, v)[target])(x.unsqueeze(1)) for s in (DENSE, PRUNED)
        )
        aim = (dense - pruned if side is None else (dense, pruned)[side]).flatten(1)
        if not aim.is_floating_point():
            return
        height = aim.norm(dim=1) if target == len(graph.steps) - 1 else sign * aim[:, entry]
        if not height.requires_grad:
            return
        (gradient,) = torch.autograd.grad(height.sum(), x)
        x = region.step(x, gradient.nan_to_num(), 2 * 0.01 ** (k / (ASCENT_STEPS - 1)))
        yield x.detach()


# ---- comparisons


def exceeded_intervals(
    graph: PairedGraph, bounds: Sequence[PairBounds], values: Sequence[Sequence[Tensor]]
) -> list[str]:
    """Return a sentence for each step with a value outside of its intervals."""
    found = []
    for index, (step, bound) in enumerate(zip(graph.steps, bounds, strict=True)):
        dense, pruned = values[DENSE][index], values[PRUNED][index]
        if not dense.is_floating_point():
            continue
        scale = TOLERANCE * float(torch.maximum(dense.abs(), pruned.abs()).nan_to_num(posinf=0).max()) + 1e-12
        for name, value, interval in (
            ("dense", dense, bound.dense),
            ("pruned", pruned, bound.pruned),
            ("gap", torch.where(dense == pruned, 0.0, dense - pruned), bound.gap),
        ):
            excess = torch.maximum(value - interval.high, interval.low - value)
            if not float(excess.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).max()) <= scale:
                found.append(f"{name} of {step.op} at '{step.name}' is outside by {float(excess.max()):.3g}")
    return found


def exceeded_norms(graph: PairedGraph, bounds: NormBounds, values: Sequence[Sequence[Tensor]]) -> list[str]:
    """Return a sentence for each step with a value outside of its ball, or a gap above its bound."""
    found = []
    for index, (step, known) in enumerate(zip(graph.steps, bounds.values, strict=True)):
        if known is None:
            continue
        dense, pruned = values[DENSE][index].flatten(1), values[PRUNED][index].flatten(1)
        scale = TOLERANCE * float(torch.maximum(dense.norm(dim=1), pruned.norm(dim=1)).max()) + 1e-12
        for name, value, limit in (
            ("dense spread", dense - known.dense.flatten(), known.dense_spread),
            ("pruned spread", pruned - known.pruned.flatten(), known.pruned_spread),
            ("gap", dense - pruned, known.gap),
        ):
            largest = float(value.norm(dim=1).max())
            if not largest <= limit + scale:
                found.append(f"{name} of {step.op} at '{step.name}' is {largest:.6g}, certified {limit:.6g}")
    return found


# ---- many seeds


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    """Return the counts of a run."""
    certified = [r for r in results if r.domains]
    refused = collections.Counter(shorten(r.refused) for r in results if not r.domains)
    loose = sorted(r.looseness for r in certified if r.looseness is not None)
    return {
        "graphs": len(results),
        "certified": len(certified),
        "refused": len(results) - len(certified),
        "broken": sum(bool(r.broken) for r in results),
        "domains": dict(collections.Counter(name for r in certified for name in r.domains)),
        "best": dict(collections.Counter(r.best for r in certified)),
        "operations": dict(collections.Counter(name for r in certified for name in r.operations)),
        "median looseness": loose[len(loose) // 2] if loose else None,
        "reasons": dict(refused.most_common()),
        "faults": [asdict(r) for r in results if r.broken],
    }


def shorten(reason: str) -> str:
    """Return the reason of a refusal without the name of the step."""
    return reason.partition(" at '")[0][:90]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=2000, help="how many networks")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.graphs)
    chunks = [seeds[k : k + TOGETHER] for k in range(0, len(seeds), TOGETHER)]
    start, results = time.perf_counter(), []
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for found in pool.imap_unordered(check_seeds, chunks):
            results.extend(found)
            for result in found:
                for sentence in result.broken:
                    print(f"seed {result.seed} ({', '.join(result.operations)}): {sentence}", flush=True)
            print(f"{len(results)} graphs, {time.perf_counter() - start:.0f} s", flush=True)
    summary = summarize(sorted(results, key=lambda r: r.seed))
    print(json.dumps(summary, indent=1))
    write_record(options.json, seconds=time.perf_counter() - start, first=options.first, **summary)
    counts = ", ".join(f"{name}: {summary[name]}" for name in ("graphs", "refused", "certified", "broken"))
    print(counts)
    if summary["broken"]:
        raise SystemExit("a certificate was exceeded")


if __name__ == "__main__":
    main()
