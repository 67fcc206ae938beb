"""Train a small GPT-2 on Shakespeare's plays, prune it in five ways, and record the perplexity of each.

    python benchmarks/measure/language_model.py [--json FILE] [--seeds N] [--steps N] [--device cuda]
        [--size small]

The model reads characters: 10.7 million parameters, or 3.6 million with `--size small`, trained for a fixed number of
steps. Magnitude, Wanda and SparseGPT prune the trained model at once, with windows of the training text for
calibration. DPF trains a model of its own from the same initial weights, for as many steps as the dense one. All prune
the same layers, those of attention and feed-forward, at the same sparsity in each layer. The perplexity is that of a
character of the test text, which nothing was chosen by. Each seed is a process of its own, and all of them run at the
same time; `--size quick` is a tiny model for tests. The text is found as `pm.data.load("shakespeare")` finds it, in the
folder of POMONA_DATA.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from record_file import write_record
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm

CASES: tuple[dict[str, Any], ...] = (
    {"sparsity": 0.5, "pattern": "unstructured"},
    {"sparsity": 0.7, "pattern": "unstructured"},
    {"sparsity": 0.5, "pattern": "2:4"},
)
AFTER_TRAINING = {"magnitude": pm.posttraining.Magnitude, "wanda": pm.Wanda, "sparsegpt": pm.SparseGPT}

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The model and its training."""

    width: int = 384
    layers: int = 6
    heads: int = 6
    context: int = 256  # characters in a window
    dropout: float = 0.2
    batch: int = 32  # windows
    steps: int = 1500
    warmup: int = 100  # steps
    rate: float = 1e-3  # the highest learning rate; it falls to a tenth of it, as a cosine
    weight_decay: float = 0.1
    calibration: int = 128  # windows
    device: str = "cpu"


SMALL = Settings(layers=2, context=64, dropout=0.0, batch=16, steps=1200)  # for a CPU
QUICK = Settings(width=32, layers=2, heads=2, context=32, batch=8, steps=24, warmup=4, calibration=8)
SIZES = {"full": Settings(), "small": SMALL, "quick": QUICK}


