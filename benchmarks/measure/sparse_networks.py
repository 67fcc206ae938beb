"""Time whole networks with sparse weights on a CPU: `pm.compress` beside PyTorch and the inference engines of others.

    python benchmarks/measure/sparse_networks.py [--json FILE] [--quick] [--deepsparse PYTHON] [--networks NAME …]

An MLP, ResNet-20, ResNet-50 and an LSTM keep one weight of ten: the largest of each layer after its rows were scaled
unequally, so that rows keep unequal counts as those that DPF leaves ("unstructured"), or 3 of every 32 ("balanced").
All sides have the same weights in float32 and take turns on one thread; every output is compared with float64. ONNX
Runtime and OpenVINO multiply the zeros; DeepSparse skips them and runs in a process of its own (`deepsparse_peer.py`),
with the PYTHON of an environment that has it. *warm* is each side right after itself, *cold* after all caches were
emptied. `pm.compress` chooses by its own timing, whose caches are those of a model of that size.

Targets: `pm.compress` is ahead of every engine at batch 1, and never behind `torch.compile`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import onnxruntime
import openvino
import torch
from deepsparse_process import DeepSparse, start_deepsparse
from record_file import write_record
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from unstructured_kernels import STATES, time_call, time_in_turns

import pomona as pm
from pomona import models
from pomona.lab.kernels.benchmark import benchmark_threads, describe_device
from pomona.lab.kernels.implementations import prune_unequal_rows
from pomona.patterns import Balanced
from pomona.sparse.timing import FLUSH_BYTES, flush_caches

SPARSITY = 0.9
MASKS = ("unstructured", "balanced")
EAGER, COMPILED, COMPRESSED, DEEPSPARSE = "PyTorch", "torch.compile", "pm.compress", "DeepSparse"
ONNX_RUNTIME, OPENVINO = "ONNX Runtime", "OpenVINO"
ONNX_OPSET = 13  # which DeepSparse 1.8 reads
MAX_ERROR = 1e-3  # relative to the largest output
STEPS = 16  # of the LSTM's input


class LastOutput(nn.Module):
    """An LSTM that returns its outputs alone."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def build_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def build_wide_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024))


@dataclass(frozen=True)
class Network:
    """A network, the shape of its input without the batch, which is dimension `batch_dim`, and the batch sizes."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    batch_dim: int = 0

    def make_input(self, batch: int) -> Tensor:
        """Return a random input."""
        shape = (*self.shape[: self.batch_dim], batch, *self.shape[self.batch_dim :])
        return torch.randn(shape, generator=torch.Generator().manual_seed(batch))


NETWORKS = (
    Network("mlp", build_mlp, (784,), (1, 16, 64)),
    Network("wide-mlp", build_wide_mlp, (1024,), (1, 16, 64)),
    Network("resnet20", partial(models.build, "resnet20"), (3, 32, 32)),
    Network("resnet50", partial(models.build, "resnet50"), (3, 224, 224)),
    Network("lstm", lambda: LastOutput(nn.LSTM(1500, 1500, 2)), (STEPS, 1500), batch_dim=1),
)


@dataclass(frozen=True)
class Timing:
    """The time of one side for one network, mask, batch size and state of the caches."""

    network: str
    mask: str
    batch: int
    state: str
    side: str
    seconds: float  # the median
    fastest: float
    error: float  # the largest difference from float64, relative to the largest value


def prune(model: nn.Module, mask: str) -> nn.Module:
    """Set nine of ten weights of every matrix to zero, and batch norms to values other than their initial ones."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            matrix = parameter.data.flatten(1)
            if mask == "balanced":
                chosen = Balanced(block=32, pad=True).select_masks([matrix.abs()], SPARSITY)[0]
                matrix.mul_(chosen)
            else:
                matrix.copy_(prune_unequal_rows(matrix, SPARSITY))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 1.5, generator=generator)  # type: ignore[union-attr]
            module.running_mean.normal_(0, 0.1, generator=generator)  # type: ignore[union-attr]
    return model.eval()


def export(model: nn.Module, x: Tensor, folder: str) -> Path:
    """Write a model as ONNX, in the oldest form that all engines read."""
    file = Path(folder) / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), file, dynamo=False, opset_version=ONNX_OPSET, input_names=["x"])
    return file


