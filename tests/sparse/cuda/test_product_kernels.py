"""All kernels of the CUDA backend: emulated products, the choice between them, and products on a device."""

from __future__ import annotations

import importlib
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from emulation import multiply, needs_compiler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing import balanced_weight, is_close
from slow_cases import slow_after
from torch import Tensor

from pomona.sparse import BalancedTensor
from pomona.sparse.cuda import backend, hopper_wgmma, tensor_core, warp_shuffle
from pomona.sparse.cuda.tensor_core_common import TensorCoreConfig
from pomona.sparse.format import DTYPES
from pomona.sparse.ops import balanced, product


@needs_compiler
@pytest.mark.usefixtures("emulated_gpu")
class TestEmulated:
    @pytest.mark.parametrize(
        ("dtype", "rows", "columns", "block", "kept", "n"),
        slow_after(
            1,
            [
                (torch.float16, 64, 128, 32, 3, 8),
                (torch.bfloat16, 70, 296, 32, 3, 5),  # incomplete last rows, columns and vectors
                (torch.float16, 300, 1100, 32, 4, 20),  # several thread blocks, clusters, and steps
                (torch.bfloat16, 40, 130, 25, 6, 17),
                (torch.float16, 33, 200, 10, 1, 9),
                (torch.float16, 65, 333, 16, 9, 1),
                (torch.bfloat16, 20, 31, 32, 2, 70),  # fewer columns than a block
            ],
        ),
    )
    @pytest.mark.parametrize("kernel", [tensor_core, hopper_wgmma])
    def test_more_vectors(
        self, kernel: ModuleType, dtype: torch.dtype, rows: int, columns: int, block: int, kept: int, n: int
    ) -> None:
        weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows, dtype=dtype)
        y = multiply(kernel, x, weight, block, bias, relu=True)
        assert is_close(y, (x.double() @ weight.double().T + bias.double()).relu())

    @pytest.mark.slow
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        kernel=st.sampled_from([tensor_core, hopper_wgmma]),
        rows=st.integers(1, 300),
        columns=st.integers(32, 400),
        n=st.integers(1, 20),
        biased=st.booleans(),
    )
    def test_any_matrix_and_any_number_of_vectors(
        self, monkeypatch: pytest.MonkeyPatch, kernel: ModuleType, rows: int, columns: int, n: int, biased: bool
    ) -> None:
        monkeypatch.setattr(
            tensor_core, "choose_config", lambda *sizes: tensor_core.MmaConfig(32, 1, 4, 2, 4, 4, 2, 3, 2)
        )
        monkeypatch.setattr(
            hopper_wgmma, "choose_config", lambda *sizes: hopper_wgmma.WgmmaConfig(32, 1, 1, 4, 2, 3, 0)
        )
        weight = balanced_weight(rows, columns, block=32, kept=3).half()
        x, bias = torch.randn(n, columns).half(), torch.randn(rows) if biased else None
        exact = x.double() @ weight.double().T
        assert is_close(multiply(kernel, x, weight, 32, bias), exact if bias is None else exact + bias)

    @pytest.mark.slow
    def test_inputs_and_outputs_of_any_strides(self) -> None:
        weight = balanced_weight(70, 96, block=32, kept=3).half()
        packed = BalancedTensor.from_dense(weight, 32)
        exact = torch.randn(96, 9).half()
        for x in (exact.T, exact.T.contiguous(), torch.cat([exact, exact]).T.contiguous()[:, 96:]):
            for kernel in (warp_shuffle, tensor_core, hopper_wgmma):
                y = torch.full((70, 9), torch.nan).half()
                assert kernel.multiply(x, packed.values, packed.indices, None, y.T, 96, 32, False)
                assert is_close(y, weight.double() @ exact.double())

    @pytest.mark.parametrize("block", [32, 20])
    @pytest.mark.parametrize(
        ("kernel", "dtype"),
        slow_after(
            2,
            [
                (warp_shuffle, torch.float32),
                (warp_shuffle, torch.float16),
                (tensor_core, torch.bfloat16),
                (hopper_wgmma, torch.bfloat16),
            ],
        ),
    )
    def test_infinities_and_nans_are_those_of_the_dense_product(
        self, kernel: ModuleType, dtype: torch.dtype, block: int
    ) -> None:
        for value in (torch.inf, -torch.inf, torch.nan):
            weight = balanced_weight(40, 80, block=block, kept=10, dtype=dtype)
            weight[3, int(weight[3].nonzero()[0])] = value
            x = torch.randn(4, 80).to(dtype)
            x[1, 5] = x[1, 50] = x[2, 79] = value
            exact = x.double() @ weight.double().T
            assert is_close(multiply(kernel, x, weight, block, relu=True), exact.relu())
            assert exact[1].isnan().any()

    def test_unsupported_arguments_are_declined(self, emulated_gpu: SimpleNamespace) -> None:
        def accepts(kernel: ModuleType, n: int, block: int, kept: int, dtype: torch.dtype) -> bool:
            packed = BalancedTensor.from_dense(balanced_weight(40, 64, block=block, kept=kept, dtype=dtype), block)
            x, y = torch.randn(n, 64).half(), torch.empty(n, 40).half()
            return kernel.multiply(x, packed.values, packed.indices, None, y, 64, block, False)

        assert not accepts(warp_shuffle, 17, 32, 3, torch.float16)
        for kernel in (warp_shuffle, tensor_core, hopper_wgmma):
            assert not accepts(kernel, 8, 64, 3, torch.float16)
            assert not accepts(kernel, 8, 32, 3, torch.bfloat16)
        for kernel, major in ((tensor_core, 7), (hopper_wgmma, 8), (hopper_wgmma, 10)):
            emulated_gpu.major = 9
            assert not accepts(kernel, 8, 32, 30, torch.float16)
            emulated_gpu.major = major
            assert not accepts(kernel, 8, 32, 4, torch.float16)