def build_model(settings: Settings, vocabulary: int, seed: int) -> nn.Module:
    """Return a GPT-2 with random weights, on the device."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), settings.dropout)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=settings.context, n_embd=settings.width, n_layer=settings.layers,
        n_head=settings.heads, bos_token_id=0, eos_token_id=0, use_cache=False,
        activation_function="gelu_pytorch_tanh", **dropout,  # GPT-2's own function, in one kernel
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(settings.device)


def draw_windows(tokens: Tensor, context: int, count: int, generator: torch.Generator) -> Tensor:
    """Return random windows of a text, one in each row."""
    starts = torch.randint(len(tokens) - context, (count, 1), generator=generator)
    return tokens[(starts + torch.arange(context)).to(tokens.device)]


def learning_rate(settings: Settings, step: int) -> float:
    """Return the share of the highest learning rate at a step."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def mean_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of each character after the first one of its window."""
    logits = model(input_ids=windows).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def train(settings: Settings, model: nn.Module, tokens: Tensor, seed: int, pruner: Any = None) -> nn.Module:
    """Train a model for a fixed number of steps, and prune it meanwhile where a pruner is given."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = settings.device == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.99), fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(settings, step))
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # of dropout
    if pruner is not None:
        pruner.attach(model, optimizer, total_steps=settings.steps)
    model.train()
    for _ in range(settings.steps):
        windows = draw_windows(tokens, settings.context, settings.batch, generator)
        with torch.autocast(settings.device, torch.bfloat16, enabled=settings.device == "cuda"):
            loss = mean_loss(model, windows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    if pruner is not None:
        pruner.finish()
    return model.eval()


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, context: int) -> float:
    """Return the perplexity of a text, read in windows that follow each other; the first character is given."""
    model.eval()
    total, count = 0.0, 0
    for window in tokens[: len(tokens) // context * context].view(-1, context).split(64):
        loss = mean_loss(model, window)
        predicted = window.numel() - len(window)
        total, count = total + float(loss) * predicted, count + predicted
    return math.exp(total / count)


def measure_seed(settings: Settings, seed: int) -> list[Row]:
    """Return the rows of one seed: the dense model, and each method in each case."""
    torch.set_num_threads(1)
    data = pm.data.load("shakespeare")
    parts = {name: split.x.to(settings.device) for name, split in (("train", data.train), ("test", data.test))}
    return list(measure_models(settings, seed, parts, data.classes))


def measure_models(settings: Settings, seed: int, parts: dict[str, Tensor], vocabulary: int) -> Iterator[Row]:
    """Yield the row of each model that one seed trains or prunes."""

    def row(method: str, model: nn.Module, start: float, case: dict[str, Any] | None = None) -> Row:
        seconds = time.perf_counter() - start
        found = perplexity(model, parts["test"], settings.context)
        reached = measure_sparsity(model, names)
        case = case or {"sparsity": 0.0, "pattern": "dense"}
        label = f"{method:10} {case['pattern']:14} {case['sparsity']:4.0%}"
        print(f"seed {seed}  {label}  perplexity {found:.3f}  {seconds:.1f} s", flush=True)
        return {"seed": seed, "method": method, **case, "perplexity": found, "reached": reached, "seconds": seconds}

    names: list[str] = []
    dense, start = build_model(settings, vocabulary, seed), time.perf_counter()
    train(settings, dense, parts["train"], seed)
    yield row("dense", dense, start)
    generator = torch.Generator().manual_seed(1000 + seed)
    windows = draw_windows(parts["train"], settings.context, settings.calibration, generator)
    calibration = [{"input_ids": part} for part in windows.split(16)]
    for case in CASES:
        for method, kind in AFTER_TRAINING.items():
            model, start = copy.deepcopy(dense), time.perf_counter()
            names = list(kind(**case).prune(model, calibration).masks)
            yield row(method, model, start, case)
        model, start = build_model(settings, vocabulary, seed), time.perf_counter()
        pruner = pm.DPF(**case, allocation="uniform")
        train(settings, model, parts["train"], seed, pruner)
        if sorted(pruner.masks()) != sorted(names):
            raise SystemExit(f"DPF prunes other layers than the others: {sorted(set(pruner.masks()) ^ set(names))}.")
        yield row("dpf", model, start, case)


def measure_sparsity(model: nn.Module, names: list[str]) -> float:
    """Return the share of zeros among the weights of these names."""
    weights = [model.get_parameter(name) for name in names]
    return sum(int((w == 0).sum()) for w in weights) / max(1, sum(w.numel() for w in weights))


def summarize(rows: list[Row]) -> list[Row]:
    """Return the mean and the standard deviation of the perplexity over the seeds, for each method and case."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        found.setdefault((row["method"], row["sparsity"], row["pattern"]), []).append(row["perplexity"])
    return [
        {
            **dict(zip(("method", "sparsity", "pattern"), key, strict=True)),
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
            "runs": len(values),
        }
        for key, values in found.items()
    ]


def main() -> None:
    """Measure all seeds, print the means, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default="full")
    options = parser.parse_args()
    settings = replace(SIZES[options.size], device=options.device)
    if options.steps:
        settings = replace(settings, steps=options.steps)
    jobs = [(settings, seed) for seed in range(options.seeds)]
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        rows = [row for part in pool.starmap(measure_seed, jobs) for row in part]
    means = summarize(rows)
    for mean in means:
        name = f"{mean['method']:10} {mean['pattern']:14} {mean['sparsity']:.0%}"
        print(f"{name:32} {mean['mean']:.3f} ± {mean['std']:.3f}")
    write_record(options.json, settings=asdict(settings), rows=rows, means=means)


if __name__ == "__main__":
    main()
