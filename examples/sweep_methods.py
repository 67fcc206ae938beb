"""Compare pruning methods at several sparsities, print a table, and draw a chart.

python examples/sweep_methods.py --methods dpf incremental rigl --epochs 10 --seeds 3 --out runs/compare
"""

import argparse
from pathlib import Path

from pomona.lab.sweeps.sweep import sweep
from pomona.lab.tables.chart import sparsity_chart


def main() -> None:
    """Train every combination, and show the means over seeds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", default=["dpf(every=4)", "incremental(every=4)"])
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.9, 0.95])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    options = parser.parse_args()

    recipe = {
        "data": "digits",
        "model": "digits_cnn",
        "optimizer": {"name": "sgd", "lr": 0.2, "weight_decay": 5e-3},
        "rate": "cosine",
        "train": {"epochs": options.epochs, "batch_size": 64, "clip": 1.0},
    }
    axes = {"method": options.methods, "method.sparsity": options.sparsities, "seed": list(range(options.seeds))}
    result = sweep(recipe, axes, out=options.out, jobs=1, only_missing=True)

    curves: dict[str, list[tuple[float, float]]] = {}
    for cell in result["cells"]:
        curves.setdefault(cell["method"], []).append((cell["sparsity"], cell["mean"]))
        print(f"{cell['method']:<12} {cell['sparsity']:.0%}  {cell['mean']:.1f} %  ({cell['runs']} runs)")
    chart = sparsity_chart(curves, title="digits_cnn", subtitle=f"means of {options.seeds} runs")
    (options.out / "compare.svg").write_text(chart, encoding="utf-8")
    print(f"chart in {options.out / 'compare.svg'}")


if __name__ == "__main__":
    main()
