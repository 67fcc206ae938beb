"""Measure a report of 200 runs of 300 epochs: the time to write it, its size, and when its page can be used.

    python benchmarks/measure/report_page.py

The runs are invented: 4 methods, 5 sparsities, 10 seeds, 20 layers and 450 mask updates each. The page opens in
headless Chromium, from the disk. It can be used when its first chart is drawn and answers a mouse over a point. Prints
JSON. `interactive_cpu_seconds` is the time of the page's main thread alone, which a busy machine does not lengthen.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import sync_playwright

from pomona.lab import Recipe, describe_environment
from pomona.lab.sweeps.run_store import StoredRun
from pomona.report import ReportData, RunData, write_report
from pomona.report.run_data import describe_run

METHODS, SPARSITIES, SEEDS = ("dpf", "rigl", "set", "incremental"), (0.8, 0.9, 0.95, 0.98, 0.99), 10
EPOCHS, LAYERS, UPDATES, STEPS = 300, 20, 450, 390


def make_run(method: str, sparsity: float, seed: int) -> RunData:
    """Return an invented run."""
    settings = {"data": "cifar10", "model": "resnet20", "method": {"name": method, "sparsity": sparsity}, "seed": seed}
    recipe = Recipe.load({**settings, "name": f"{method}-{sparsity:g}-seed{seed}", "train": {"epochs": EPOCHS}})
    last = 95 - 5 / (10 * (1 - sparsity)) + math.sin(7 * seed) / 3
    rows = [
        {
            "kind": "epoch",
            "epoch": k,
            "step": STEPS * k,
            "loss": 2 * math.exp(-k / 80) + 0.01 * math.sin(k * (seed + 1)),
            "lr": 0.2 * (1 - k / EPOCHS),
            "sparsity": sparsity * (1 - (1 - k / EPOCHS) ** 3),
            "accuracy": last * (1 - math.exp(-k / 20)) + 0.5 * math.sin(k * (seed + 1)),
            "test_loss": 2 * math.exp(-k / 90) + 0.2,
        }
        for k in range(1, EPOCHS + 1)
    ]
    updates = [
        {
            "step": STEPS * EPOCHS * k // UPDATES,
            "flips": 5000 / (k + 1),
            "iou": 1 - 1 / (k + 2),
            "delta": 0.1,
            "layers": [sparsity * (1 - (1 - k / UPDATES) ** 3) * (0.7 + 0.015 * layer) for layer in range(LAYERS)],
        }
        for k in range(UPDATES)
    ]
    names = [f"blocks.{layer // 2}.conv{layer % 2 + 1}.weight" for layer in range(LAYERS)]
    end = {"stage": "train", "epoch": EPOCHS, "layers": dict(zip(names, updates[-1]["layers"], strict=True))}
    counts = {"params": 270_000, "nonzeros": 270_000 * (1 - sparsity), "macs": 41e6, "macs_left": 41e6 * (1 - sparsity)}
    summary = {"accuracy": last, "sparsity": sparsity, "epoch": EPOCHS, "seconds": 900.0, "stages": [end], **counts}
    run = describe_run(StoredRun(recipe, None, summary))
    return replace(run, epochs=rows, updates=updates, sizes=dict.fromkeys(names, 13_500))


def measure_page(file: Path) -> dict[str, float]:
    """Return the seconds from opening a page to its first chart, and to the label of a point under the mouse."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        client = page.context.new_cdp_session(page)
        client.send("Performance.enable", {"timeDomain": "threadTicks"})
        start = time.perf_counter()
        page.goto(file.as_uri(), wait_until="commit")
        point = page.locator("#chart-sparsity .scatterlayer .point").first
        point.wait_for()
        drawn = time.perf_counter() - start
        point.hover(force=True)
        page.locator("#chart-sparsity .hoverlayer .hovertext").first.wait_for()
        usable = time.perf_counter() - start
        thread = {metric["name"]: metric["value"] for metric in client.send("Performance.getMetrics")["metrics"]}
        chart = page.locator("#chart-learning")
        start = time.perf_counter()
        chart.scroll_into_view_if_needed()
        chart.locator(".scatterlayer .js-line").nth(len(METHODS) * len(SPARSITIES) * SEEDS - 1).wait_for(
            state="attached"
        )
        curves = time.perf_counter() - start
        browser.close()
    return {
        "first_chart_seconds": drawn,
        "interactive_seconds": usable,
        "interactive_cpu_seconds": thread["TaskDuration"],
        "learning_curves_seconds": curves,
    }


def main() -> None:
    """Write the report, open it, and print the figures."""
    runs = [make_run(method, s, seed) for method in METHODS for s in SPARSITIES for seed in range(SEEDS)]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        file = write_report(ReportData("200 runs", tuple(runs)), Path(folder) / "report.html")
        written = time.perf_counter() - start
        figures = {"runs": len(runs), "epochs": EPOCHS, "bytes": file.stat().st_size, "write_seconds": written}
        print(json.dumps(figures | measure_page(file) | {"machine": describe_environment()["machine"]}, indent=1))


if __name__ == "__main__":
    main()
