"""Time networks on a CPU that are dense or sparse, with their weights in fewer bits: the latency beside the accuracy.

    python benchmarks/measure/sparse_or_fewer_bits_latency.py [--json FILE] [--quick]

The networks are those of sparse_or_fewer_bits.py with random weights: the time does not depend on their values. Layouts
and types of values are those of weight_forms.py. *transformer* is the four products of a block, attention and
feed-forward, for one token and for 256. *resnet20* is the whole network for 1 and 32 images, its norms folded into the
convolutions. Dense sides run in PyTorch or in ONNX Runtime, whichever is the fastest: int8 in its dynamic products and
statically quantised convolutions, int4 in `MatMulNBits`. Sparse sides run in our packed layers. Some forms have no
kernel for a CPU, and no time. All sides of a case take turns on one thread, and a time is a median.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx_products import (
    dynamic_int8_product,
    float_product,
    nbits_product,
    open_session,
)
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from record_file import write_record
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from weight_forms import LAYOUTS, LEVELS, SCALE_VALUES, VALUES, Layout, pack_balanced, prune_matrix

import pomona as pm
from pomona.lab.kernels.benchmark import benchmark_threads, describe_device
from pomona.sparse import UnstructuredTensor
from pomona.sparse.layers import build_packed_layer
from pomona.sparse.packed_tensor import PackedTensor
from pomona.sparse.surgery import replace_module
from pomona.sparse.timing import median_seconds

WIDTH = 384  # of the transformer
PRODUCTS = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))  # rows and columns
TOKENS, IMAGES = (1, 256), (1, 32)

Row = dict[str, Any]
Call = Callable[[], Any]


class Side:
    """One way to run a form; of several ways of one form the fastest counts."""

    def __init__(self, layout: Layout, values: str, inputs: str, way: str, call: Call) -> None:
        self.form = {"layout": layout.name, "sparsity": layout.sparsity, "values": values, "inputs": inputs}
        self.way, self.call = way, call


def pack_matrix(matrix: Tensor, layout: Layout, values: str, inputs: str) -> PackedTensor | None:
    """Return a pruned matrix in the packed format of a form, None where there is none."""
    if layout.name == "balanced":
        return pack_balanced(matrix, layout, values, None if inputs == "float" else inputs)
    if values in LEVELS:
        return None
    return UnstructuredTensor.from_dense(matrix.half() if values == "fp16" else matrix)


def list_forms() -> Iterator[tuple[Layout, str, str]]:
    """Yield every layout, type of values, and type of inputs."""
    for layout in LAYOUTS:
        for values in VALUES:
            for inputs in ("float", "int8") if values in LEVELS else ("float",):
                yield layout, values, inputs


def run_all(calls: list[Call]) -> None:
    """Run calls one after the other."""
    for call in calls:
        call()


# ---- the transformer


def make_product_sides(tokens: int) -> Iterator[Side]:
    """Yield the ways to compute the products of a block of the transformer."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in PRODUCTS]
    inputs = [torch.randn(tokens, w.shape[1], generator=generator) for w in weights]
    dense = LAYOUTS[0]

    def onnx_side(values: str, rounding: str, way: str, make: Callable[[Any], Callable[[Any], Any]]) -> Side:
        calls = [partial(make(w.numpy()), x.numpy()) for w, x in zip(weights, inputs, strict=True)]
        return Side(dense, values, rounding, f"ONNX Runtime, {way}", partial(run_all, calls))

    def torch_side(values: str, dtype: torch.dtype) -> Side:
        calls = [
            partial(torch.nn.functional.linear, x.to(dtype), w.to(dtype)) for w, x in zip(weights, inputs, strict=True)
        ]
        return Side(dense, values, "float", "PyTorch", partial(run_all, calls))

    yield torch_side("fp32", torch.float32)
    yield torch_side("fp16", torch.float16)
    yield onnx_side("fp32", "float", "MatMul", float_product)
    for signed in (True, False):
        kind = "int8" if signed else "uint8"
        yield onnx_side("int8", "int8", f"DynamicQuantizeMatMul, {kind}", partial(dynamic_int8_product, signed=signed))
    for bits, level, rounding in ((8, 4, "int8"), (4, 4, "int8"), (4, 0, "float")):
        make = partial(nbits_product, bits=bits, group=SCALE_VALUES, level=level)
        yield onnx_side(f"int{bits}", rounding, f"MatMulNBits, accuracy level {level}", make)
    for layout, values, rounding in list_forms():
        if layout.name == "dense":
            continue
        packed = [pack_matrix(prune_matrix(w, layout), layout, values, rounding) for w in weights]
        linear = [p.linear for p in packed if p is not None]
        if linear:
            calls = [partial(run, x) for run, x in zip(linear, inputs, strict=True)]
            yield Side(layout, values, rounding, "packed", partial(run_all, calls))


