"""Print a hash of the bits that training and compression produce, to compare two checkouts on one machine.

    python benchmarks/measure/golden_bits.py > before.txt     # in the old checkout
    python benchmarks/measure/golden_bits.py > after.txt      # in the new checkout
    diff before.txt after.txt

A refactoring must not change a line. The hashes depend on the machine and on the version of torch, so none is
stored. Standard output has one line for each hash and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
from pathlib import Path

import torch

import pomona as pm
from pomona.cli import main

RUNS = {
    "dpf": ["train", "digits-dpf", "--set", "train.epochs=4"],
    "dpf soft": ["train", "digits-dpf", "--set", "train.epochs=4", "--set", "method.compressor=soft"],
    "rigl": ["train", "digits-dpf", "--set", "train.epochs=4", "--set", "method=rigl(every=8)"],
    "iterand": ["train", "iterand-digits", "--set", "train.epochs=2", "--set", "method.every=20"],
    "gip": ["private", "private-digits", "--set", "train.epochs=3", "--set", "private.secure=false"],
}


def hash_bytes(data: bytes) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()[:16]


def hash_run(command: list[str], folder: Path) -> str:
    """Train one run on the CPU and return the hash of its final weights. The run's own output goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            code = main([*command, "--set", "train.device=cpu", "--out", str(folder), "--json"])
    except SystemExit as stop:
        code = stop.code
    if code:
        raise SystemExit(f"{' '.join(command)} failed with exit code {code}")
    return hash_bytes((folder / "model.safetensors").read_bytes())


def hash_compressed() -> str:
    """Prune a small network on the balanced pattern, compress it, and return the hashes of both networks' outputs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64 * 64, 128)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pm.OneShot(sparsity=0.9, pattern=pm.Balanced(block=32), include=["0", "3"])
    pruner.attach(model, optimizer, total_steps=1)
    pruner.finish()
    x = torch.randn(4, 32, 8, 8)
    network = pm.compress(model.eval(), x, keep="all")
    with torch.no_grad():
        return hash_bytes(model(x).numpy().tobytes()) + " " + hash_bytes(network(x).numpy().tobytes())


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        for name, command in RUNS.items():
            print(f"{name}: {hash_run(command, Path(temporary) / name.replace(' ', '-'))}", flush=True)
    print(f"balanced compress: {hash_compressed()}")
