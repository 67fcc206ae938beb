"""Train small networks dense and sparse, store their weights in fewer bits, and record accuracy beside bytes.

    python benchmarks/measure/sparse_or_fewer_bits.py transformer|resnet20 [--json FILE] [--seeds N] [--size small]
        [--epochs N] [--layout-epochs N] [--quick]

*transformer* is the character model of language_model.py, with 10.7 million parameters or those of a `--size`, and
*resnet20* the network of the recipe dense-resnet20 on CIFAR-10. For each seed a dense network is trained, and every
layout continues from it for the same number of steps, the dense one too: sparse ones with DPF. Sparsity is the same in
all layers that DPF prunes by default. The bytes are those of the weights of these layers. On a CPU, networks are
trained in processes of their own.

Every trained network is stored in each type of values of weight_forms.py, and tested as restored; codes also with the
layers' inputs rounded to 8 bits. `--quick` takes tiny networks and data, to see that the script runs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import language_model
import torch
from record_file import write_record
from torch import Tensor, nn
from weight_forms import LAYOUTS, LEVELS, VALUES, Layout, rounded_inputs, stored_weights

import pomona as pm
from pomona.lab.recipes.bundled import find_recipe
from pomona.lab.recipes.recipe import Recipe
from pomona.lab.runs.model_file import load_model
from pomona.lab.sweeps.concurrent_runs import train_concurrently
from pomona.lab.sweeps.job import Job
from pomona.lab.sweeps.process_pool import train_in_processes

DENSE_STEPS, LAYOUT_STEPS, LAYOUT_RATE = 1200, 250, 5e-4  # of the transformer
MAX_BATCH = 32  # windows
EPOCHS, LAYOUT_EPOCHS, RATE, CONCURRENT = 16, 4, 0.2, 12  # of ResNet-20; layouts begin at half of the learning rate
BATCH = 2000  # images tested at a time

Row = dict[str, Any]


def test_forms(
    model: nn.Module, layout: Layout, test: Callable[[nn.Module], float], example: dict[str, Any]
) -> Iterator[Row]:
    """Yield a row for each type of values in which a trained network is stored, with what `test` returns for it."""
    targets = pm.prunable(model).targets
    weights = [target.parameter for target in targets]
    zeros = sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    for values in VALUES:
        with stored_weights(targets, layout, values) as nbytes:
            facts = {**example, "layout": layout.name, "sparsity": layout.sparsity, "zeros": zeros, "bytes": nbytes}
            yield {**facts, "values": values, "inputs": "float", "measured": test(model)}
            if values in LEVELS:
                with rounded_inputs(targets):
                    yield {**facts, "values": values, "inputs": "int8", "measured": test(model)}


def make_pruner(layout: Layout) -> Any:
    """Return the method that prunes to a layout, None for the dense one."""
    if layout.name == "dense":
        return None
    return pm.DPF(layout.sparsity, pattern=describe_pattern(layout), allocation="uniform")


def describe_pattern(layout: Layout) -> str:
    """Return a layout's pattern as text."""
    return "balanced(block=32, pad=true)" if layout.name == "balanced" else layout.name


def test_transformer(settings: language_model.Settings, steps: int, seed: int) -> list[Row]:
    """Return the rows of the transformer of one seed."""
    torch.set_num_threads(1)
    data = pm.data.load("shakespeare")
    parts = {name: split.x.to(settings.device) for name, split in (("train", data.train), ("test", data.test))}
    return list(train_transformers(settings, steps, seed, parts, data.classes))