# ---- ResNet-20


class RandomImages(CalibrationDataReader):
    """Random images from which ONNX Runtime takes the ranges of the activations."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        generator = np.random.default_rng(0)
        self.batches = iter([{"x": generator.standard_normal(shape).astype(np.float32)} for _ in range(4)])

    def get_next(self) -> dict[str, Any]:
        return next(self.batches, None)  # type: ignore[return-value]


def build_resnet() -> nn.Module:
    """Return ResNet-20 with random weights and its norms folded into the convolutions."""
    torch.manual_seed(0)
    model = pm.models.build("resnet20", num_classes=10, shortcut="B").eval()
    return fuse(model).eval()


def make_onnx_sides(model: nn.Module, x: Tensor, folder: Path) -> Iterator[Side]:
    """Yield the dense network in ONNX Runtime, in float32 and in statically quantised int8."""
    file, quantized = folder / f"{len(x)}.onnx", folder / f"{len(x)}-int8.onnx"
    torch.onnx.export(model, (x,), str(file), input_names=["x"], dynamo=True, external_data=False, verbose=False)
    shape = tuple(x.shape)
    options: dict[str, Any] = {
        "quant_format": QuantFormat.QDQ,
        "per_channel": True,
        "activation_type": QuantType.QUInt8,
    }
    quantize_static(str(file), str(quantized), RandomImages(shape), weight_type=QuantType.QInt8, **options)
    for path, values, inputs in ((file, "fp32", "float"), (quantized, "int8", "int8")):
        session = open_session(path.read_bytes())
        call = partial(session.run, None, {"x": x.numpy()})
        yield Side(LAYOUTS[0], values, inputs, "ONNX Runtime", call)


def pack_network(model: nn.Module, layout: Layout, values: str, inputs: str) -> nn.Module | None:
    """Return a network with the layers that are pruned by default packed; None where a form has no packed format."""
    packed_model = copy.deepcopy(model)
    for target in pm.prunable(packed_model).targets:
        weight = target.parameter.detach()
        pruned = prune_matrix(weight.flatten(1), layout)
        matrix = pack_matrix(pruned, layout, values, inputs)
        if matrix is None:
            return None
        packed = type(matrix).from_parts(matrix.parts, {**matrix.metadata, "shape": list(weight.shape)})
        packed_model = replace_module(
            packed_model, target.module, build_packed_layer(target.module, {"weight": packed})
        )
    return packed_model


def make_network_sides(images: int, folder: Path) -> Iterator[Side]:
    """Yield the ways to run ResNet-20."""
    model, x = build_resnet(), torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    yield Side(LAYOUTS[0], "fp32", "float", "PyTorch", partial(model, x))
    yield from make_onnx_sides(model, x, folder)
    for layout, values, inputs in list_forms():
        packed = None if layout.name == "dense" else pack_network(model, layout, values, inputs)
        if packed is not None:
            yield Side(layout, values, inputs, "packed", partial(packed, x))


# ---- measurement


def measure_case(network: str, batch: int, sides: list[Side], patience: float) -> list[Row]:
    """Return the seconds of the fastest way of each form."""
    times = median_seconds([side.call for side in sides], torch.device("cpu"), patience=patience)
    found: dict[tuple[Any, ...], Row] = {}
    for side, seconds in zip(sides, times, strict=True):
        row = {"network": network, "batch": batch, **side.form, "way": side.way, "seconds": seconds}
        best = found.setdefault(tuple(side.form.values()), row)
        if seconds < best["seconds"]:
            best |= row
    for row in found.values():
        form = f"{row['layout']:12} {row['sparsity']:6.1%} {row['values']}, inputs {row['inputs']:5}"
        print(f"{network} {batch:3}: {form} {1e6 * row['seconds']:10,.1f} µs  {row['way']}", flush=True)
    return list(found.values())


def main() -> None:
    """Time all cases, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="short timings, to see that the script runs")
    options = parser.parse_args()
    patience, rows = 0.05 if options.quick else 4.0, []
    with benchmark_threads(1, torch.device("cpu")), torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        for tokens in TOKENS:
            rows += measure_case("transformer", tokens, list(make_product_sides(tokens)), patience)
        for images in IMAGES:
            rows += measure_case("resnet20", images, list(make_network_sides(images, Path(folder))), patience)
    device = describe_device(torch.device("cpu"))
    write_record(options.json, onnxruntime=onnxruntime.__version__, device=device, rows=rows)


if __name__ == "__main__":
    main()
