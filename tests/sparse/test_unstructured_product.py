"""The operator `unstructured`: any product against float64, on every instruction set of the processor."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import is_close, unstructured_weight
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import pomona as pm
from pomona.sparse import UnstructuredTensor
from pomona.sparse.cpu import backend
from pomona.sparse.ops import dense_product, unstructured
from pomona.sparse.packed_tensor import DTYPES

INSTRUCTION_SETS = backend.supported_instruction_sets() if backend.load_library() is not None else []
SHAPES = st.tuples(st.integers(1, 90), st.integers(1, 150))


def random_vectors(n: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def multiply(packed: UnstructuredTensor, x: Tensor, bias: Tensor | None = None, relu: bool = False,
             transposed: bool = False, instruction_set: str | None = None) -> Tensor | None:  # fmt: skip
    """Return the product of vectors in rows by the kernels, computed transposed if asked."""
    given = x.T.contiguous() if transposed else x
    y = backend.multiply_unstructured(given, *packed.parts, bias, *packed.sizes, relu, transposed, instruction_set)
    return y.T if transposed and y is not None else y


@settings(deadline=None, max_examples=120)
@given(
    SHAPES,
    st.floats(0, 1),
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
    sparsity: float,
    n: int,
    dtype: torch.dtype,
    kind: torch.dtype,
    relu: bool,
    layout: str,
    seed: int,
) -> None:
    rows, columns = shape
    weight = unstructured_weight(rows, columns, sparsity, seed=seed).to(dtype)
    packed = UnstructuredTensor.from_dense(weight)
    x, bias = random_vectors(n, columns, seed + 1, kind), random_vectors(1, rows, seed + 2, dtype)[0]
    exact = x.double() @ weight.double().T + bias.double()
    magnitude = largest_magnitude(x, weight)
    if layout == "strided":
        x = x.T.contiguous().T
    if layout == "sliced":
        x = torch.stack([x, x + 1], -1)[..., 0]
    transposed = layout == "transposed"
    given = x.T.contiguous() if transposed else x
    y = unstructured(given, *packed.parts, bias, rows, columns, relu, transposed)
    assert y.dtype == kind
    assert is_close(y.T if transposed else y, exact.relu() if relu else exact, magnitude)


def largest_magnitude(x: Tensor, weight: Tensor) -> float:
    """Return the largest sum of the absolute values of a product's terms."""
    sums = x.double().abs() @ weight.double().abs().T
    return float(sums.max()) if sums.numel() else 0.0


@pytest.mark.parametrize(("instruction_set", "transposed"), itertools.product(INSTRUCTION_SETS, [False, True]))
@settings(deadline=None, max_examples=60)
@given(SHAPES, st.floats(0, 1), st.integers(1, 140), st.sampled_from(DTYPES), st.booleans())
def test_every_instruction_set(
    instruction_set: str,
    transposed: bool,
    shape: tuple[int, int],
    sparsity: float,
    n: int,
    dtype: torch.dtype,
    relu: bool,
) -> None:
    rows, columns = shape
    weight = unstructured_weight(rows, columns, sparsity).to(dtype)
    packed = UnstructuredTensor.from_dense(weight)
    x, bias = random_vectors(n, columns, 1), random_vectors(1, rows, 2)[0]
    exact = x.double() @ weight.double().T + bias
    y = multiply(packed, x, bias, relu, transposed, instruction_set)
    assert y is not None
    assert is_close(y, exact.relu() if relu else exact, largest_magnitude(x, weight))


