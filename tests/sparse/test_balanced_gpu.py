"""The kernels for CUDA: on a device, and without one in an emulator of ours and in Triton's interpreter."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from interpreter import DEVICE, INTERPRETED, TRITON, interpret, needed
from packing import balanced_weight, close
from torch import Tensor, nn
from torch.nn import functional as F

from pomona.sparse import BalancedTensor, ops
from pomona.sparse import cuda as gpu
from pomona.sparse.cuda import conv, few, hopper, lstm, some, tickets
from pomona.sparse.cuda.compiled import FOLDER
from pomona.sparse.format import DTYPES, LANES
from pomona.sparse.ops import balanced, balanced_lstm, join

# ---- CUDA C++, emulated


@cache
def emulator(name: str, **macros: int) -> ctypes.CDLL:
    """A kernel compiled for this processor, every thread a fiber."""
    folder = Path(tempfile.mkdtemp())
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-w", "-msse2", f"-I{FOLDER}", f'-DSOURCE="{name}.cu"']
    flags += [f"-D{macro}={value}" for macro, value in {"KERNEL": name, **macros}.items()]
    command = ["g++", *flags, "-o", str(folder / "kernel.so"), str(Path(__file__).with_name("emulate.cpp"))]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "kernel.so"))
    shutil.rmtree(folder)
    return library


@dataclass
class Emulated:
    """What stands for a compiled kernel: the same source, run on this processor."""

    library: ctypes.CDLL

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
        self.launch(grid, [t.data_ptr() if t is not None else 0 for t in tensors], sizes)

    def launch(self, grid: tuple[int, int, int], pointers: Sequence[int], sizes: Sequence[int]) -> None:
        boxes = [*map(ctypes.c_void_p, pointers), *map(ctypes.c_int, sizes)]
        within = self.library.launch(*grid, (ctypes.c_void_p * len(boxes))(*map(ctypes.addressof, boxes)))
        assert within, "a store went past the end of shared memory, or the grid does not fit the cluster"


COUNTERS = torch.zeros(1000, dtype=torch.int32)  # one launch after another, as on a stream


def emulated(name: str, device: int, threads: int, shared: int = 0, **macros: int | str) -> Emulated:
    """In place of `compiled.kernel`; macros that are text are for the assembler."""
    numbers = {macro: value for macro, value in macros.items() if isinstance(value, int)}
    assert threads == numbers["WARPS"] * LANES
    return Emulated(emulator(name, SHARED=shared, **numbers))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A small GPU that is not there."""
    properties = SimpleNamespace(multi_processor_count=4, major=9)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the one of a tensor that is on no GPU
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for module in (lstm, hopper):
        monkeypatch.setattr(module, "overlaps", lambda device: True)
    modules = (few, some, hopper, lstm, conv)
    for module in modules:
        monkeypatch.setattr(module, "kernel", emulated)
        module.plan.cache_clear()
    monkeypatch.setattr(some, "tickets", lambda many, device: COUNTERS[:many])
    monkeypatch.setattr(hopper, "LEAST", 1)
    yield properties
    assert not COUNTERS.any(), "the last thread block sets its ticket back"
    for module in modules:
        module.plan.cache_clear()


