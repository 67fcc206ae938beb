"""Time greedy decoding with dense and sparse weights, in float and in few bits, and check every output.

    python benchmarks/measure/decoding.py [--json FILE] [--device cuda] [--models gpt2 llama] [--batches 1 8]
        [--formats dense "balanced int4" …] [--turns N] [--steps N] [--quick]

The models are those of transformers, made from a configuration with random weights: a GPT-2 and a Llama, larger ones on
a GPU than on a CPU. The layers of their blocks are sparse or of few bits; embeddings, norms and the output layer are
dense in all, in the dtype of the activations: float16 on a GPU, bfloat16 for few bits on a CPU and for torch's own
kernels, else float32. *Balanced* keeps 3 of 32 weights, *unstructured* loses the share in its name. A step decodes one
token of every sequence, with a static cache of keys and values; on a GPU it is one CUDA graph. All formats take turns.

The weights differ between the formats. Each is therefore compared with a float32 model of its own weights, as pruned
and rounded, which reads the prompt and the tokens that were chosen: logits must be equal up to rounding, and each token
the best one, or one that is as good up to that difference. `--quick` is a tiny model for tests.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decoder import PROMPT, Decoder, Shape, build_model, compiled_functions
from dense_few_bits import Int4Linear, Int8Linear
from interleaved_timing import time_in_turns
from record_file import write_record
from torch import Tensor, nn

from pomona.lab.kernels.implementations import first_line, prune_unequal_rows
from pomona.patterns.balanced import select_per_block
from pomona.sparse import BalancedTensor, GapTensor, QuantizedBalancedTensor, UnstructuredTensor
from pomona.sparse.layers import PackedLayer, build_packed_layer, is_packable, read_weights, share_inputs
from pomona.sparse.ops import quantized_product

BLOCK, KEPT = 32, 3  # of balanced weights
# The largest difference of a logit from the float32 model, relative to the largest logit.
LIMITS = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

Row = dict[str, Any]


SHAPES = {
    ("gpt2", "cuda"): Shape(2048, 8192, 24, 16, 50257),
    ("llama", "cuda"): Shape(4096, 11008, 16, 32, 32000),
    ("gpt2", "cpu"): Shape(768, 3072, 12, 12, 50257),
    ("llama", "cpu"): Shape(2048, 5632, 3, 16, 32000),
}
QUICK = Shape(128, 256, 2, 4, 97)


# ---- the formats


@dataclass(frozen=True)
class Format:
    """A form of the weights of all layers in the blocks."""

    name: str
    half: torch.dtype  # of activations on a GPU
    single: torch.dtype  # of activations on a CPU
    make: Callable[[nn.Module], nn.Module] | None  # the layer in this format; None leaves it dense
    shared: bool = True  # whether layers that read one input may run as one product, as in `pm.compress`

    def dtype(self, device: str) -> torch.dtype:
        """Return the dtype of activations on a type of device."""
        return self.half if device == "cuda" else self.single


def pack_balanced(bits: int | None, layer: nn.Module) -> nn.Module:
    """Return a layer that keeps the largest 3 of 32 weights, packed, as codes of so many bits where they are given."""
    weight = read_weights(layer)["weight"]
    pruned = torch.where(select_per_block(weight.abs(), BLOCK, KEPT), weight, 0)
    if bits is None:
        return build_packed_layer(layer, {"weight": BalancedTensor.from_dense(pruned, BLOCK)})
    packed = QuantizedBalancedTensor.from_dense(pruned.float(), BLOCK, f"int{bits}")
    return build_packed_layer(layer, {"weight": packed})


def pack_unstructured(sparsity: float, layer: nn.Module) -> nn.Module:
    """Return a layer without a share of its weights, packed; rows keep unequal counts."""
    pruned = prune_unequal_rows(read_weights(layer)["weight"], sparsity)
    packed_format = GapTensor if pruned.is_cuda else UnstructuredTensor
    return build_packed_layer(layer, {"weight": packed_format.from_dense(pruned)})


def make_few_bits(kind: type[Int8Linear | Int4Linear], layer: nn.Module) -> nn.Module:
    """Return a layer with dense weights of few bits."""
    return kind(read_weights(layer)["weight"], layer.bias)


HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
FORMATS = {
    one.name: one
    for one in (
        Format("dense", HALF, SINGLE, None),
        Format("dense bfloat16", BRAIN, BRAIN, None),
        Format("dense int8", BRAIN, BRAIN, partial(make_few_bits, Int8Linear)),
        Format("dense int4", BRAIN, BRAIN, partial(make_few_bits, Int4Linear)),
        Format("balanced", HALF, SINGLE, partial(pack_balanced, None)),
        Format("balanced int8", HALF, BRAIN, partial(pack_balanced, 8)),
        Format("balanced int4", HALF, BRAIN, partial(pack_balanced, 4)),
        Format("balanced int4, layer by layer", HALF, BRAIN, partial(pack_balanced, 4), shared=False),
        Format("unstructured 90 %", HALF, SINGLE, partial(pack_unstructured, 0.9)),
        Format("unstructured 50 %", HALF, SINGLE, partial(pack_unstructured, 0.5)),
    )
}
# By default: bfloat16 reads as many bytes as float16, and the int8 kernel is ten times slower than dense float16.
LEFT_OUT = {"cuda": ("dense bfloat16", "dense int8")}


# ---- the models


def find_block_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that formats replace: all but the output layer."""
    output = model.get_output_embeddings()
    return [name for name, layer in model.named_modules() if is_packable(layer) and layer is not output]