@pytest.mark.parametrize(("instruction_set", "transposed"), itertools.product(INSTRUCTION_SETS, [False, True]))
def test_long_rows_and_many_panels(instruction_set: str, transposed: bool) -> None:
    """Rows that are multiplied in several steps, panels that are not full, and all widths of a run with their rests."""
    weight = unstructured_weight(300, 3000, 0.6)
    packed = UnstructuredTensor.from_dense(weight)
    bias = torch.arange(1.0, 301)
    for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 34, 64, 65, 67, 130):
        x = random_vectors(n, 3000, n)
        y = multiply(packed, x, bias, False, transposed, instruction_set)
        assert y is not None
        assert is_close(y, x.double() @ weight.double().T + bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_half_precision_value_is_converted_exactly(instruction_set: str, dtype: torch.dtype) -> None:
    """All 65536 patterns of 16 bits, one in each row, are multiplied by one; NaNs stay NaNs."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).to(dtype)
    values = values[values != 0].view(-1, 1)
    packed = UnstructuredTensor.from_dense(values)
    for n in (1, 5, 33):
        y = multiply(packed, torch.ones(n, 1), instruction_set=instruction_set)
        assert y is not None
        assert all(torch.equal(line.nan_to_num(0.5), values[:, 0].float().nan_to_num(0.5)) for line in y)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_activation_keeps_nans_and_infinities(instruction_set: str, transposed: bool) -> None:
    weight = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 1.5, -1.5, 1e-40, -1e-40]).repeat(10)
    packed = UnstructuredTensor.from_dense(weight.view(-1, 1))
    for n in (1, 5, 70):
        y = multiply(packed, torch.ones(n, 1), None, True, transposed, instruction_set)
        assert y is not None
        assert all(torch.equal(line.nan_to_num(7), weight.relu().nan_to_num(7)) for line in y)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("place", ["weight", "input"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
def test_infinities_and_nans_are_those_of_the_dense_product(place: str, value: float, transposed: bool) -> None:
    weight, x = unstructured_weight(40, 70, 0.8), random_vectors(3, 70, 1)
    if place == "weight":
        weight[3, 5] = weight[39, 69] = value
    else:
        x[1, 5] = value
    packed = UnstructuredTensor.from_dense(weight)
    y = unstructured(x.T.contiguous() if transposed else x, *packed.parts, None, 40, 70, False, transposed)
    assert is_close(y.T if transposed else y, x.double() @ weight.double().T)
    for instruction_set in INSTRUCTION_SETS:
        found = multiply(packed, x, None, False, transposed, instruction_set)
        assert (found is None) == (place == "input")


def test_an_input_with_an_infinity_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = UnstructuredTensor.from_dense(unstructured_weight(40, 70, 0.8))
    dense_product.warn_about_dense_product.cache_clear()
    with pytest.warns(UserWarning, match="multiplied as dense ones for"):
        y = packed.linear(torch.full((2, 70), torch.inf))
    assert torch.equal(packed.linear(torch.full((2, 70), torch.inf)).isnan(), y.isnan())  # no second warning


def test_a_zero_row_a_zero_matrix_and_no_vectors() -> None:
    nothing = UnstructuredTensor.from_dense(torch.zeros(3, 8)).verify()
    assert nothing.values.numel() == 0
    for n in (1, 2, 9):
        assert nothing.linear(torch.ones(n, 8), torch.tensor([1.0, -2, 3]), relu=True).tolist() == [[1, 0, 3]] * n
    assert nothing.linear(torch.ones(0, 8)).shape == (0, 3)
    assert nothing.linear(torch.ones(2, 0, 8)).shape == (2, 0, 3)
    assert UnstructuredTensor.from_dense(torch.zeros(0, 8)).verify().linear(torch.ones(2, 8)).shape == (2, 0)
    row = UnstructuredTensor.from_dense(torch.tensor([[0, 2.0, 0]]))
    assert row.linear(torch.tensor([[1.0, 3, 5]])).tolist() == [[6]]
    column = UnstructuredTensor.from_dense(torch.tensor([[0.0], [2], [0]]))
    assert column.linear(torch.tensor([[3.0], [4]])).tolist() == [[0, 6, 0], [0, 8, 0]]


@pytest.mark.parametrize(("instruction_set", "transposed"), itertools.product(INSTRUCTION_SETS, [False, True]))
def test_wide_matrices_add_their_bands(instruction_set: str, transposed: bool) -> None:
    columns = 70_000
    weight = torch.zeros(40, columns)
    at = torch.randint(columns, (40, 300), generator=torch.Generator().manual_seed(0))
    weight.scatter_(1, at, random_vectors(40, 300, 1))
    packed = UnstructuredTensor.from_dense(weight)
    bias = torch.arange(-20.0, 20)
    for n in (1, 2, 7, 40):
        x = random_vectors(n, columns, 2)
        y = multiply(packed, x, bias, True, transposed, instruction_set)
        assert y is not None
        assert is_close(y, (x.double() @ weight.double().T + bias).relu())


def test_overlapping_views_are_a_convolution() -> None:
    weight = unstructured_weight(5, 12, 0.5)
    packed = UnstructuredTensor.from_dense(weight)
    views = torch.randn(3, 80).as_strided((3, 2, 2, 70), (80, 4, 1, 1))
    y = unstructured(views, *packed.parts, None, 5, 12, False, True)
    assert is_close(y, weight.double() @ views.double().reshape(12, 70))


def test_any_contents_stay_inside_the_memory() -> None:
    """With contents that are not verified, the result is meaningless, but nothing else is read or written."""
    good = UnstructuredTensor.from_dense(unstructured_weight(40, 450, 0.8))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        indices = torch.randint(-(1 << 15), 1 << 15, good.indices.shape, generator=generator).to(torch.int16)
        starts = torch.randint(-(1 << 62), 1 << 62, good.starts.shape, generator=generator)
        lanes = torch.randint(-(1 << 31), 1 << 31, good.lanes.shape, generator=generator).to(torch.int32)
        for parts in ((good.values, indices, *good.parts[2:]), (good.values, indices, starts, lanes)):
            hostile = UnstructuredTensor.from_parts(parts, good.metadata)
            for instruction_set, n, transposed in itertools.product(INSTRUCTION_SETS, (1, 2, 7, 70), (False, True)):
                y = multiply(hostile, torch.ones(n, 450), None, False, transposed, instruction_set)
                assert y is not None
                assert y.shape == (n, 40)
            with pytest.raises(pm.PomonaError):
                hostile.verify()
            assert hostile.dense().shape == (40, 450)


def test_without_kernels_pytorch_computes_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = UnstructuredTensor.from_dense(unstructured_weight(40, 64, 0.8))
    x = random_vectors(3, 64, 1)
    usual = packed.linear(x)
    monkeypatch.setattr(backend, "load_kernel", lambda *_: None)
    dense_product.warn_about_dense_product.cache_clear()
    with pytest.warns(UserWarning, match="multiplied as dense ones"):
        assert is_close(packed.linear(x), usual.double())


def test_several_threads_give_the_same_bits() -> None:
    packed = UnstructuredTensor.from_dense(unstructured_weight(900, 512, 0.8))
    for n, transposed in itertools.product((1, 2, 6, 90), (False, True)):
        x = random_vectors(n, 512, 1)
        one = multiply(packed, x, transposed=transposed)
        torch.set_num_threads(3)
        try:
            three = multiply(packed, x, transposed=transposed)
        finally:
            torch.set_num_threads(1)
        assert one is not None
        assert three is not None
        assert torch.equal(one, three)


def test_calls_from_several_threads_at_once() -> None:
    packed = UnstructuredTensor.from_dense(unstructured_weight(300, 512, 0.8))
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


@pytest.mark.parametrize("transposed", [False, True])
def test_results_are_on_the_cpu_whatever_the_default_device(transposed: bool) -> None:
    packed = UnstructuredTensor.from_dense(torch.ones(40, 64).tril())
    x = torch.ones(2, 64)
    with torch.device("meta"):
        y = multiply(packed, x, transposed=transposed)
    assert y is not None
    assert torch.equal(y, torch.arange(1.0, 41.0).expand(2, 40))


# ---- torch's tools


def test_the_operator_passes_torchs_opcheck() -> None:
    packed = UnstructuredTensor.from_dense(unstructured_weight(40, 64, 0.8))
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (random_vectors(3, 64, 1), *packed.parts, torch.randn(40), 40, 64, True)
    torch.library.opcheck(torch.ops.pomona.unstructured, arguments, test_utils=quick)
    transposed = (random_vectors(64, 3, 1), *packed.parts, None, 40, 64, False, True)
    torch.library.opcheck(torch.ops.pomona.unstructured, transposed, test_utils=quick)


@pytest.mark.parametrize("relu", [False, True])
def test_the_product_is_differentiable(relu: bool) -> None:
    weight = unstructured_weight(32, 64, 0.8)
    packed = UnstructuredTensor.from_dense(weight)
    x, bias = torch.randn(5, 64, requires_grad=True), torch.randn(32, requires_grad=True)
    upstream = torch.randn(5, 32)
    dense = torch.nn.functional.linear(x, weight, bias)
    expected = torch.autograd.grad(dense.relu() if relu else dense, (x, bias), upstream)
    found = torch.autograd.grad(packed.linear(x, bias, relu), (x, bias), upstream)
    torch.testing.assert_close(found, expected)
    packed.values.requires_grad_()
    with pytest.raises(pm.PomonaError, match="packed values have no gradient"):
        packed.linear(torch.randn(2, 64)).sum().backward()


def test_profilers_and_tracers_see_the_operator() -> None:
    packed, x = UnstructuredTensor.from_dense(unstructured_weight(40, 64, 0.8)), torch.randn(3, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        packed.linear(x)
    assert "pomona::unstructured" in {event.key for event in profiled.key_averages()}
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: packed.linear(x))(x)
    assert "pomona.unstructured" in graph.code