def multiply(
    kernel: ModuleType, x: Tensor, weight: Tensor, block: int, bias: Tensor | None = None, relu: bool = False
) -> Tensor:
    """x Wᵀ + bias by one of the kernels."""
    packed = BalancedTensor.from_dense(weight, block)
    y = x.new_full((len(x), len(weight)), torch.nan)
    assert kernel.multiply(x, packed.values, packed.indices, bias, y, x.shape[1], block, relu)
    return y


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.usefixtures("device")
class TestEmulated:
    @pytest.mark.parametrize(
        ("dtype", "rows", "columns", "block", "kept", "n"),
        [
            (torch.float32, 32, 64, 32, 3, 1),
            (torch.float16, 70, 300, 32, 3, 1),
            (torch.bfloat16, 40, 130, 25, 4, 2),
            (torch.float32, 33, 95, 32, 1, 3),
            (torch.float16, 64, 64, 16, 7, 5),
            (torch.bfloat16, 100, 200, 32, 6, 8),
            (torch.float32, 40, 70, 32, 32, 1),
            (torch.float16, 96, 33, 32, 2, 16),
            (torch.float16, 33, 9000, 32, 2, 1),  # several turns of all warps
            (torch.bfloat16, 70, 1107, 32, 3, 1),  # pairs of blocks, and some that are left
            (torch.float16, 40, 2000, 25, 5, 1),
        ],
    )
    def test_a_few_vectors(self, dtype: torch.dtype, rows: int, columns: int, block: int, kept: int, n: int) -> None:
        weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
        y = multiply(few, x, weight, block, bias, relu=True)
        assert close(y, (x.double() @ weight.double().T + bias).relu())

    def test_several_groups_and_more_warps_than_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(few, "shape", lambda *sizes: (3, 4, 2))
        weight = balanced_weight(100, 96, block=32, kept=4).half()
        x = torch.randn(7, 96).half()
        assert close(multiply(few, x, weight, 32), x.double() @ weight.double().T)

    @pytest.mark.parametrize(
        ("dtype", "rows", "columns", "block", "kept", "n"),
        [
            (torch.float16, 64, 128, 32, 3, 8),
            (torch.bfloat16, 70, 296, 32, 3, 5),  # not all of the last rows, columns and vectors
            (torch.float16, 300, 1100, 32, 4, 20),  # several thread blocks, clusters, and steps
            (torch.bfloat16, 40, 130, 25, 6, 17),
            (torch.float16, 33, 200, 10, 1, 9),
            (torch.float16, 65, 333, 16, 9, 1),
            (torch.bfloat16, 20, 31, 32, 2, 70),  # fewer columns than a block
        ],
    )
    @pytest.mark.parametrize("kernel", [some, hopper])
    def test_some_vectors(
        self, kernel: ModuleType, dtype: torch.dtype, rows: int, columns: int, block: int, kept: int, n: int
    ) -> None:
        weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows, dtype=dtype)
        y = multiply(kernel, x, weight, block, bias, relu=True)
        assert close(y, (x.double() @ weight.double().T + bias.double()).relu())

    @pytest.mark.parametrize(
        "other",
        [
            {"tiles": 1, "stages": 2, "span": 4},
            {"tiles": 2, "stages": 4, "team": 1, "span": 2},
            {"tiles": 4, "team": 2, "span": 8, "stages": 3},
            {"warps": 4, "team": 2, "split": 4, "cluster": 4, "span": 4, "stages": 2},
            {"warps": 16, "team": 8, "split": 1, "cluster": 1, "span": 8, "stages": 2},
            {"team": 1, "split": 7, "cluster": 1, "span": 3, "stages": 1},
            {"team": 2, "split": 6, "cluster": 2, "span": 4, "stages": 1},
            {"team": 4, "split": 1, "cluster": 1, "span": 21, "stages": 1, "tiles": 2},
            {"warps": 4, "team": 2, "split": 10, "cluster": 2, "span": 2, "stages": 2},  # one has no columns
        ],
        ids=str,
    )
    def test_every_way_to_cut_the_work(self, other: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
        usual = some.cut(11, 3, 32, 5, 20, 4, True)
        assert usual is not None
        monkeypatch.setattr(some, "cut", lambda *sizes: replace(usual, **other))
        weight = balanced_weight(140, 2600, block=32, kept=3).half()  # several stages
        x = torch.randn(11, 2600).half()
        y = multiply(some, x, weight, 32)
        assert close(y, x.double() @ weight.double().T)
        assert torch.equal(y, multiply(some, x, weight, 32)), "whoever is the last"

    @pytest.mark.parametrize(
        ("shape", "kept"),  # up to four survivors' places are kept, those of more are found again
        [
            (hopper.Shape(32, 2, 1, 1, 1, 2, 0), 4),
            (hopper.Shape(32, 3, 2, 4, 2, 3, 0), 3),
            (hopper.Shape(32, 1, 2, 7, 1, 6, 0), 5),
            (hopper.Shape(32, 4, 1, 6, 2, 1, 0), 3),
            (hopper.Shape(32, 8, 2, 2, 2, 2, 1), 3),
            (hopper.Shape(32, 8, 1, 9, 1, 4, 1), 7),
            (hopper.Shape(32, 2, 2, 10, 2, 4, 0), 2),  # one has no columns
        ],
        ids=str,
    )
    def test_every_way_to_cut_the_work_on_hopper(
        self, shape: hopper.Shape, kept: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hopper, "cut", lambda *sizes: shape)
        weight = balanced_weight(300, 1100, block=32, kept=kept).half()
        x = torch.randn(11, 1100).half()
        y = multiply(hopper, x, weight, 32)
        assert close(y, x.double() @ weight.double().T)
        assert torch.equal(y, multiply(hopper, x, weight, 32)), "whoever is the last"

    @pytest.mark.parametrize(
        ("n", "columns", "width", "eights"), [(8, 128, 32, 1), (11, 296, 32, 2), (5, 1100, 32, 1), (70, 200, 16, 8)]
    )
    def test_x_is_cut_into_what_the_tensor_cores_read(self, n: int, columns: int, width: int, eights: int) -> None:
        x, columns = some.arrange(torch.randn(n, columns).half(), -(-columns // width), width, width)
        steps, slices = -(-columns // (4 * width)), -(-n // (8 * eights))
        cut = hopper.Shape(width, eights, 1, 1, 1, 2, 0).lay(x, columns, -(-columns // width))
        whole = F.pad(x, (0, steps * 4 * width - columns, 0, slices * 8 * eights - n))
        # slices of eights of vectors; steps of four blocks of pairs of columns
        pieces = whole.view(slices, eights, 8, steps, 4, width // 2, 2)
        assert cut is not None
        assert torch.equal(cut, pieces.permute(0, 3, 5, 1, 2, 4, 6).reshape(slices, -1))

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        kernel=st.sampled_from([some, hopper]),
        rows=st.integers(1, 300),
        columns=st.integers(32, 400),
        n=st.integers(1, 20),
        biased=st.booleans(),
    )
    def test_any_matrix_and_any_number_of_vectors(
        self, monkeypatch: pytest.MonkeyPatch, kernel: ModuleType, rows: int, columns: int, n: int, biased: bool
    ) -> None:
        monkeypatch.setattr(some, "cut", lambda *sizes: some.Shape(32, 1, 4, 2, 4, 4, 2, 3, 2))
        monkeypatch.setattr(hopper, "cut", lambda *sizes: hopper.Shape(32, 1, 1, 4, 2, 3, 0))
        weight = balanced_weight(rows, columns, block=32, kept=3).half()
        x, bias = torch.randn(n, columns).half(), torch.randn(rows) if biased else None
        exact = x.double() @ weight.double().T
        assert close(multiply(kernel, x, weight, 32, bias), exact if bias is None else exact + bias)

    def test_inputs_and_outputs_of_any_strides(self) -> None:
        weight = balanced_weight(70, 96, block=32, kept=3).half()
        packed = BalancedTensor.from_dense(weight, 32)
        exact = torch.randn(96, 9).half()
        for x in (exact.T, exact.T.contiguous(), torch.cat([exact, exact]).T.contiguous()[:, 96:]):
            for kernel in (few, some, hopper):
                y = torch.full((70, 9), torch.nan).half()
                assert kernel.multiply(x, packed.values, packed.indices, None, y.T, 96, 32, False)
                assert close(y, weight.double() @ exact.double())

    @pytest.mark.parametrize("block", [32, 20])
    @pytest.mark.parametrize(
        ("kernel", "dtype"),
        [(few, torch.float32), (few, torch.float16), (some, torch.bfloat16), (hopper, torch.bfloat16)],
    )
    def test_infinities_and_nans_go_where_the_dense_product_has_them(
        self, kernel: ModuleType, dtype: torch.dtype, block: int
    ) -> None:
        for value in (torch.inf, -torch.inf, torch.nan):
            weight = balanced_weight(40, 80, block=block, kept=10, dtype=dtype)
            weight[3, int(weight[3].nonzero()[0])] = value
            x = torch.randn(4, 80).to(dtype)
            x[1, 5] = x[1, 50] = x[2, 79] = value
            exact = x.double() @ weight.double().T
            assert close(multiply(kernel, x, weight, block, relu=True), exact.relu())
            assert exact[1].isnan().any()

    @pytest.mark.parametrize("at", [5, 1030, 1099])  # in a pair of blocks, in a single one, in the last
    def test_a_lone_vector_with_an_infinity(self, at: int) -> None:
        weight = balanced_weight(40, 1100, block=32, kept=3).half()
        x = torch.randn(1, 1100).half()
        x[0, at] = torch.inf
        exact = x.double() @ weight.double().T
        assert close(multiply(few, x, weight, 32), exact)
        assert exact.isnan().any()

    def test_what_a_kernel_is_not_for(self, device: SimpleNamespace) -> None:
        def takes(kernel: ModuleType, n: int, block: int, kept: int, dtype: torch.dtype) -> bool:
            packed = BalancedTensor.from_dense(balanced_weight(40, 64, block=block, kept=kept, dtype=dtype), block)
            x, y = torch.randn(n, 64).half(), torch.empty(n, 40).half()
            return kernel.multiply(x, packed.values, packed.indices, None, y, 64, block, False)

        assert not takes(few, 17, 32, 3, torch.float16)
        for kernel in (few, some, hopper):
            assert not takes(kernel, 8, 64, 3, torch.float16)
            assert not takes(kernel, 8, 32, 3, torch.bfloat16)
        for kernel, major in ((some, 7), (hopper, 8), (hopper, 10)):
            device.major = 9
            assert not takes(kernel, 8, 32, 30, torch.float16)
            device.major = major
            assert not takes(kernel, 8, 32, 4, torch.float16)


MAJORS = pytest.mark.parametrize("major", [8, hopper.MAJOR])  # by some.cu, by hopper.cu


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
class TestConvolution:
    @MAJORS
    @pytest.mark.parametrize(
        ("dtype", "shape", "images", "block", "kept", "how"),
        [
            (torch.float16, (64, 8, 3, 3), (1, 8, 6, 6), 32, 3, ((1, 1), (1, 1), (1, 1))),
            (torch.bfloat16, (70, 16, 3, 3), (2, 16, 7, 5), 25, 4, ((2, 1), (1, 0), (1, 2))),
            (torch.float16, (33, 40, 1, 1), (3, 40, 5, 6), 16, 2, ((1, 2), (0, 0), (1, 1))),
            (torch.float16, (600, 5, 2, 4), (1, 5, 4, 9), 8, 1, ((1, 1), (2, 3), (2, 1))),  # more rows than warps have
            (torch.bfloat16, (20, 30, 5, 5), (2, 30, 6, 6), 32, 7, ((1, 1), (2, 2), (1, 1))),
            (
                torch.float16,
                (40, 3, 1, 5),
                (1, 3, 20, 21),
                32,
                2,
                ((1, 1), (0, 2), (1, 1)),
            ),  # fewer columns than a block
        ],
    )
    def test_any_geometry(
        self, dtype: torch.dtype, shape: tuple[int, ...], images: tuple[int, ...], block: int, kept: int,
        how: tuple[tuple[int, int], ...], major: int, device: SimpleNamespace,
    ) -> None:  # fmt: skip
        device.major = major
        weight = balanced_weight(shape[0], *shape[1:], block=block, kept=kept, dtype=dtype)
        x, bias = torch.randn(images).to(dtype), torch.randn(shape[0])
        packed = BalancedTensor.from_dense(weight, block)
        geometry = conv.Geometry((shape[2], shape[3]), *how)
        y = conv.convolve(x, packed.values, packed.indices, bias, shape[0], block, geometry, True)
        assert y is not None
        exact = F.conv2d(x.double(), weight.double(), bias.double(), *how).relu()
        assert close(y, exact)

    @pytest.mark.parametrize(
        "shape",
        [
            some.Shape(32, 2, 8, 1, 8, 4, 2, 2, 8),
            some.Shape(32, 2, 8, 1, 6, 4, 2, 2, 2),
            some.Shape(32, 4, 8, 2, 2, 4, 4, 2),
            some.Shape(32, 1, 8, 8, 1, 2, 8, 3),
            hopper.Shape(32, 1, 1, 2, 2, 2, 0),
            hopper.Shape(32, 2, 2, 6, 2, 3, 0),
            hopper.Shape(32, 4, 1, 3, 1, 4, 0),
            hopper.Shape(32, 8, 2, 4, 2, 4, 1),
        ],
        ids=str,
    )
    def test_every_way_to_cut_the_work(
        self, shape: some.Cut, device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device.major = hopper.MAJOR if isinstance(shape, hopper.Shape) else 8
        for module in (conv, hopper):
            monkeypatch.setattr(module, "cut", lambda *sizes: shape)
        weight = balanced_weight(140, 150, 3, 3, block=32, kept=3, dtype=torch.float16)
        packed = BalancedTensor.from_dense(weight, 32)
        x = torch.randn(2, 150, 5, 6).half()
        geometry = conv.Geometry((3, 3), (1, 1), (1, 1), (1, 1))
        y = conv.convolve(x, packed.values, packed.indices, None, 140, 32, geometry, False)
        assert y is not None
        assert close(y, F.conv2d(x.double(), weight.double(), padding=1))

    @MAJORS
    def test_infinities_and_nans_go_where_the_dense_convolution_has_them(
        self, major: int, device: SimpleNamespace
    ) -> None:
        device.major = major
        weight = balanced_weight(40, 8, 3, 3, block=32, kept=5, dtype=torch.float16)
        packed = BalancedTensor.from_dense(weight, 32)
        x = torch.randn(2, 8, 9, 7).half()
        x[0, 3, 2, 2], x[1, 5, 0, 6] = torch.inf, torch.nan
        geometry = conv.Geometry((3, 3), (1, 1), (1, 1), (1, 1))
        y = conv.convolve(x, packed.values, packed.indices, None, 40, 32, geometry, False)
        assert y is not None
        exact = F.conv2d(x.double(), weight.double(), padding=1)
        assert 0 < int(exact.isfinite().sum()) < exact.numel()
        assert close(y, exact)

    @pytest.mark.parametrize(
        ("rows", "columns", "n", "kept", "eights", "team", "split"),
        [
            (512, 4608, 196, 3, 2, 1, 8),
            (512, 4608, 784, 3, 4, 1, 4),
            (256, 2304, 3136, 4, 4, 2, 1),
            (64, 576, 50176, 10, 2, 8, 1),
        ],
    )
    def test_all_processors_have_work(
        self, rows: int, columns: int, n: int, kept: int, eights: int, team: int, split: int
    ) -> None:
        shape = conv.cut(n, kept, 32, rows // 32, columns // 32, 132, True)
        assert shape == replace(shape, eights=eights, team=team, split=split)

    @given(
        n=st.integers(1, 100000),
        kept=st.integers(1, 13),
        block=st.integers(13, 32),
        groups=st.integers(1, 300),
        blocks=st.integers(1, 300),
        processors=st.integers(1, 200),
        clusters=st.booleans(),
    )
    def test_every_cut_can_be_done(
        self, n: int, kept: int, block: int, groups: int, blocks: int, processors: int, clusters: bool
    ) -> None:
        assume(some.registers(kept) >= 1)
        shape = conv.cut(n, kept, block, groups, blocks, processors, clusters)
        assert shape.shared(kept) <= some.LIMIT
        assert shape.warps % shape.team == shape.span % shape.team == 0
        assert shape.warps * LANES % (8 * shape.eights) == 0
        assert shape.split % shape.cluster == shape.rows // 4 % shape.cluster == 0
        assert clusters or shape.cluster == 1


Network = tuple[nn.LSTM, tuple[list[Tensor], ...], list[int]]


def network(dtype: torch.dtype, width: int, units: int, layers: int, both: bool, block: int, kept: int) -> Network:
    """An LSTM in float64 with balanced weights of a kind, and what the operator takes of it."""
    net = nn.LSTM(width, units, layers, bidirectional=both, dtype=torch.float64)
    for seed, parameter in enumerate(net.parameters()):
        rows, *columns = parameter.shape
        exact = balanced_weight(rows, *columns, block=block, kept=kept, seed=seed) if columns else parameter
        parameter.data = exact.detach().to(dtype).double()
    weights = {name: p.detach() for name, p in net.named_parameters()}
    packs = []
    for layer in range(layers):
        names = [f"l{layer}", f"l{layer}_reverse"][: 1 + both]
        pairs = [(weights[f"weight_ih_{n}"].to(dtype), weights[f"weight_hh_{n}"].to(dtype)) for n in names]
        packs.append(join(pairs, [weights[f"bias_ih_{n}"] + weights[f"bias_hh_{n}"] for n in names], block))
    return net, tuple(map(list, zip(*packs, strict=True))), [block] * layers


def almost(given: tuple[Tensor, ...], exact: tuple[Tensor, tuple[Tensor, Tensor]]) -> bool:
    """Whether outputs and states are those of float64, but for rounding."""
    eps = max(8 * torch.finfo(given[0].dtype).eps, 1e-5)
    pairs = zip(given, (exact[0], *exact[1]), strict=True)
    return all(torch.allclose(a.double(), b, rtol=eps, atol=eps, equal_nan=True) for a, b in pairs)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.usefixtures("device")
class TestLSTM:
    @pytest.mark.parametrize(
        ("dtype", "width", "units", "layers", "both", "block", "kept", "steps", "n"),
        [
            (torch.float32, 32, 32, 1, False, 32, 3, 1, 1),
            (torch.float16, 40, 30, 2, False, 25, 5, 3, 1),  # no part fills its last block, nor the rows their last 32
            (torch.float16, 64, 24, 2, True, 32, 4, 2, 2),
            (torch.bfloat16, 20, 50, 1, True, 10, 2, 3, 8),
            (torch.float32, 7, 33, 1, True, 16, 16, 4, 3),
            (torch.float16, 600, 70, 1, False, 16, 1, 1, 5),  # more blocks than warps
        ],
    )
    def test_a_network_from_zeros_and_from_a_state(
        self, dtype: torch.dtype, width: int, units: int, layers: int, both: bool, block: int, kept: int, steps: int,
        n: int,
    ) -> None:  # fmt: skip
        net, packs, blocks = network(dtype, width, units, layers, both, block, kept)
        x = torch.randn(steps, n, width).to(dtype)
        with torch.no_grad():
            exact = net(x.double())
            given = lstm.run(x, None, None, *packs, blocks)
            assert given is not None
            assert almost(given, exact)
            state = [torch.randn_like(t).to(dtype) for t in given[1:]]
            again = lstm.run(x.transpose(0, 1).contiguous().transpose(0, 1), *state, *packs, blocks)
            assert again is not None
            assert almost(again, net(x.double(), tuple(t.double() for t in state)))

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(width=st.integers(1, 90), units=st.integers(1, 70), steps=st.integers(1, 3), both=st.booleans())
    def test_any_width_and_any_number_of_units(self, width: int, units: int, steps: int, both: bool) -> None:
        net, packs, blocks = network(torch.float32, width, units, 1, both, 32, 2)
        x = torch.randn(steps, 2, width)
        given = lstm.run(x, None, None, *packs, blocks)
        assert given is not None
        with torch.no_grad():
            assert almost(given, net(x.double()))

    @pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
    def test_infinities_and_nans_go_where_the_dense_network_has_them(self, value: float) -> None:
        net, packs, blocks = network(torch.float32, 40, 20, 1, True, 32, 3)
        x, h, c = torch.randn(2, 3, 40), torch.randn(2, 3, 20), torch.randn(2, 3, 20)
        x[0, 0, 5] = h[1, 1, 3] = c[0, 2, 4] = value
        given = lstm.run(x, h, c, *packs, blocks)
        assert given is not None
        with torch.no_grad():
            exact = net(x.double(), (h.double(), c.double()))
        assert exact[0].isnan().any()
        assert not exact[0].isnan().all()
        assert almost(given, exact)

    def test_what_the_kernel_is_not_for(self) -> None:
        _, packs, blocks = network(torch.float16, 64, 16, 1, False, 32, 3)
        x = torch.randn(1, 9, 64).half()
        assert lstm.run(x, None, None, *packs, blocks) is None
        assert lstm.run(x[:, :8].float(), None, None, *packs, blocks) is None
        assert lstm.run(x[:, :8], None, None, *packs, [64]) is None


class TestFew:
    """How the work is cut for a few vectors, as measured on an H200 with 3 of 32 kept, or an LSTM's 5 of 25."""

    @pytest.mark.parametrize(
        ("n", "groups", "shape"),
        [
            (1, 512, (1, 16, 8)),
            (2, 512, (1, 16, 4)),
            (4, 512, (2, 16, 4)),
            (4, 256, (1, 16, 4)),
            (8, 512, (2, 8, 4)),
            (8, 256, (1, 16, 4)),
            (16, 512, (1, 16, 2)),
        ],
    )
    def test_what_is_fastest(self, n: int, groups: int, shape: tuple[int, int, int]) -> None:
        assert few.shape(n, 3, groups, groups, 132) == shape

    def test_a_step_of_an_lstm(self) -> None:
        assert [few.shape(1, kept, 1, 120, 1) for kept in (4, 5)] == [(1, 16, 4)] * 2

    @given(
        n=st.integers(1, few.MOST), kept=st.integers(1, 32), groups=st.integers(1, 2000), blocks=st.integers(1, 2000)
    )
    def test_any_shape_can_be_done(self, n: int, kept: int, groups: int, blocks: int) -> None:
        together, warps, unroll = few.shape(n, kept, groups, blocks, 132)
        assert together * n * warps * LANES * 4 <= 48 << 10, "the sums of all warps lie in shared memory"
        assert {together, warps, unroll} <= {1, 2, 4, 8, 16}
        assert warps < 2 * blocks
        pairs = few.twins(torch.float16, n, kept, blocks, warps)
        assert pairs * 2 * warps <= blocks, "all warps have some"
        assert n == 1 or pairs == 0


class TestCut:
    @pytest.mark.parametrize(
        ("groups", "n", "warps", "team", "split"),
        [(512, 16, 16, 1, 8), (512, 64, 8, 1, 4), (256, 16, 16, 4, 4), (128, 16, 8, 8, 2), (8192, 16, 16, 1, 1)],
    )
    def test_all_processors_have_work(self, groups: int, n: int, warps: int, team: int, split: int) -> None:
        shape = some.cut(n, 3, 32, groups, groups, 132, True)
        assert shape is not None
        assert shape == replace(shape, eights=n // 8, warps=warps, team=team, split=split)

    def test_many_vectors_are_cut_evenly(self) -> None:
        shapes = [some.cut(n, 3, 32, 512, 512, 132, True) for n in (64, 72, 128, 136)]
        assert [shape.eights for shape in shapes if shape] == [8, 5, 8, 6]

    def test_a_device_with_less_shared_memory(self) -> None:
        shape = some.cut(16, 3, 32, 512, 512, 108, False, 163 << 10)
        assert shape is not None
        assert shape.shared(3) <= 163 << 10
        assert some.cut(16, 3, 32, 512, 512, 108, False, 8 << 10) is None

    def test_x_stays_in_shared_memory_where_it_has_room(self) -> None:
        shapes = [some.cut(n, 3, 32, 512, 512, 132, True) for n in (16, 64)]
        assert [(shape.stages, shape.span) for shape in shapes if shape] == [(1, 16), (2, 4)]

    @given(
        n=st.integers(1, 300),
        kept=st.integers(1, 32),
        block=st.integers(1, 32),
        groups=st.integers(1, 2000),
        blocks=st.integers(1, 2000),
        processors=st.integers(1, 200),
        clusters=st.booleans(),
    )
    def test_every_cut_can_be_done(
        self, n: int, kept: int, block: int, groups: int, blocks: int, processors: int, clusters: bool
    ) -> None:
        shape = some.cut(n, kept, block, groups, blocks, processors, clusters)
        if shape is None:
            assert kept > 12
            return
        assert shape.shared(kept) <= some.LIMIT
        assert shape.warps % shape.team == shape.split % shape.cluster == 0
        assert shape.rows // 4 % shape.cluster == 0
        assert clusters or shape.cluster == 1
        if shape.stages == 1:
            assert shape.span * shape.split * some.SIDE >= blocks
        else:
            assert shape.span % shape.team == 0


class TestHopper:
    """How the work is cut on a Hopper GPU."""

    @pytest.mark.parametrize(
        ("size", "n", "eights", "groups", "split"),
        [
            (16384, 16, 2, 2, 4),
            (16384, 32, 4, 2, 4),
            (16384, 64, 8, 2, 4),
            (8192, 16, 2, 2, 8),
            (8192, 64, 8, 2, 8),
            (2048, 16, 2, 1, 16),
        ],
    )
    def test_all_processors_have_work(self, size: int, n: int, eights: int, groups: int, split: int) -> None:
        shape = hopper.cut(n, 3, 32, size // 32, size // 32, 132)
        assert shape == replace(shape, eights=eights, groups=groups, split=split, cluster=2, turned=eights == 8)

    @given(
        n=st.integers(1, 3000),
        kept=st.integers(1, hopper.KEPT),
        block=st.integers(12, 32),
        groups=st.integers(1, 2000),
        blocks=st.integers(1, 2000),
        processors=st.integers(1, 200),
        gather=st.booleans(),
    )
    def test_every_cut_can_be_done(
        self, n: int, kept: int, block: int, groups: int, blocks: int, processors: int, gather: bool
    ) -> None:
        shape = hopper.cut(n, kept, block, groups, blocks, processors, gather)
        assert shape.shared <= some.LIMIT
        assert shape.split % shape.cluster == shape.rows // 4 % shape.cluster == 0
        assert shape.turned == (shape.eights == 8)
        assert not gather or shape.eights in (1, 2, 4, 8), "a lane's position is always the same"


class TestTickets:
    """Counters, where there is no GPU."""

    @pytest.fixture
    def pool(self, monkeypatch: pytest.MonkeyPatch) -> tickets.Pool:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        return tickets.Pool(torch.device("cpu"))

    def test_a_stream_has_its_own(self, pool: tickets.Pool) -> None:
        one, other = (pool.tickets(5, stream, False) for stream in (1, 2))
        one += 1
        assert not other.any()
        assert pool.tickets(5, 1, False) is one
        assert not pool.tickets(tickets.CHUNK, 1, False).any(), "more than there were"

    def test_a_captured_launch_has_its_own(self, pool: tickets.Pool) -> None:
        eager = pool.tickets(5, 1, False)
        captured = [pool.tickets(5, 1, True) for _ in range(tickets.CHUNK // 5 + 10)]  # more than are ready
        for counters in captured:
            assert len(counters) == 5
            counters += 1
        assert all((counters == 1).all() for counters in captured)
        assert not eager.any()
        pool.tickets(5, 1, False)
        assert not pool.tickets(5, 1, True).any(), "there are new ones after a launch that is not captured"

    def test_what_a_graph_knows_by_its_address_stays(self, pool: tickets.Pool) -> None:
        known = set()
        for _ in range(3 * tickets.CHUNK // 4000):  # chunk after chunk is used up, and nobody holds what was given
            pool.tickets(5, 1, False)
            known.add(pool.tickets(4000, 1, True).untyped_storage().data_ptr())
        assert len(known) > 2
        assert known == {chunk.untyped_storage().data_ptr() for chunk in pool.chunks}

    def test_before_all_other_launches(self, pool: tickets.Pool) -> None:
        assert not pool.tickets(5, 1, True).any()


# ---- Triton

kernels = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(
        not TRITON or (DEVICE == "cpu" and not INTERPRETED),
        reason="needs Triton, and a CUDA device or its interpreter",
    ),
]


class TestTriton:
    pytestmark = kernels

    # The interpreter takes the bits of a bfloat16 for an integer where it multiplies matrices.
    @pytest.mark.parametrize("dtype", DTYPES[:2] if INTERPRETED else DTYPES)
    @pytest.mark.parametrize(
        ("rows", "columns", "block", "kept", "n"),
        [(40, 70, 32, 3, 5), (64, 64, 32, 1, 17), (33, 100, 25, 4, 1), (70, 130, 64, 9, 20), (40, 150, 100, 7, 3)],
    )
    def test_more_vectors(self, dtype: torch.dtype, rows: int, columns: int, block: int, kept: int, n: int) -> None:
        from pomona.sparse.cuda import many

        weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
        packed = BalancedTensor.from_dense(weight, block).to(DEVICE)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
        y = torch.empty(rows, n, dtype=dtype, device=DEVICE)
        strides = (x, x.T.contiguous().T), (y.T, y.view(n, rows))
        for inputs, out in product(*strides):
            out.fill_(torch.nan)
            given = inputs.to(DEVICE), packed.values, packed.indices, bias.to(DEVICE)
            assert many.multiply(*given, out, columns, block, True)
            assert close(out.cpu(), (x.double() @ weight.double().T + bias).relu())

    @pytest.mark.filterwarnings("ignore:invalid value")  # numpy, in the interpreter
    def test_infinities_and_nans_go_where_the_dense_product_has_them(self) -> None:
        from pomona.sparse.cuda import many

        weight = balanced_weight(40, 64, block=32, kept=3)
        weight[3, int(weight[3].nonzero()[0])] = torch.inf
        packed = BalancedTensor.from_dense(weight, 32).to(DEVICE)
        x = torch.randn(3, 64)
        x[1, 5] = torch.nan
        y = torch.empty(3, 40, device=DEVICE)
        assert many.multiply(x.to(DEVICE), packed.values, packed.indices, None, y, 64, 32, False)
        assert close(y.cpu(), x.double() @ weight.double().T)


@needed
def test_triton_in_its_interpreter() -> None:
    interpret(__file__, "TestTriton")


# ---- on a device


LARGE, UNEVEN, WIDE = (1000, 2048, 32, 3), (70, 130, 25, 4), (64, 500, 50, 9)  # rows, columns, block, kept
TALL = (700, 330, 25, 7)


# Each case is a kernel of its own, and to compile it takes longer than all the rest of a test.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype", "matrix", "n"),
    [
        ("few", torch.float16, LARGE, 1),
        ("few", torch.bfloat16, LARGE, 8),
        ("few", torch.float32, UNEVEN, 3),
        ("few", torch.float32, LARGE, 16),
        ("few", torch.float16, UNEVEN, 2),
        ("some", torch.float16, LARGE, 16),
        ("some", torch.bfloat16, UNEVEN, 17),
        ("some", torch.float16, LARGE, 200),
        ("hopper", torch.float16, LARGE, 9),
        ("hopper", torch.bfloat16, LARGE, 20),
        ("hopper", torch.float16, TALL, 40),
        ("hopper", torch.bfloat16, TALL, 200),
        ("many", torch.float32, LARGE, 200),
        ("many", torch.float16, WIDE, 1),
        ("many", torch.bfloat16, WIDE, 64),
    ],
)
def test_every_kernel_on_a_device(
    kernel: str, dtype: torch.dtype, matrix: tuple[int, int, int, int], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns, block, kept = matrix
    if kernel == "hopper" and torch.cuda.get_device_properties(0).major != hopper.MAJOR:
        pytest.skip("for a Hopper GPU")
    wanted = importlib.import_module(f"pomona.sparse.cuda.{kernel}")
    assert wanted in list(gpu.kernels(n, rows * columns))
    monkeypatch.setattr(gpu, "kernels", lambda n, size: [wanted])
    monkeypatch.setattr(ops, "reference", lambda *_: pytest.fail("the kernel was not for it"))
    weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
    packed = BalancedTensor.from_dense(weight, block).to("cuda")
    x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
    for turned in (False, True):
        inputs = (x.T.contiguous() if turned else x).cuda()
        y = balanced(inputs, packed.values, packed.indices, bias.cuda(), rows, columns, block, True, turned)
        assert y.is_cuda
        assert close((y.T if turned else y).cpu(), (x.double() @ weight.double().T + bias).relu())


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 16, 17, 64, 200])
@pytest.mark.parametrize("matrix", [LARGE, UNEVEN, WIDE])
def test_the_operator_on_a_device(matrix: tuple[int, int, int, int], n: int, dtype: torch.dtype, turned: bool) -> None:
    rows, columns, block, kept = matrix
    weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
    packed = BalancedTensor.from_dense(weight, block).to("cuda")
    x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
    inputs = (x.T.contiguous() if turned else x).cuda()
    y = balanced(inputs, packed.values, packed.indices, bias.cuda(), rows, columns, block, True, turned)
    assert y.is_cuda
    assert close((y.T if turned else y).cpu(), (x.double() @ weight.double().T + bias).relu())


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [few, some])
def test_the_compiled_kernels_take_what_they_are_for(kernel: ModuleType) -> None:
    packed = BalancedTensor.from_dense(balanced_weight(64, 64, block=32, kept=3).half(), 32).to("cuda")
    x, y = torch.randn(8, 64, device="cuda").half(), torch.empty(8, 64, device="cuda").half()
    assert kernel.multiply(x, packed.values, packed.indices, None, y, 64, 32, False)


def test_the_fastest_kernel_comes_first() -> None:
    assert [next(gpu.kernels(n, 16384**2)) for n in (1, 8, 9, 17)] == [few, few, hopper, hopper]
    assert [next(gpu.kernels(n, 8192**2)) for n in (8, 16, 17)] == [few, hopper, hopper]
    assert [next(gpu.kernels(n, 4096**2)) for n in (8, 16, 17)] == [few, few, hopper]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("rows", "channels", "side", "images", "kept"), [(512, 512, 14, 1, 3), (256, 128, 28, 2, 4), (70, 20, 9, 3, 7)]
)
def test_a_convolution_on_a_device(
    rows: int, channels: int, side: int, images: int, kept: int, dtype: torch.dtype
) -> None:
    weight = balanced_weight(rows, channels, 3, 3, block=32, kept=kept, dtype=dtype)
    packed = BalancedTensor.from_dense(weight, 32).to("cuda")
    x, bias = torch.randn(images, channels, side, side).to(dtype), torch.randn(rows)
    how = conv.Geometry((3, 3), (1, 1), (1, 1), (1, 1))
    exact = F.conv2d(x.double(), weight.double(), bias.double(), padding=1).relu()
    for layout in (torch.contiguous_format, torch.channels_last):
        given = x.cuda().contiguous(memory_format=layout)
        y = conv.convolve(given, packed.values, packed.indices, bias.cuda(), rows, 32, how, True)
        assert y is not None
        assert close(y.cpu(), exact)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "shape"),
    [(some, some.Shape(32, 2, 16, 2, 4, 2, 8, 1)), (hopper, hopper.Shape(32, 2, 2, 4, 2, 4, 0))],
    ids=["some", "hopper"],
)
def test_streams_and_graphs_side_by_side(kernel: ModuleType, shape: some.Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel is hopper and torch.cuda.get_device_properties(0).major != hopper.MAJOR:
        pytest.skip("for a Hopper GPU")
    monkeypatch.setattr(kernel, "cut", lambda *sizes: shape)
    kernel.plan.cache_clear()
    packed = BalancedTensor.from_dense(balanced_weight(2048, 4096, block=32, kept=3).half(), 32).to("cuda")
    given, streams = torch.randn(2, 16, 4096).half().cuda(), [torch.cuda.Stream() for _ in range(2)]

    def product(x: Tensor) -> Tensor:
        y = x.new_empty(16, 2048)
        assert kernel.multiply(x, packed.values, packed.indices, None, y, 4096, 32, False)
        return y

    alone = [product(x) for x in given]
    graphs, captured = [torch.cuda.CUDAGraph() for _ in given], []
    for graph, x in zip(graphs, given, strict=True):
        with torch.cuda.graph(graph):
            captured.append([product(x) for _ in range(10)])
    called: list[list[Tensor]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(50):
        for x, stream, graph, into in zip(given, streams, graphs, called, strict=True):
            with torch.cuda.stream(stream):
                into.append(product(x))
                graph.replay()
    torch.cuda.synchronize()
    for one, some_called, some_captured in zip(alone, called, captured, strict=True):
        assert all(torch.equal(one, y) for y in (*some_called, *some_captured))
    kernel.plan.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_a_network_on_a_device(both: bool, n: int) -> None:
    net, packs, blocks = network(torch.float16, 100, 70, 2, both, 25, 5)
    x = torch.randn(4, n, 100).half()
    given = balanced_lstm(x.cuda(), None, None, *([t.cuda() for t in part] for part in packs), blocks)
    with torch.no_grad():
        assert almost(tuple(t.cpu() for t in given), net(x.double()))


@pytest.mark.gpu
def test_a_thread_whose_first_work_on_a_device_is_ours() -> None:
    weight = balanced_weight(1000, 2048, block=32, kept=3, dtype=torch.float16)
    packed = BalancedTensor.from_dense(weight, 32).to("cuda")
    x = torch.randn(1, 2048).half()
    given = x.cuda()
    packed.linear(given)  # so that the kernel is there
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(packed.linear(given)))
    thread.start()
    thread.join()
    assert close(found[0].cpu(), x.double() @ weight.double().T)


@pytest.mark.gpu
def test_a_network_in_a_graph() -> None:
    """Steps that are launched ahead of the end of the ones before them, and of what comes before those."""
    _, packs, blocks = network(torch.float16, 100, 70, 2, True, 25, 5)
    packed = [[t.cuda() for t in part] for part in packs]
    x = torch.zeros(20, 1, 100, device="cuda").half()
    balanced_lstm(x, None, None, *packed, blocks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = balanced_lstm(x * 2, None, None, *packed, blocks)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        called = balanced_lstm(x * 2, None, None, *packed, blocks)
        assert all(torch.equal(one, other) for one, other in zip(captured, called, strict=True))
        assert called[0].abs().max() > 0.01


@pytest.mark.gpu
def test_wide_blocks_on_a_device_take_the_reference() -> None:
    weight = balanced_weight(40, 600, block=300, kept=20)
    packed = BalancedTensor.from_dense(weight, 300).to("cuda")
    x = torch.randn(3, 600)
    assert close(packed.linear(x.cuda()).cpu(), x.double() @ weight.double().T)
