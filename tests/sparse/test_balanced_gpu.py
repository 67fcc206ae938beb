"""The kernels for CUDA: on a device, and without one in an emulator of ours and in Triton's interpreter."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from packing import balanced_weight, close
from torch import Tensor

from pomona.sparse import BalancedTensor, gpu
from pomona.sparse.balanced import DTYPES
from pomona.sparse.ops import balanced

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# ---- CUDA C++, emulated

CASES = [  # rows, columns, block, kept, n
    (32, 64, 32, 3, 1),
    (70, 300, 32, 3, 1),
    (40, 130, 25, 4, 2),
    (33, 95, 32, 1, 3),
    (64, 64, 16, 7, 5),
    (100, 200, 32, 6, 8),
    (40, 70, 32, 32, 1),
    (96, 33, 32, 2, 16),
]


def emulator(folder: Path, dtype: torch.dtype, kept: int, plan: tuple[int, int, int, int]) -> ctypes.CDLL:
    """The kernel compiled for this processor, every thread a fiber."""
    names = ("KIND", "KEPT", "BATCH", "GROUPS", "WARPS", "UNROLL")
    macros = dict(zip(names, (gpu.KINDS[dtype], kept, *plan), strict=True))
    made = folder / f"few-{'-'.join(map(str, macros.values()))}.so"
    command = [
        "g++",
        "-O1",
        "-std=c++17",
        "-fPIC",
        "-shared",
        "-w",
        "-msse2",
        f'-DSOURCE="{gpu.SOURCE}"',
        "-o",
        str(made),
    ]
    command += [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run([*command, str(Path(__file__).with_name("emulate.cpp"))], check=True)
    return ctypes.CDLL(str(made))


def emulate(
    folder: Path, x: Tensor, packed: BalancedTensor, bias: Tensor | None, relu: bool, plan: tuple[int, int, int, int]
) -> Tensor:
    """What `multiply_few` does with the device's kernel."""
    (rows, columns), n, batch = packed.matrix, len(x), plan[0]
    turned = torch.nn.functional.pad(x.T, (0, batch - n)).contiguous()
    y = torch.full((n, rows), torch.nan, dtype=x.dtype)
    groups, blocks = packed.values.shape[:2]
    pointers = [
        None if t is None else ctypes.c_void_p(t.data_ptr()) for t in (packed.values, packed.indices, turned, bias, y)
    ]
    emulator(folder, x.dtype, packed.kept, plan).launch(
        -(-groups // plan[1]), *pointers, rows, columns, packed.block, blocks, n, int(relu)
    )
    return y


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
class TestEmulated:
    @pytest.mark.parametrize(("case", "dtype"), [(case, DTYPES[i % 3]) for i, case in enumerate(CASES)])
    def test_a_few_vectors(self, case: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
        rows, columns, block, kept, n = case
        weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
        packed = BalancedTensor.from_dense(weight, block)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
        plan = gpu.shape(n, packed.kept, *packed.values.shape[:2])
        y = emulate(tmp_path, x, packed, bias, True, plan)
        assert close(y, (x.double() @ weight.double().T + bias).relu())

    def test_several_groups_and_more_warps_than_blocks(self, tmp_path: Path) -> None:
        weight = balanced_weight(100, 96, block=32, kept=4).half()
        packed = BalancedTensor.from_dense(weight, 32)
        x = torch.randn(7, 96).half()
        y = emulate(tmp_path, x, packed, None, False, (8, 3, 4, 2))
        assert close(y, x.double() @ weight.double().T)

    @pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
    def test_infinities_and_nans_go_where_the_dense_product_has_them(self, value: float, tmp_path: Path) -> None:
        weight = balanced_weight(40, 64, block=32, kept=20)
        weight[3, int(weight[3].nonzero()[0])] = value
        x = torch.randn(2, 64)
        x[1, 5] = x[1, 50] = value
        y = emulate(tmp_path, x, BalancedTensor.from_dense(weight, 32), None, False, (2, 1, 2, 1))
        exact = x.double() @ weight.double().T
        assert close(y, exact)
        assert exact[1].isnan().any()


# ---- Triton

kernels = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or (DEVICE == "cpu" and not INTERPRETED),
        reason="needs Triton, and a CUDA device or its interpreter",
    ),
]


class TestTriton:
    pytestmark = kernels

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("rows", "columns", "block", "kept", "n"),
        [(40, 70, 32, 3, 5), (64, 64, 32, 1, 17), (33, 100, 25, 4, 1), (70, 130, 64, 9, 20), (40, 150, 100, 7, 3)],
    )
    def test_more_vectors(self, dtype: torch.dtype, rows: int, columns: int, block: int, kept: int, n: int) -> None:
        from pomona.sparse.gpu import many

        weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
        packed = BalancedTensor.from_dense(weight, block).to(DEVICE)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
        for inputs in (x, x.T.contiguous().T):
            y = many.product(
                inputs.to(DEVICE), packed.values, packed.indices, bias.to(DEVICE), rows, columns, block, True
            )
            assert close(y.cpu(), (x.double() @ weight.double().T + bias).relu())

    def test_infinities_and_nans_go_where_the_dense_product_has_them(self) -> None:
        from pomona.sparse.gpu import many

        weight = balanced_weight(40, 64, block=32, kept=3)
        weight[3, int(weight[3].nonzero()[0])] = torch.inf
        packed = BalancedTensor.from_dense(weight, 32).to(DEVICE)
        x = torch.randn(3, 64)
        x[1, 5] = torch.nan
        y = many.product(x.to(DEVICE), packed.values, packed.indices, None, 40, 64, 32, False)
        assert close(y.cpu(), x.double() @ weight.double().T)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels are tested directly")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="Triton's interpreter needs numpy < 2.4")
def test_triton_in_its_interpreter() -> None:
    # In a process of its own: Triton reads the variable once, when it is first imported.
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "TestTriton"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- on a device


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 16, 17, 64, 200])
@pytest.mark.parametrize(
    ("rows", "columns", "block", "kept"), [(1000, 2048, 32, 3), (70, 130, 25, 4), (64, 500, 50, 9)]
)
def test_the_operator_on_a_device(
    rows: int, columns: int, block: int, kept: int, n: int, dtype: torch.dtype, turned: bool
) -> None:
    weight = balanced_weight(rows, columns, block=block, kept=kept, dtype=dtype)
    packed = BalancedTensor.from_dense(weight, block).to("cuda")
    x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
    inputs = (x.T.contiguous() if turned else x).cuda()
    y = balanced(inputs, packed.values, packed.indices, bias.cuda(), rows, columns, block, True, turned)
    assert y.is_cuda
    assert close((y.T if turned else y).cpu(), (x.double() @ weight.double().T + bias).relu())


@pytest.mark.gpu
def test_a_few_vectors_are_done_by_the_compiled_kernel() -> None:
    packed = BalancedTensor.from_dense(balanced_weight(64, 64, block=32, kept=3).half(), 32).to("cuda")
    x = torch.randn(1, 64, device="cuda").half()
    assert gpu.multiply_few(x, packed.values, packed.indices, None, 64, 64, 32, False) is not None


@pytest.mark.gpu
def test_wide_blocks_on_a_device_take_the_reference() -> None:
    weight = balanced_weight(40, 600, block=300, kept=20)
    packed = BalancedTensor.from_dense(weight, 300).to("cuda")
    x = torch.randn(3, 600)
    assert close(packed.linear(x.cuda()).cpu(), x.double() @ weight.double().T)
