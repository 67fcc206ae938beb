"""The operators of 2:4 matrices and of dense blocks: any product against float64, on every instruction set."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import block_weight, is_close, two_of_four_weight
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import pomona as pm
from pomona.sparse import BlockTensor, TwoOfFourTensor
from pomona.sparse.cpu import backend
from pomona.sparse.ops import dense_product
from pomona.sparse.packed_tensor import DTYPES, PackedTensor

INSTRUCTION_SETS = backend.supported_instruction_sets() if backend.load_library() is not None else []
KERNELS: dict[str, Any] = {"2:4": backend.multiply_two_of_four, "blocks": backend.multiply_blocks}
OPERATORS = {"2:4": "two_of_four", "blocks": "blocks"}
# Blocks of which one or several fill registers, those of several rows or a part of one, and those that fit none.
BLOCKS = [(1, 1), (1, 4), (2, 4), (4, 4), (8, 8), (16, 16), (1, 16), (1, 64), (16, 1), (8, 2), (3, 5), (1, 9), (24, 48)]
CASES = [("2:4", None), *(("blocks", shape) for shape in BLOCKS)]
kinds = pytest.mark.parametrize("kind", ["2:4", "blocks"])


def make_packed(kind: str, rows: int, columns: int, shape: tuple[int, int] | None = None,
                dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[PackedTensor, Tensor]:  # fmt: skip
    """Return a packed matrix and its dense form."""
    if kind == "2:4":
        weight = two_of_four_weight(rows, columns, seed).to(dtype)
        return TwoOfFourTensor.from_dense(weight), weight
    height, width = shape or (4, 4)
    weight = block_weight(rows, columns, height, width, 0.6, seed).to(dtype)
    return BlockTensor.from_dense(weight, height, width), weight


def random_vectors(n: int, columns: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def multiply(packed: PackedTensor, x: Tensor, bias: Tensor | None = None, relu: bool = False,
             transposed: bool = False, instruction_set: str | None = None) -> Tensor | None:  # fmt: skip
    """Return the product of vectors in rows by the kernels, computed transposed if asked."""
    given = x.T.contiguous() if transposed else x
    kernel = KERNELS[packed.format_name]
    y = kernel(given, *packed.parts, bias, *packed.sizes, relu, transposed, instruction_set)
    return y.T if transposed and y is not None else y


@settings(deadline=None, max_examples=150)
@given(
    st.tuples(st.integers(1, 90), st.integers(1, 150)),
    st.sampled_from(CASES),
    st.integers(0, 70),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.float64, *DTYPES]),
    st.booleans(),
    st.sampled_from(["rows", "transposed", "strided", "sliced"]),
    st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
def test_any_product_matches_float64(
    shape: tuple[int, int],
    case: tuple[str, tuple[int, int] | None],
    n: int,
    dtype: torch.dtype,
    given_dtype: torch.dtype,
    relu: bool,
    layout: str,
    seed: int,
) -> None:
    kind, block = case
    packed, weight = make_packed(kind, *shape, block, dtype, seed)
    rows, columns = shape
    x, bias = random_vectors(n, columns, seed + 1, given_dtype), random_vectors(1, rows, seed + 2, dtype)[0]
    exact = x.double() @ weight.double().T + bias.double()
    if layout == "strided":
        x = x.T.contiguous().T
    if layout == "sliced":
        x = torch.stack([x, x + 1], -1)[..., 0]
    transposed = layout == "transposed"
    y = packed.product(x.T.contiguous() if transposed else x, *packed.parts, bias, *packed.sizes, relu, transposed)
    assert y.dtype == given_dtype
    assert is_close(y.T if transposed else y, exact.relu() if relu else exact)


@pytest.mark.parametrize(("instruction_set", "transposed"), itertools.product(INSTRUCTION_SETS, [False, True]))
@settings(deadline=None, max_examples=80)
@given(
    st.tuples(st.integers(1, 90), st.integers(1, 150)),
    st.sampled_from(CASES),
    st.integers(1, 140),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_every_instruction_set(
    instruction_set: str,
    transposed: bool,
    shape: tuple[int, int],
    case: tuple[str, tuple[int, int] | None],
    n: int,
    dtype: torch.dtype,
    relu: bool,
) -> None:
    kind, block = case
    packed, weight = make_packed(kind, *shape, block, dtype)
    x, bias = random_vectors(n, shape[1]), random_vectors(1, shape[0], 2)[0]
    exact = x.double() @ weight.double().T + bias
    y = multiply(packed, x, bias, relu, transposed, instruction_set)
    assert y is not None
    assert is_close(y, exact.relu() if relu else exact)


@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_large_matrices_and_every_width_of_a_run(
    instruction_set: str, kind: str, shape: tuple[int, int] | None
) -> None:
    packed, weight = make_packed(kind, 333, 1000, shape)
    bias = torch.arange(1.0, 334)
    for n, transposed in itertools.product((1, 2, 3, 5, 9, 17, 33, 64, 67), (False, True)):
        x = random_vectors(n, 1000, n)
        y = multiply(packed, x, bias, False, transposed, instruction_set)
        assert y is not None
        assert is_close(y, x.double() @ weight.double().T + bias)


@kinds
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("place", ["weight", "input"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
def test_infinities_and_nans_are_those_of_the_dense_product(
    place: str, value: float, transposed: bool, kind: str
) -> None:
    packed, weight = make_packed(kind, 40, 70)
    x = random_vectors(3, 70)
    if place == "weight":
        weight[3, int(weight[3].nonzero()[0])] = value
        packed = TwoOfFourTensor.from_dense(weight) if kind == "2:4" else BlockTensor.from_dense(weight, 4, 4)
    else:
        x[1, 5] = value
    given = x.T.contiguous() if transposed else x
    y = packed.product(given, *packed.parts, None, *packed.sizes, False, transposed)
    assert is_close(y.T if transposed else y, x.double() @ weight.double().T)
    for instruction_set in INSTRUCTION_SETS:
        found = multiply(packed, x, None, False, transposed, instruction_set)
        assert (found is None) == (place == "input")


@kinds
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_activation_keeps_nans_and_infinities(instruction_set: str, transposed: bool, kind: str) -> None:
    weight = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 1.5, -1.5, 1e-40, -1e-40]).repeat(10)
    column = weight.view(-1, 1)
    packed = TwoOfFourTensor.from_dense(column) if kind == "2:4" else BlockTensor.from_dense(column, 4, 1)
    for n in (1, 5, 70):
        y = multiply(packed, torch.ones(n, 1), None, True, transposed, instruction_set)
        assert y is not None
        assert all(torch.equal(line.nan_to_num(7), weight.relu().nan_to_num(7)) for line in y)


@kinds
def test_a_zero_matrix_and_no_vectors(kind: str) -> None:
    zeros = torch.zeros(3, 8)
    nothing = TwoOfFourTensor.from_dense(zeros) if kind == "2:4" else BlockTensor.from_dense(zeros, 2, 4)
    for n in (1, 2, 9):
        assert nothing.linear(torch.ones(n, 8), torch.tensor([1.0, -2, 3]), relu=True).tolist() == [[1, 0, 3]] * n
    assert nothing.linear(torch.ones(0, 8)).shape == (0, 3)
    assert nothing.linear(torch.ones(2, 0, 8)).shape == (2, 0, 3)
    empty = torch.zeros(0, 8)
    no_rows = TwoOfFourTensor.from_dense(empty) if kind == "2:4" else BlockTensor.from_dense(empty, 2, 4)
    assert no_rows.linear(torch.ones(2, 8)).shape == (2, 0)


@kinds
def test_any_contents_stay_inside_the_memory(kind: str) -> None:
    """With contents that are not verified, the result is meaningless, but nothing else is read or written."""
    good, _ = make_packed(kind, 40, 450)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        integers = [
            torch.randint(torch.iinfo(part.dtype).min, torch.iinfo(part.dtype).max, part.shape, generator=generator)
            for part in good.parts[1:]
        ]
        parts = [good.values, *(i.to(part.dtype) for i, part in zip(integers, good.parts[1:], strict=True))]
        for some in ((*parts[:2], *good.parts[2:]), parts):
            hostile = type(good).from_parts(some, good.metadata)
            for instruction_set, n, transposed in itertools.product(INSTRUCTION_SETS, (1, 2, 7, 70), (False, True)):
                y = multiply(hostile, torch.ones(n, 450), None, False, transposed, instruction_set)
                assert y is not None
                assert y.shape == (n, 40)
            with pytest.raises(pm.PomonaError):
                hostile.verify()
            assert hostile.dense().shape == (40, 450)


@kinds
def test_without_kernels_pytorch_computes_the_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = make_packed(kind, 40, 64)
    x = random_vectors(3, 64)
    usual = packed.linear(x)
    monkeypatch.setattr(backend, "load_kernel", lambda *_: None)
    dense_product.warn_about_dense_product.cache_clear()
    with pytest.warns(UserWarning, match="multiplied as dense ones"):
        assert is_close(packed.linear(x), usual.double())


@kinds
def test_several_threads_give_the_same_bits(kind: str) -> None:
    packed, _ = make_packed(kind, 900, 512)
    for n, transposed in itertools.product((1, 2, 6, 90), (False, True)):
        x = random_vectors(n, 512)
        one = multiply(packed, x, transposed=transposed)
        torch.set_num_threads(3)
        try:
            three = multiply(packed, x, transposed=transposed)
        finally:
            torch.set_num_threads(1)
        assert one is not None
        assert three is not None
        assert torch.equal(one, three)


@kinds
def test_calls_from_several_threads_at_once(kind: str) -> None:
    packed, _ = make_packed(kind, 300, 512)
    inputs = [random_vectors(n, 512, n) for n in (1, 2, 9, 33)]
    expected = [packed.linear(x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(30) if not torch.equal(packed.linear(inputs[i]), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORK = """
