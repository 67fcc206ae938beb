"""Every CUDA C++ kernel, as the backend chooses it for a GPU, compiles for that GPU and fits its shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest
import torch
from device_compiler import compile_source
from packing import balanced_weight, unstructured_weight
from recorded_kernels import GPUS, MULTIPROCESSOR_REGISTERS, RecordedKernel, properties_of
from slow_cases import slow_unless
from torch import Tensor

from pomona.sparse import BalancedTensor, BitmapTensor, GapTensor, QuantizedBalancedTensor, UnstructuredTensor
from pomona.sparse.conv_geometry import ConvGeometry
from pomona.sparse.cuda import backend, conv2d, hopper_wgmma, launcher, lstm, quantized
from pomona.sparse.format import DTYPES

Recorded = dict[str, list[RecordedKernel]]
HALVES = torch.float16, torch.bfloat16


def make_balanced(rows: int, columns: int, block: int, kept: int, dtype: torch.dtype) -> BalancedTensor:
    """Return a balanced matrix."""
    return BalancedTensor.from_dense(balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype), block)


@cache
def pack_once(kind: type[Any], rows: int, columns: int, sparsity: float, dtype: torch.dtype) -> Any:
    """Return a matrix with survivors anywhere in a packed format."""
    return kind.from_dense(unstructured_weight(rows, columns, sparsity).to(dtype))


def multiply_balanced(dtype: torch.dtype, n: int, rows: int, columns: int, block: int, kept: int) -> Tensor | None:
    """Multiply a balanced matrix by n vectors."""
    packed = make_balanced(rows, columns, block, kept, dtype)
    x = torch.zeros(n, columns, dtype=dtype)
    return backend.multiply_packed(x, packed.values, packed.indices, None, rows, columns, block, False, False)


def run_balanced_products() -> None:
    """Multiply balanced matrices by a few and by many vectors."""
    for dtype, n, (block, kept) in product(DTYPES, (1, 8), ((16, 4), (32, 1))):
        assert multiply_balanced(dtype, n, 512, 512, block, kept) is not None
    for n, (block, kept), dtype in zip(
        (24, 64, 64, 256), ((10, 1), (16, 2), (32, 9), (32, 3)), cycle(HALVES), strict=False
    ):
        assert multiply_balanced(dtype, n, 512, 2048, block, kept) is not None


def run_unstructured_products() -> None:
    """Multiply matrices with survivors anywhere, of which some are wide, by a few vectors."""
    for dtype, n, columns in product(DTYPES, (1, 8), (300, 20_000)):
        sliced, gaps = (pack_once(kind, 64, columns, 0.9, dtype) for kind in (UnstructuredTensor, GapTensor))
        x, sizes = torch.zeros(n, columns, dtype=dtype), (None, 64, columns, False, False)
        assert backend.multiply_unstructured(x, *sliced.parts, *sizes) is not None
        assert backend.multiply_gaps(x, *gaps.parts, *sizes) is not None


def run_bitmap_products() -> None:
    """Multiply matrices packed with bitmaps by few and by many vectors."""
    for dtype, n, sparsity in product(HALVES, (1, 200), (0.9,)):
        packed = pack_once(BitmapTensor, 512, 2048, sparsity, dtype)
        x = torch.zeros(n, 2048, dtype=dtype)
        assert backend.multiply_bitmap(x, *packed.parts, None, *packed.sizes, False, False) is not None


def run_code_products() -> None:
    """Multiply balanced matrices of codes by a few vectors."""
    for dtype, (n, values, block, kept) in product(
        DTYPES, ((1, "int4", 16, 2), (8, "int8", 32, 3), (4, "int4", 64, 16))
    ):
        weight = balanced_weight(256, 4096, block=block, kept=kept)
        packed = QuantizedBalancedTensor.from_dense(weight, block, values)
        x = torch.zeros(n, 4096, dtype=dtype)
        assert quantized.multiply_quantized(x, *packed.parts, None, *packed.sizes[:-1], False, False) is not None


def run_convolutions() -> None:
    """Compute convolutions of 1×1 and 3×3."""
    for dtype, (size, kept, images) in product(HALVES, ((1, 2, 1), (3, 5, 16))):
        packed = make_balanced(256, 64 * size * size, 32, kept, dtype)
        geometry = ConvGeometry.from_pairs((size, size), (1, 1), (size // 2, size // 2), (1, 1))
        x = torch.zeros(images, 64, 14, 14, dtype=dtype)
        assert conv2d.convolve(x, packed.values, packed.indices, None, 256, 32, geometry, False) is not None


def run_lstm_layers() -> None:
    """Run a layer of an LSTM for one step."""
    for dtype, n in product(DTYPES, (1, 5)):
        packed = make_balanced(4 * 64, 128, 32, 3, dtype)
        values, indices = packed.values.unsqueeze(0), packed.indices.unsqueeze(0)
        states = lstm.run_lstm(
            torch.zeros(1, n, 64, dtype=dtype), None, None, [values[0]], [indices[0]], [torch.zeros(1, 256)], [32]
        )
        assert states is not None


RUNS: dict[str, Callable[[], None]] = {
    "balanced": run_balanced_products,
    "unstructured": run_unstructured_products,
    "bitmap": run_bitmap_products,
    "codes": run_code_products,
    "convolution": run_convolutions,
    "lstm": run_lstm_layers,
}
# The kernels of every run, besides those for tensor cores and balanced matrices, which depend on the GPU.
GATHER_KERNELS = {
    "balanced": {"warp_shuffle"},
    "unstructured": {"slice_gather", "gap_gather"},
    "bitmap": {"bitmap_tiles"},
    "codes": {"code_gather"},
    "convolution": set(),
    "lstm": {"warp_shuffle"},
}
FAST = [("lstm", (8, 6))]


@pytest.mark.parametrize(("run", "capability"), slow_unless(FAST, product(RUNS, GPUS)))
def test_the_kernels_that_are_chosen_compile_and_fit(
    run: str, capability: tuple[int, int], recording_gpu: Recorded
) -> None:
    RUNS[run]()
    limit = properties_of(capability).shared_memory_per_block_optin
    for kernel in (kernel for kernels in recording_gpu.values() for kernel in kernels):
        compiled = compile_source(kernel.source, kernel.architecture(capability))
        used = compiled.shared_bytes + kernel.shared_bytes
        assert used <= limit, f"{kernel} has {used} bytes of shared memory of {limit}"
        assert compiled.registers * kernel.threads <= MULTIPROCESSOR_REGISTERS, f"{kernel} has too many registers"


@pytest.mark.parametrize("capability", list(GPUS))
@pytest.mark.parametrize("run", list(RUNS))
def test_the_capability_chooses_the_kernels(run: str, capability: tuple[int, int], recording_gpu: Recorded) -> None:
    """A kernel for one architecture alone is chosen for that one; the others have the kernel that takes its place."""
    RUNS[run]()
    expected = GATHER_KERNELS[run].copy()
    if run in ("balanced", "convolution"):
        expected |= {"hopper_wgmma"} if capability[0] == hopper_wgmma.MAJOR else {"tensor_core"}
    if run == "balanced" and "hopper_wgmma" in expected:
        expected |= {"arrange_input"}
    assert set(recording_gpu) == expected
    for kernels in recording_gpu.values():
        required = {launcher.REQUIRED_ARCHITECTURES.get(kernel.name) for kernel in kernels} - {None}
        assert required <= {"{}{}a".format(*capability)}
        shared = max(kernel.shared_bytes for kernel in kernels)
        assert shared <= properties_of(capability).shared_memory_per_block_optin


def test_every_source_is_among_the_kernels() -> None:
    """A new source fails here until a run above compiles it."""
    known = set().union(*GATHER_KERNELS.values(), {"tensor_core", "hopper_wgmma", "arrange_input"})
    assert {path.stem for path in launcher.FOLDER.glob("*.cu")} == known


@pytest.mark.parametrize("compute", ["80", "90", "120"])
def test_the_compiler_refuses_what_an_architecture_does_not_have(compute: str) -> None:
    """The instruction wgmma is that of Hopper's architecture-specific features alone."""
    source = 'extern "C" __global__ void sync() { asm volatile("wgmma.fence.sync.aligned;"); }'
    assert compile_source(source, "90a").registers > 0
    with pytest.raises(RuntimeError, match="wgmma"):
        compile_source(source, compute)
