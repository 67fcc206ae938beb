"""Train random draws of method × pattern × optimizer × wrapper × ranks × kill point, and compare with one process.

    python benchmarks/measure/distributed_draws.py --draws 200 --json results/distributed-draws.json

Each draw trains a small network in float64 on several gloo ranks, with DistributedDataParallel or FSDP2, on the batches
that one process trains on. Draws with a kill point write a checkpoint there, which other ranks, of another number where
the draw says so, continue with new objects; in some the first ranks are killed by SIGKILL while they train on. Masks
must equal those of one process, and weights to `TOLERANCE`: gradients of ranks are added in another order.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rank_world import RankWorld
from record_file import write_record
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import pomona as pm
from pomona.methods import make_pruner
from pomona.sharding import whole

STEPS, BATCH, TOLERANCE = 6, 8, 1e-9
WORLDS = (2, 4)
METHODS = {
    "dpf": ["every=2", "every=3, settle=0", "every=2, feedback=None"],
    "st3": [""],
    "feather": [""],
    "incremental": ["every=2"],
    "oneshot": ["", "at=0.5"],
    "acdc": ["start=0.2, phase=0.3"],
    "set": ["every=2", "every=2, share=0.5, seed=3"],
    "rigl": ["every=2"],
    "srigl": ["every=2"],
    "dsr": ["every=2, threshold=0.05"],
    "sparse_momentum": ["every=2"],
    "sfp": ["every=2"],
    "snip": [""],
    "random": ["seed=5"],
    "edge_popup": ["every=2", "every=2, distribution='ku'"],
    "iterand": ["every=2, rate=0.5"],
    "finetune": [""],
}
ELEMENTWISE = ("st3", "feather")  # which take no other pattern
COMPRESSORS = ("soft", "quantize(bits=4)", "binary", "power")
PATTERNS = ("unstructured", "filter", "kernel", "block((2, 2))", "block((None, 2))", "balanced(4)", "2:4", "1:2")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop")


@dataclass(frozen=True)
class Draw:
    """One training: what is trained, by whom, and where it is interrupted."""

    number: int
    method: str
    optimizer: str
    network: str
    wrapper: str  # ddp or fsdp
    ranks: int
    kill: int | None  # the step after which a checkpoint is written and other ranks continue
    later_ranks: int
    sigkill: bool


def make_draw(number: int, seed: int) -> Draw:
    """Return the draw of a number; a method that does not fit its pattern is drawn again."""
    generator = random.Random(f"{seed}/{number}")
    while True:
        name = generator.choice(list(METHODS))
        options = [generator.choice(METHODS[name])]
        if name not in ("srigl", "finetune"):
            pattern = "unstructured" if name in ELEMENTWISE else generator.choice(PATTERNS)
            sparsity = {"2:4": 0.5, "1:2": 0.5}.get(pattern, generator.choice([0.5, 0.7]))
            options += [f"pattern={pattern!r}", f"sparsity={sparsity}"]
            if generator.random() < 0.3:
                options.append(f"allocation={generator.choice(['global', 'uniform', 'erk'])!r}")
        if name == "dpf" and generator.random() < 0.4:
            options.append(f"compressor={generator.choice(COMPRESSORS)!r}")
        method = f"{name}({', '.join(filter(None, options))})"
        kill = generator.choice([None, *range(2, STEPS)])
        draw = Draw(
            number,
            method,
            generator.choice(OPTIMIZERS),
            generator.choice(["linear", "convolution"]),
            generator.choice(["ddp", "fsdp", "fsdp"]),
            generator.choice(WORLDS),
            kill,
            generator.choice(WORLDS if kill is None else (1, *WORLDS)),
            kill is not None and generator.random() < 0.05,
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                Training(draw, None).attach()
        except pm.PomonaError:
            continue
        return draw


def make_network(kind: str, seed: int = 0) -> nn.Module:
    """Return a small network without batch norm, whose statistics differ between ranks."""
    torch.manual_seed(seed)
    if kind == "linear":
        return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    return nn.Sequential(
        nn.Conv2d(4, 8, 2), nn.ReLU(), nn.Conv2d(8, 6, 2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4)
    ).double()


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Return an optimizer of the model's parameters."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-3)
    if name == "rmsprop":
        return torch.optim.RMSprop(model.parameters(), lr=0.005, momentum=0.9, eps=1e-3)
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind(model.parameters(), lr=0.01, eps=1e-3)


def make_batch(kind: str, step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of all ranks at a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (8,) if kind == "linear" else (4, 4, 4)
    x = torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (BATCH,), generator=generator)


class Training:
    """A draw in training, as one rank or in one process (rank None)."""

    def __init__(self, draw: Draw, rank: int | None, seed: int = 0) -> None:
        self.draw, self.rank = draw, rank
        self.size = 1 if rank is None else distributed.get_world_size()
        self.sharded = rank is not None and draw.wrapper == "fsdp"
        self.plain = make_network(draw.network, seed)
        if draw.method.startswith("finetune"):
            with torch.no_grad():
                for parameter in self.plain.parameters():
                    parameter[torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)) < 0.4] = 0
        self.model = self.plain
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            for layer in self.plain:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer)
            self.model = fully_shard(self.plain)
        elif rank is not None:
            self.model = DistributedDataParallel(self.plain)
        self.optimizer = make_optimizer(draw.optimizer, self.model)
        self.pruner = make_pruner(draw.method)

    def attach(self) -> None:
        """Attach the pruner."""
        self.pruner.attach(self.model, self.optimizer, total_steps=STEPS, steps_per_epoch=2)

    def train(self, first: int, last: int) -> None:
        """Take some steps on this rank's part of the batches."""
        for step in range(first, last):
            x, y = make_batch(self.draw.network, step)
            if self.rank is not None:
                x, y = x[self.rank :: self.size], y[self.rank :: self.size]
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def save(self, folder: Path) -> None:
        """Write a checkpoint: of FSDP2 by torch.distributed.checkpoint, else of the first rank by torch.save."""
        if self.sharded:
            from torch.distributed import checkpoint

            checkpoint.save(self.sharded_state(), checkpoint_id=folder / "checkpoint")
        elif self.rank == 0:
            torch.save({"model": self.plain.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / "whole")
        distributed.barrier()

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        if self.sharded:
            from torch.distributed import checkpoint
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

            self.attach()
            state = self.sharded_state()
            checkpoint.load(state, checkpoint_id=folder / "checkpoint")
            self.plain.load_state_dict(state["model"])
            # Score methods train no bias, which then has no state.
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)
            self.pruner.load_state_dict(state["pruner"])
        else:
            state = torch.load(folder / "whole", weights_only=True)
            self.plain.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.attach()

    def sharded_state(self) -> dict[str, Any]:
        """Return the state of model, optimizer and pruner as torch.distributed.checkpoint stores it."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": self.plain.state_dict(), "optimizer": optimizer, "pruner": self.pruner.state_dict()}

    def finish(self) -> dict[str, Any]:
        """Finish, and return masks, weights and history."""
        masks = {name: whole(mask).clone() for name, mask in self.pruner.masks().items()}
        self.pruner.finish(max_batches=0)
        weights = {name: whole(value).detach().clone() for name, value in self.plain.state_dict().items()}
        return {"masks": masks, "weights": weights, "history": self.pruner.history}


def train_alone(draw: Draw) -> dict[str, Any]:
    """Train a draw in this process, without interruption."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training(draw, None)
        training.attach()
        training.train(0, STEPS)
        return training.finish()


