"""Export every network in every format, and record size, difference and latency, or the sentence of a refusal.

    python benchmarks/measure/export_matrix.py [--tiny] [--seconds S] [--json PATH]

The weights are random: neither bytes nor time depend on training. They are pruned to 90 % in the pattern that a format
is for: unstructured for most, 2:4 for `2:4`, balanced blocks of 32 for `balanced` and for the files of networks that
`pm.compress` has packed. A ticket is that of an untrained network of edge-popup at 50 %. The input is one sample;
latency is the median processor time of calls in turns, on one CPU thread.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from export_networks import BLOCK, NETWORKS, Network, prune
from record_file import write_record
from torch import nn

import pomona as pm
from pomona.export import FORMATS

COMPRESSED = ", compressed"  # after a format: the network is packed by `pm.compress` before it is exported
COLUMNS = (*FORMATS, f"onnx{COMPRESSED}", f"torch-export{COMPRESSED}")
PATTERNS = {"2:4": pm.NM(2, 4), "balanced": pm.Balanced(BLOCK), "compressed": pm.Balanced(BLOCK)}


def build_case(network: Network, column: str, tiny: bool) -> tuple[nn.Module, Any, str, dict[str, Any]]:
    """Return the pruned network of a cell, its input, the pattern's name and the options of the format."""
    torch.manual_seed(0)
    model, example = network.build(tiny)
    model.eval()
    if column == "ticket":
        for parameter in model.parameters():  # edge-popup refuses norms that are trained
            parameter.requires_grad_(parameter.ndim > 1)
        pruner = pm.EdgePopup(sparsity=0.5)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        pruner.attach(model, torch.optim.SGD(trained, lr=0.1), total_steps=1)
        return model, example, "edge-popup, 50 %", {"pruner": pruner}
    pattern = PATTERNS.get("compressed" if column.endswith(COMPRESSED) else column, pm.Unstructured())
    prune(model, pattern)
    if column.endswith(COMPRESSED):
        model = pm.compress(model, policy="all", patience=0)
    return model, example, str(pattern), {}


def measure_cell(network: Network, column: str, folder: Path, tiny: bool, seconds: float) -> dict[str, Any]:
    """Return the facts of one export, or the sentence by which it is refused."""
    cell: dict[str, Any] = {"network": network.name, "format": column}
    model, example, cell["pattern"], options = build_case(network, column, tiny)
    name = column.removesuffix(COMPRESSED)
    file = folder / FORMATS[name].file_name
    try:
        report = pm.export(model, file, name, example, seconds=seconds, note=lambda sentence: None, **options)
    except pm.PomonaError as error:
        return {**cell, "refused": str(error)}
    facts = report.facts()
    layers = facts.pop("layers", None)
    if layers is not None:
        facts["packed_layers"] = [sum(layer["packed"] for layer in layers), len(layers)]
    return {**facts, **cell, "file": file.name}


def describe_cell(cell: dict[str, Any]) -> str:
    """Return a cell as one line."""
    head = f"{cell['network']:<16} {cell['format']:<24}"
    if "refused" in cell:
        return f"{head} {cell['refused']}"
    times = cell["latency"]
    return (
        f"{head} {cell['state_bytes']:>12,} → {cell['bytes']:>12,} bytes  "
        f"{1000 * times['before']:>8.3f} → {1000 * times['after']:>8.3f} ms  {cell['difference']:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny networks, to try the script")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to measure each cell (2)")
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for network in NETWORKS:
            for column in COLUMNS:
                cells.append(measure_cell(network, column, Path(folder), options.tiny, options.seconds))
                print(describe_cell(cells[-1]), flush=True)
    write_record(options.json, tiny=options.tiny, seconds=options.seconds, cells=cells)


if __name__ == "__main__":
    main()