# ---- on a device

LARGE, UNEVEN, WIDE = (1000, 2048, 32, 3), (70, 130, 25, 4), (64, 500, 50, 9)  # rows, columns, block, kept
TALL = (700, 330, 25, 7)


# Each case is a kernel of its own, which takes longer to compile than the rest of a test.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype", "matrix", "n"),
    [
        ("warp_shuffle", torch.float16, LARGE, 1),
        ("warp_shuffle", torch.bfloat16, LARGE, 8),
        ("warp_shuffle", torch.float32, UNEVEN, 3),
        ("warp_shuffle", torch.float32, LARGE, 16),
        ("warp_shuffle", torch.float16, UNEVEN, 2),
        ("tensor_core", torch.float16, LARGE, 16),
        ("tensor_core", torch.bfloat16, UNEVEN, 17),
        ("tensor_core", torch.float16, LARGE, 200),
        ("hopper_wgmma", torch.float16, LARGE, 9),
        ("hopper_wgmma", torch.bfloat16, LARGE, 20),
        ("hopper_wgmma", torch.float16, TALL, 40),
        ("hopper_wgmma", torch.bfloat16, TALL, 200),
        ("triton_dense", torch.float32, LARGE, 200),
        ("triton_dense", torch.float16, WIDE, 1),
        ("triton_dense", torch.bfloat16, WIDE, 64),
    ],
)
def test_every_kernel_on_a_device(
    kernel: str, dtype: torch.dtype, matrix: tuple[int, int, int, int], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns, block, kept = matrix
    if kernel == "hopper_wgmma" and torch.cuda.get_device_properties(0).major != hopper_wgmma.MAJOR:
        pytest.skip("for a Hopper GPU")
    wanted = importlib.import_module(f"pomona.sparse.cuda.{kernel}")
    assert wanted in list(backend.candidate_kernels(n, rows * columns))
    monkeypatch.setattr(backend, "candidate_kernels", lambda n, size: [wanted])
    monkeypatch.setattr(product, "reference_product", lambda *_: pytest.fail("the kernel declined the arguments"))
    weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
    packed = BalancedTensor.from_dense(weight, block).to("cuda")
    x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
    for transposed in (False, True):
        inputs = (x.T.contiguous() if transposed else x).cuda()
        y = balanced(inputs, packed.values, packed.indices, bias.cuda(), rows, columns, block, True, transposed)
        assert y.is_cuda
        assert is_close((y.T if transposed else y).cpu(), (x.double() @ weight.double().T + bias).relu())


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 16, 17, 64, 200])
@pytest.mark.parametrize("matrix", [LARGE, UNEVEN, WIDE])
def test_the_operator_on_a_device(
    matrix: tuple[int, int, int, int], n: int, dtype: torch.dtype, transposed: bool
) -> None:
    rows, columns, block, kept = matrix
    weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
    packed = BalancedTensor.from_dense(weight, block).to("cuda")
    x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
    inputs = (x.T.contiguous() if transposed else x).cuda()
    y = balanced(inputs, packed.values, packed.indices, bias.cuda(), rows, columns, block, True, transposed)
    assert y.is_cuda
    assert is_close((y.T if transposed else y).cpu(), (x.double() @ weight.double().T + bias).relu())


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [warp_shuffle, tensor_core])
def test_kernels_compile_for_the_device(kernel: ModuleType) -> None:
    packed = BalancedTensor.from_dense(balanced_weight(64, 64, block=32, kept=3).half(), 32).to("cuda")
    x, y = torch.randn(8, 64, device="cuda").half(), torch.empty(8, 64, device="cuda").half()
    assert kernel.multiply(x, packed.values, packed.indices, None, y, 64, 32, False)