def train_first(draw: Draw, folder: Path) -> dict[str, Any] | None:
    """Train a draw as a rank, to its end or its kill point; a rank that is to be killed trains on."""
    warnings.simplefilter("ignore")
    training = Training(draw, distributed.get_rank())
    training.attach()
    if draw.kill is None:
        training.train(0, STEPS)
        return training.finish()
    training.train(0, draw.kill)
    training.save(folder)
    if draw.sigkill:
        (folder / "saved").touch()
        while True:
            training.train(draw.kill, STEPS)
    return None


def train_later(draw: Draw, folder: Path) -> dict[str, Any]:
    """Continue a draw from its checkpoint, from other first weights."""
    warnings.simplefilter("ignore")
    training = Training(draw, distributed.get_rank(), seed=99 if not draw.method.startswith("finetune") else 0)
    training.load(folder)
    training.train(draw.kill or 0, STEPS)
    return training.finish()


class Worlds:
    """Ranks of several world sizes, made when they are needed and after they were killed."""

    def __init__(self) -> None:
        self.open: dict[int, RankWorld] = {}

    def __getitem__(self, size: int) -> RankWorld:
        if size not in self.open:
            self.open[size] = RankWorld(size)
        return self.open[size]

    def drop(self, size: int) -> None:
        """Kill the ranks of a world, if there are any."""
        if size in self.open:
            self.open.pop(size).close(kill=True)

    def run(self, draw: Draw) -> list[dict[str, Any]]:
        """Train a draw and return the results of all ranks."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if not draw.sigkill:
                results = self[draw.ranks].run(train_first, draw, folder)
            else:
                self[draw.ranks].start(train_first, draw, folder)
                deadline = time.monotonic() + 120
                while not (folder / "saved").exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
                self.drop(draw.ranks)
            return results if draw.kill is None else self[draw.later_ranks].run(train_later, draw, folder)


def compare(draw: Draw, expected: dict[str, Any], results: list[dict[str, Any]]) -> tuple[float, str]:
    """Return the largest difference of a weight, and what else differs."""
    distance = 0.0
    for rank, result in enumerate(results):
        for name, mask in expected["masks"].items():
            if not torch.equal(mask, result["masks"][name]):
                return distance, f"the mask of {name} on rank {rank}"
        for name, weight in expected["weights"].items():
            distance = max(distance, float((weight - result["weights"][name]).abs().max()))
        for one, other in zip(expected["history"], result["history"], strict=True):
            if any(one[key] != other[key] for key in ("step", "sparsity", "flips", "layers")):
                return distance, f"the history on rank {rank}: {one} and {other}"
    return distance, "" if distance <= TOLERANCE else "the weights"


def main() -> None:
    """Train the draws, print one line for each that fails, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    worlds, began, largest = Worlds(), time.monotonic(), 0.0
    failures: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for number in range(options.first, options.first + options.draws):
        draw = make_draw(number, options.seed)
        try:
            distance, problem = compare(draw, train_alone(draw), worlds.run(draw))
            largest = max(largest, distance)
        except RuntimeError as error:
            problem = next(line for line in reversed(str(error).splitlines()) if line.strip())
            for size in (1, *WORLDS):
                worlds.drop(size)
        counts.update([draw.wrapper, f"{draw.ranks} ranks", draw.method.partition("(")[0]])
        counts.update(["killed"] * (draw.kill is not None) + ["SIGKILL"] * draw.sigkill)
        counts.update(["another number of ranks"] * (draw.kill is not None and draw.later_ranks != draw.ranks))
        if problem:
            failures.append({**asdict(draw), "problem": problem})
            print(f"{draw}\n  {problem}", flush=True)
        elif number % 20 == 19:
            print(f"{number + 1} draws, {len(failures)} failed, {time.monotonic() - began:.0f} s", flush=True)
    for size in (1, *WORLDS):
        worlds.drop(size)
    print(f"{options.draws} draws, {len(failures)} failed, largest difference of a weight {largest:.1e}")
    write_record(
        options.json,
        draws=options.draws,
        seed=options.seed,
        failed=failures,
        largest_weight_difference=largest,
        tolerance=TOLERANCE,
        counts=dict(sorted(counts.items())),
        seconds=time.monotonic() - began,
    )
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