def train_transformers(
    settings: language_model.Settings, steps: int, seed: int, parts: dict[str, Tensor], vocabulary: int
) -> Iterator[Row]:
    """Train a dense transformer and continue it in every layout for `steps` steps, and yield the rows of each."""
    dense, start = language_model.build_model(settings, vocabulary, seed), time.perf_counter()
    language_model.train(settings, dense, parts["train"], seed)
    print(f"seed {seed}: dense, {time.perf_counter() - start:.1f} s", flush=True)
    later = replace(settings, steps=steps, warmup=steps // 10, rate=LAYOUT_RATE)
    for layout in LAYOUTS:
        model, start = copy.deepcopy(dense), time.perf_counter()
        language_model.train(later, model, parts["train"], 100 + seed, make_pruner(layout))
        head = {"network": "transformer", "seed": seed, "measure": "perplexity"}
        found = list(
            test_forms(model, layout, lambda m: language_model.perplexity(m, parts["test"], settings.context), head)
        )
        print_rows(found, time.perf_counter() - start)
        yield from found


def train_resnets(seeds: int, epochs: int, layout_epochs: int, quick: bool) -> list[Row]:
    """Train a dense ResNet-20 with every seed, continue each in every layout, and return the rows of all."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    test = make_image_test("digits" if quick else "cifar10", device)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        dense = {seed: Job(load_recipe(seed, epochs, quick), Path(folder, f"dense{seed}")) for seed in range(seeds)}
        train_jobs(list(dense.values()))
        chosen = [(seed, layout) for seed in range(seeds) for layout in LAYOUTS]
        jobs = [
            Job(load_recipe(seed, layout_epochs, quick, layout, dense[seed].folder), Path(folder, f"layout{index}"))
            for index, (seed, layout) in enumerate(chosen)
        ]
        train_jobs(jobs)
        for job, (seed, layout) in zip(jobs, chosen, strict=True):
            model = load_model(job.folder / "model.safetensors").to(device).eval()
            head = {"network": "resnet20", "seed": seed, "measure": "accuracy"}
            rows += (found := list(test_forms(model, layout, test, head)))
            print_rows(found, 0.0)
    return rows


def train_jobs(jobs: list[Job]) -> None:
    """Train networks: at the same time on a GPU, and in one process for each core on a CPU."""
    if torch.cuda.is_available():
        outcomes = train_concurrently(jobs, CONCURRENT, print)
    else:
        outcomes = train_in_processes(jobs, os.cpu_count() or 1, print)
    for index, outcome in outcomes:
        if "error" in outcome:
            raise SystemExit(f"{jobs[index].folder.name}: {outcome['error']}")
        print(f"{jobs[index].folder.name}: {outcome['accuracy']:.2f} %", flush=True)


def load_recipe(
    seed: int, epochs: int, quick: bool, layout: Layout | None = None, origin: Path | None = None
) -> Recipe:
    """Return the recipe of a dense ResNet-20, or of one that continues it in a layout."""
    options = [f"seed={seed}", f"train.epochs={epochs}", "train.eval_every=1000", "train.checkpoint_every=0"]
    options += ["rate=cosine", f"optimizer.lr={RATE / 2 if layout else RATE}"]
    if quick:
        options += ["data=digits", "model=digits_cnn", "train.precision=float32"]
    if origin is not None:
        options.append(f"origin.run={origin}")
    if layout is None or layout.name == "dense":
        return Recipe.load(find_recipe("dense-resnet20"), options)
    pruned = [
        f"method.sparsity={layout.sparsity}",
        f"method.pattern={describe_pattern(layout)}",
        "method.allocation=uniform",
    ]
    return Recipe.load(find_recipe("dpf-resnet20"), [*options, *pruned])


def make_image_test(data: str, device: str) -> Callable[[nn.Module], float]:
    """Return a function that gives the share of test images that a network classifies correctly, in per cent."""
    loaded = pm.data.load(data)
    batches = [(x.to(device), y.to(device)) for x, y in loaded.batches(BATCH, part="test").evaluate()]

    @torch.inference_mode()
    def test(model: nn.Module) -> float:
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
        return 100 * right / sum(len(y) for _, y in batches)

    return test


def print_rows(rows: list[Row], seconds: float) -> None:
    """Print the rows of one network in a line."""
    cells = [f"{row['values']}{'/8' if row['inputs'] == 'int8' else ''} {row['measured']:.3f}" for row in rows]
    first = rows[0]
    name = f"{first['layout']:12} {first['sparsity']:.3f} ({first['zeros']:.3f})"
    print(f"seed {first['seed']}  {name}  {'  '.join(cells)}  {seconds:.1f} s", flush=True)


def choose_settings(size: str, quick: bool, device: str) -> tuple[language_model.Settings, int]:
    """Return the settings of the dense transformer, and the steps for which each layout is trained."""
    if quick:
        return replace(language_model.QUICK, device=device), 20
    settings = replace(language_model.SIZES[size], steps=DENSE_STEPS, device=device)
    return replace(settings, batch=min(settings.batch, MAX_BATCH)), LAYOUT_STEPS


def main() -> None:
    """Train and test all networks, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=("transformer", "resnet20"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", choices=("full", "small"), default="full", help="of the transformer")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of the dense ResNet-20")
    parser.add_argument("--layout-epochs", type=int, default=LAYOUT_EPOCHS, help="of each layout of ResNet-20")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.network == "resnet20":
        epochs, layout_epochs = (2, 2) if options.quick else (options.epochs, options.layout_epochs)
        rows = train_resnets(options.seeds, epochs, layout_epochs, options.quick)
        settings: dict[str, Any] = {"epochs": epochs, "layout_epochs": layout_epochs, "rate": RATE}
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        chosen, steps = choose_settings(options.size, options.quick, device)
        jobs = [(chosen, steps, seed) for seed in range(options.seeds)]
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            rows = [row for part in pool.starmap(test_transformer, jobs) for row in part]
        settings = {**dataclasses.asdict(chosen), "layout_steps": steps, "layout_rate": LAYOUT_RATE}
    write_record(options.json, network=options.network, settings=settings, rows=rows)


if __name__ == "__main__":
    main()
