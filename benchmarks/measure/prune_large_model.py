"""Prune a decoder in the shape of Llama 7B, with random weights, and record the time and the peak memory.

    python benchmarks/measure/prune_large_model.py [--json FILE] [--method wanda sparsegpt] [--blocks N] [--windows N]
        [--tokens N] [--batch N] [--pattern P] [--device cuda] [--quick]

The model is made from its configuration in bfloat16: 32 blocks, 4096 wide, 11,008 neurons, 6.7 billion parameters. It
is pruned to 50 % with windows of random tokens, one block at a time. On a GPU a tiny model is pruned before it, so that
no kernel is compiled meanwhile. The peak memory is that of the GPU, or on a CPU of the process so far, its libraries
included. `--blocks 2` measures a block where the model does not fit; `--quick` is a tiny model for tests.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from pathlib import Path
from typing import Any

import torch
from record_file import write_record
from torch import nn

import pomona as pm

METHODS = {"magnitude": pm.posttraining.Magnitude, "wanda": pm.Wanda, "sparsegpt": pm.SparseGPT}
SHAPE = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
QUICK_SHAPE = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4, "vocab_size": 100}


def build_model(shape: dict[str, int], blocks: int, device: str) -> nn.Module:
    """Return a Llama with random weights in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(num_hidden_layers=blocks, **shape)).requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def synchronize(device: str) -> None:
    """Wait for the work that a GPU has been given."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure_peak(device: str) -> int:
    """Return the peak memory in bytes: that of the GPU, or of the process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(method: str, pattern: str, shape: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Prune one model and return what it took."""
    model = build_model(shape, options.blocks, options.device)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(shape["vocab_size"], (options.windows, options.tokens), generator=generator)
    data = [{"input_ids": part} for part in windows.to(options.device).split(options.batch)]
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    synchronize(options.device)
    start = time.perf_counter()
    report = METHODS[method](0.5, pattern=pattern).prune(model, data, max_batches=None)
    synchronize(options.device)
    seconds = time.perf_counter() - start
    row = {
        "method": method,
        "pattern": pattern,
        "blocks": options.blocks,
        "windows": options.windows,
        "tokens": options.tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
        "model_bytes": size,
        "peak_bytes": measure_peak(options.device),
        "seconds": seconds,
        "seconds_per_block": seconds / options.blocks,
        "sparsity": float(report.sparsity),
    }
    print(
        f"{method:10} {pattern:13} {options.blocks} blocks of {row['parameters']:,} parameters, "
        f"{options.windows} × {options.tokens} tokens: {seconds:.1f} s, {row['seconds_per_block']:.2f} s a block, "
        f"model {size / 1e9:.1f} GB, peak {row['peak_bytes'] / 1e9:.1f} GB, sparsity {row['sparsity']:.2%}",
        flush=True,
    )
    del model, report
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return row


def main() -> None:
    """Prune a model by each method, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["wanda", "sparsegpt"])
    parser.add_argument("--pattern", default="unstructured")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1, help="windows that run together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    shape = QUICK_SHAPE if options.quick else SHAPE
    if options.device == "cuda":
        small = argparse.Namespace(**{**vars(options), "blocks": 2, "windows": 2, "tokens": 64})
        for method in options.method:
            measure(method, options.pattern, QUICK_SHAPE, small)
    rows = [measure(method, options.pattern, shape, options) for method in options.method]
    write_record(options.json, shape=shape, device=options.device, rows=rows)


if __name__ == "__main__":
    main()