import os
import torch
import pomona as pm
from pomona.sparse import ops
torch.manual_seed(0)
torch.set_num_threads(2)
weight = torch.randn(600, 512).view(600, 128, 4)
weight[..., ::2] = 0
weight[:, ::2] = 0
weight = weight.view(600, 512)
packs = [pm.TwoOfFourTensor.from_dense(weight), pm.BlockTensor.from_dense(weight, 1, 4)]
x = torch.randn(40, 512)
before = [packed.linear(x[:1]) for packed in packs]
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    same = all(torch.equal(packed.linear(x[:1]), y) for packed, y in zip(packs, before))
    close = all(torch.allclose(packed.linear(x), x @ weight.T, atol=1e-4) for packed in packs)
    os._exit(0 if same and close else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_multiplies() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["0"]


# ---- torch's tools


@kinds
def test_the_operator_passes_torchs_opcheck(kind: str) -> None:
    packed, _ = make_packed(kind, 40, 64)
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = getattr(torch.ops.pomona, OPERATORS[kind])
    arguments = random_vectors(3, 64), *packed.parts, torch.randn(40), *packed.sizes, True
    torch.library.opcheck(operator, arguments, test_utils=quick)
    transposed = random_vectors(64, 3), *packed.parts, None, *packed.sizes, False, True
    torch.library.opcheck(operator, transposed, test_utils=quick)


@kinds
@pytest.mark.parametrize("relu", [False, True])
def test_the_product_is_differentiable(relu: bool, kind: str) -> None:
    packed, weight = make_packed(kind, 32, 64)
    x, bias = torch.randn(5, 64, requires_grad=True), torch.randn(32, requires_grad=True)
    upstream = torch.randn(5, 32)
    dense = torch.nn.functional.linear(x, weight, bias)
    expected = torch.autograd.grad(dense.relu() if relu else dense, (x, bias), upstream)
    found = torch.autograd.grad(packed.linear(x, bias, relu), (x, bias), upstream)
    torch.testing.assert_close(found, expected)
    packed.values.requires_grad_()
    with pytest.raises(pm.PomonaError, match="packed values have no gradient"):
        packed.linear(torch.randn(2, 64)).sum().backward()


@kinds
def test_profilers_and_tracers_see_the_operator(kind: str) -> None:
    packed, _ = make_packed(kind, 40, 64)
    x = torch.randn(3, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        packed.linear(x)
    assert f"pomona::{OPERATORS[kind]}" in {event.key for event in profiled.key_averages()}
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: packed.linear(x))(x)
    assert f"pomona.{OPERATORS[kind]}" in graph.code