def test_the_fastest_kernel_comes_first() -> None:
    def first_kernels(size: int, *counts: int) -> list[ModuleType]:
        return [next(backend.candidate_kernels(n, size**2)) for n in counts]

    few, more = warp_shuffle, hopper_wgmma
    assert first_kernels(16384, 1, 8, 9, 17) == [few, few, more, more]
    assert first_kernels(8192, 8, 16, 17) == [few, more, more]
    assert first_kernels(4096, 8, 16, 17) == [few, few, more]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        (tensor_core, tensor_core.MmaConfig(32, 2, 16, 2, 4, 2, 8, 1)),
        (hopper_wgmma, hopper_wgmma.WgmmaConfig(32, 2, 2, 4, 2, 4, 0)),
    ],
    ids=["tensor_core", "hopper_wgmma"],
)
def test_concurrent_streams_and_graphs(
    kernel: ModuleType, config: TensorCoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel is hopper_wgmma and torch.cuda.get_device_properties(0).major != hopper_wgmma.MAJOR:
        pytest.skip("for a Hopper GPU")
    monkeypatch.setattr(kernel, "choose_config", lambda *sizes: config)
    kernel.prepare_launch.cache_clear()
    packed = BalancedTensor.from_dense(balanced_weight(2048, 4096, block=32, kept=3).half(), 32).to("cuda")
    given, streams = torch.randn(2, 16, 4096).half().cuda(), [torch.cuda.Stream() for _ in range(2)]

    def multiply_once(x: Tensor) -> Tensor:
        y = x.new_empty(16, 2048)
        assert kernel.multiply(x, packed.values, packed.indices, None, y, 4096, 32, False)
        return y

    alone = [multiply_once(x) for x in given]
    graphs, captured = [torch.cuda.CUDAGraph() for _ in given], []
    for graph, x in zip(graphs, given, strict=True):
        with torch.cuda.graph(graph):
            captured.append([multiply_once(x) for _ in range(10)])
    called: list[list[Tensor]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(50):
        for x, stream, graph, into in zip(given, streams, graphs, called, strict=True):
            with torch.cuda.stream(stream):
                into.append(multiply_once(x))
                graph.replay()
    torch.cuda.synchronize()
    for one, some_called, some_captured in zip(alone, called, captured, strict=True):
        assert all(torch.equal(one, y) for y in (*some_called, *some_captured))
    kernel.prepare_launch.cache_clear()


@pytest.mark.gpu
def test_a_thread_that_has_not_used_the_device() -> None:
    weight = balanced_weight(1000, 2048, block=32, kept=3, dtype=torch.float16)
    packed = BalancedTensor.from_dense(weight, 32).to("cuda")
    x = torch.randn(1, 2048).half()
    given = x.cuda()
    packed.linear(given)  # compiles the kernel
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(packed.linear(given)))
    thread.start()
    thread.join()
    assert is_close(found[0].cpu(), x.double() @ weight.double().T)


@pytest.mark.gpu
def test_wide_blocks_on_a_device_use_the_reference() -> None:
    weight = balanced_weight(40, 600, block=300, kept=20)
    packed = BalancedTensor.from_dense(weight, 300).to("cuda")
    x = torch.randn(3, 600)
    assert is_close(packed.linear(x.cuda()).cpu(), x.double() @ weight.double().T)