def start_onnx_runtime(file: Path) -> Callable[[Tensor], Tensor]:
    """Return a model of a file as a function, in ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def start_openvino(file: Path) -> Callable[[Tensor], Tensor]:
    """Return a model of a file as a function, in OpenVINO, which computes in float32."""
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(str(file), "CPU", options).create_infer_request()
    return lambda x: torch.from_numpy(request.infer({"x": x.numpy()}, share_inputs=True, share_outputs=True)[0])


def make_sides(model: nn.Module, x: Tensor, file: Path, patience: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the sides that run in this process."""
    torch.compiler.reset()
    return {
        EAGER: model,
        COMPILED: torch.compile(model),
        ONNX_RUNTIME: start_onnx_runtime(file),
        OPENVINO: start_openvino(file),
        COMPRESSED: pm.compress(model, x, patience=patience),
    }


def measure_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest difference, relative to the largest value; raise RuntimeError where it is no rounding."""
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    if not error <= MAX_ERROR:
        raise RuntimeError(f"an output differs from float64 by {error:.1e}.")
    return error


def time_network(network: Network, mask: str, batch: int, patience: float, peer: DeepSparse | None) -> Iterator[Timing]:
    """Yield the timings of one network."""
    torch.manual_seed(0)
    model, x = prune(network.build(), mask), network.make_input(batch)
    exact = model.double()(x.double())
    model.float()
    with tempfile.TemporaryDirectory() as folder:
        file = export(model, x, folder)
        sides = make_sides(model, x, file, patience)
        errors = [measure_error(side(x), exact) for side in sides.values()]
        flush = partial(flush_caches, torch.zeros(FLUSH_BYTES).byte())
        calls = [partial(time_call, partial(side, x), flush) for side in sides.values()]
        names = [*sides]
        if peer is not None:
            peer.compile_model(file, x)
            errors.append(measure_error(peer.run(x), exact))
            calls.append(peer.seconds)  # type: ignore[arg-type]
            names.append(DEEPSPARSE)
    for state in STATES:
        times = time_in_turns(calls, state == "cold", patience)
        for name, error, measured in zip(names, errors, times, strict=True):
            case = (network.name, mask, batch, state, name)
            yield Timing(*case, statistics.median(measured), min(measured), error)


def make_table(timings: Sequence[Timing]) -> Table:
    """Return the microseconds of every side, one line for each network, mask, batch size and state, and the gains."""
    names = list(dict.fromkeys(t.side for t in timings))
    title = "µs, medians, one thread; how many times faster pm.compress is in parentheses"
    table = Table("network", "mask", "batch", "caches", *names, title=title)
    lines: dict[tuple[Any, ...], dict[str, float]] = {}
    for t in timings:
        lines.setdefault((t.network, t.mask, str(t.batch), t.state), {})[t.side] = t.seconds
    for line, found in lines.items():
        cells = [f"{1e6 * found[name]:,.0f} ({found[name] / found[COMPRESSED]:.2f})" for name in names]
        table.add_row(*line, *cells)
    return table


def compare_with_targets(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """Return how many times faster `pm.compress` is than each side that it must not be slower than."""
    ours = {(t.network, t.mask, t.batch, t.state): t.seconds for t in timings if t.side == COMPRESSED}
    judged = [t for t in timings if t.side != COMPRESSED and (t.batch == 1 or t.side in (EAGER, COMPILED))]
    return [
        {
            **{key: getattr(t, key) for key in ("network", "mask", "batch", "state")},
            "peer": t.side,
            "reached": t.seconds / ours[t.network, t.mask, t.batch, t.state],
        }
        for t in judged
    ]


@torch.inference_mode()
def measure_all(networks: Sequence[Network], deepsparse: str | None, patience: float) -> dict[str, Any]:
    """Measure all networks, print the results and return them."""
    console, timings = Console(width=160), []
    with benchmark_threads(1, torch.device("cpu")), start_deepsparse(deepsparse) as peer:
        for network, mask in product(networks, MASKS):
            for batch in network.batches:
                timings += time_network(network, mask, batch, patience, peer)
            console.print(make_table([t for t in timings if t.network == network.name]))
    answers = compare_with_targets(timings)
    for answer in answers:
        if answer["reached"] < 1:
            print("MISSED: {network}, {mask}, batch {batch}, {state}: {reached:.2f} × {peer}".format(**answer))
    device = describe_device(torch.device("cpu"))
    return {"device": device, "timings": [asdict(timing) for timing in timings], "targets": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="the smallest network, to see that the script runs")
    parser.add_argument("--deepsparse", metavar="PYTHON", help="the Python of an environment that has DeepSparse")
    parser.add_argument("--patience", type=float, default=3.0, help="seconds for each network, mask and batch")
    names = [network.name for network in NETWORKS]
    parser.add_argument("--networks", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    chosen = ["resnet20"] if options.quick else options.networks
    networks = [network for network in NETWORKS if network.name in chosen]
    write_record(options.json, **measure_all(networks, options.deepsparse, 0.1 if options.quick else options.patience))


if __name__ == "__main__":
    main()