@torch.no_grad()
def convert(dense: nn.Module, form: Format, reference: nn.Module) -> tuple[nn.Module, int]:
    """Return a model in a format and the bytes of its layers; the reference gets the weights that they stand for.

    What is not replaced is shared with the dense model.
    """
    reference.load_state_dict(dense.state_dict())
    model = copy.deepcopy(dense, {id(p): p for p in dense.parameters()})
    total = 0
    for name in find_block_layers(dense):
        layer = dense.get_submodule(name)
        made = layer if form.make is None else form.make(layer)
        model.set_submodule(name, made)
        weight, size = describe_weight(made)
        total += size
        read_weights(reference.get_submodule(name))["weight"].copy_(weight)
    return share_inputs(model, group_readers(model)) if form.shared else model, total


def group_readers(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of layers that read one input, as `pm.compress` finds them: queries, keys, values; SwiGLU."""
    groups: dict[str, list[str]] = {}
    for name, _ in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        for kind in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if leaf in kind:
                groups.setdefault(f"{parent}.{kind[0]}", []).append(name)
    return groups


def describe_weight(layer: nn.Module) -> tuple[Tensor, int]:
    """Return the weight of a layer in any format, outputs × inputs, and its bytes."""
    if isinstance(layer, PackedLayer):
        packed = layer.packed_weight("weight")
        return packed.dense(), packed.nbytes
    if isinstance(layer, (Int8Linear, Int4Linear)):
        return layer.dense_weight(), layer.weight_bytes
    weight = read_weights(layer)["weight"]
    return weight, weight.nbytes


@torch.no_grad()
def compare(decoder: Decoder, reference: nn.Module, count: int) -> Row:
    """Decode some tokens and compare them with the reference; raise SystemExit where rounding does not explain it."""
    batch, vocabulary = decoder.logits.shape
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocabulary, (batch, PROMPT), generator=generator).to(decoder.tokens.device)
    tokens, logits = decoder.decode(prompt, count)
    read = torch.cat([prompt, tokens[:, :-1]], 1)
    expected = reference(input_ids=read, use_cache=False).logits[:, PROMPT - 1 :].float()
    scale = float(expected.abs().max())
    error = float((logits.float() - expected).abs().max()) / scale
    best = expected.amax(-1)
    chosen = expected.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    behind = float((best - chosen).max()) / scale
    equal = int((expected.argmax(-1) == tokens).sum())
    if not (error <= LIMITS[logits.dtype] and behind <= 2 * error):
        raise SystemExit(f"logits differ by {error:.2e} of the largest one, a chosen token is {behind:.2e} behind.")
    return {"tokens": tokens.numel(), "equal_tokens": equal, "error": error, "behind": behind}


def missing_kernel(form: Format, device: str) -> str | None:
    """Return why a format cannot be measured on a device, or None."""
    if form.name.startswith(("balanced int8", "balanced int4")) and device not in quantized_product.BACKENDS:
        return f"no kernel on {device}"
    return None


def measure_model(kind: str, shape: Shape, options: argparse.Namespace) -> list[Row]:
    """Return a row for each format and batch size of one decoder."""
    device, context = options.device, PROMPT + options.steps
    reference = build_model(kind, shape, SINGLE, device)
    dense: dict[torch.dtype, nn.Module] = {}
    decoders: dict[int, dict[str, Decoder]] = {batch: {} for batch in options.batches}
    rows: dict[tuple[str, int], Row] = {}
    for name in options.formats:
        form = FORMATS[name]
        dtype = form.dtype(device)
        if not form.shared and not group_readers(reference):
            continue
        try:
            start = time.perf_counter()
            if (why := missing_kernel(form, device)) is not None:
                raise NotImplementedError(why)
            if dtype not in dense:
                dense[dtype] = build_model(kind, shape, dtype, device)
            model, size = convert(dense[dtype], form, reference)
            print(f"{kind:6} {name:30} {time.perf_counter() - start:.1f} s to convert", flush=True)
            for batch in options.batches:
                decoder = Decoder(model, batch, context)
                checked = compare(decoder, reference, min(options.steps, 16))
                decoders[batch][name] = decoder
                about = {"model": kind, "format": name, "dtype": str(dtype).removeprefix("torch."), "batch": batch}
                rows[name, batch] = {**about, "weight_bytes": size, **checked}
                print(f"{kind:6} {name:30} batch {batch}: {checked}", flush=True)
        except (RuntimeError, NotImplementedError) as error:
            print(f"{kind:6} {name:30} is not measured: {first_line(error)}", flush=True)
    del reference
    for batch, ready in decoders.items():
        loops = {name: partial(decoder.run_steps, options.steps) for name, decoder in ready.items()}
        for name, seconds in time_in_turns(loops, options.turns, options.steps, device).items():
            middle = statistics.median(seconds)
            rows[name, batch] |= {"seconds": middle, "tokens_per_second": batch / middle, "turns": seconds}
    return add_speedups(list(rows.values()))


def add_speedups(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the speed over the dense model of the same batch size, where that was measured."""
    base = {(row["model"], row["batch"]): row["seconds"] for row in rows if row["format"] == "dense"}
    return [{**row, "speedup": base.get((row["model"], row["batch"]), float("nan")) / row["seconds"]} for row in rows]


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each model, batch size and format."""
    for row in sorted(rows, key=lambda row: (row["model"], row["batch"])):
        print(
            f"{row['model']:6} batch {row['batch']}  {row['format']:30} {row['dtype']:9} "
            f"{row['weight_bytes'] / 1e6:8.1f} MB {1e6 * row['seconds']:9.1f} µs a step "
            f"{row['tokens_per_second']:9.1f} tokens/s {row['speedup']:6.2f}x"
        )


def main() -> None:
    """Measure all models, print a table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=["gpt2", "llama"], default=["gpt2", "llama"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, help="all by default")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--layers", type=int, help="blocks, where not all of them are wanted")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32, help="tokens in a turn")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.formats = options.formats or [name for name in FORMATS if name not in LEFT_OUT.get(options.device, ())]
    warnings.simplefilter("ignore", FutureWarning)
    rows, shapes = [], {}
    for kind in options.models:
        shape = QUICK if options.quick else SHAPES[kind, options.device]
        shape = replace(shape, layers=options.layers or shape.layers)
        shapes[kind] = asdict(shape)
        with compiled_functions(kind, options.device):
            rows += measure_model(kind, shape, options)
        gc.collect()
    print_table(rows)
    threads = torch.get_num_threads()
    write_record(options.json, device=options.device, threads=threads, shapes=shapes, steps=options.steps, rows=rows)


if __name__ == "__main__":
    main()
