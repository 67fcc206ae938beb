"""The operator `unstructured_conv2d`: any convolution against float64, on every instruction set of the processor."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import agree, is_close, prune_unstructured, unstructured_weight
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.sparse import UnstructuredTensor, compress, load, save
from pomona.sparse.conv_geometry import ConvGeometry
from pomona.sparse.cpu import backend
from pomona.sparse.ops import unstructured_conv2d
from pomona.sparse.packed_tensor import DTYPES

INSTRUCTION_SETS = backend.supported_instruction_sets() if backend.load_library() is not None else []
ONLY = {"policy": "all", "formats": ["unstructured"], "patience": 0.0}
PAIRS = st.tuples(st.integers(1, 4), st.integers(1, 4))
EPS = 1e-5
KERNEL, STRIDE, PADDING, DILATION = (3, 3), (1, 1), (1, 1), (1, 1)


def random_weight(rows: int, channels: int, kernel: tuple[int, int], sparsity: float, seed: int = 0) -> Tensor:
    matrix = unstructured_weight(rows, channels * kernel[0] * kernel[1], sparsity, seed)
    return matrix.view(rows, channels, *kernel)


def random_images(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_norm(rows: int, seed: int = 2) -> tuple[Tensor, ...]:
    """Return weight, bias, mean and variance of a batch norm."""
    weight, bias, mean, variance = random_images(4, rows, seed=seed)
    return weight, bias, mean, variance.square() + 0.1


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(deadline=None, max_examples=80)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 30), st.integers(1, 30)),
    st.integers(1, 40),
    PAIRS,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.floats(0, 1),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_every_instruction_set(
    instruction_set: str,
    shape: tuple[int, int, int, int],
    rows: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    sparsity: float,
    dtype: torch.dtype,
    relu: bool,
    biased: bool,
    normed: bool,
    seed: int,
) -> None:
    geometry = ConvGeometry(kernel, stride, padding, dilation)
    if min(geometry.output_size(shape[2:])) < 1:
        return
    weight, x = random_weight(rows, shape[1], kernel, sparsity, seed).to(dtype), random_images(*shape, seed=seed)
    bias = random_images(rows, seed=seed + 1) if biased else None
    exact = F.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), *geometry.pairs[1:])
    norm = random_norm(rows, seed) if normed else backend.NO_NORM
    if normed:
        weight_, bias_, mean, variance = (p.double() for p in norm)
        exact = F.batch_norm(exact, mean, variance, weight_, bias_, eps=EPS)
    parts = UnstructuredTensor.from_dense(weight).parts
    y = backend.convolve_unstructured(x, *parts, bias, rows, geometry, relu, norm, EPS, instruction_set)
    assert y is not None
    assert is_close(y, exact.relu() if relu else exact)


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
@pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
def test_infinities_and_nans_are_those_of_the_dense_convolution(poison: float) -> None:
    weight, x = random_weight(20, 4, KERNEL, 0.8), random_images(2, 4, 9, 9)
    x[1, 2, 4, 5] = poison
    parts = UnstructuredTensor.from_dense(weight).parts
    y = unstructured_conv2d(x, *parts, None, 20, KERNEL, STRIDE, PADDING, DILATION)
    exact = F.conv2d(x.double(), weight.double(), None, STRIDE, PADDING)
    assert is_close(y, exact)
    assert not y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")
def test_inputs_of_other_dtypes(dtype: torch.dtype) -> None:
    weight, x = random_weight(20, 4, KERNEL, 0.8), random_images(2, 4, 9, 9).to(dtype)
    y = unstructured_conv2d(
        x, *UnstructuredTensor.from_dense(weight).parts, None, 20, KERNEL, STRIDE, PADDING, DILATION
    )
    assert y.dtype == dtype
    assert is_close(y, F.conv2d(x.double(), weight.double(), None, STRIDE, PADDING))


def test_contents_that_are_not_of_a_packed_weight_stay_inside_the_memory() -> None:
    values, indices, starts, lanes = UnstructuredTensor.from_dense(random_weight(20, 4, KERNEL, 0.8)).parts
    for parts in (
        (values, torch.full_like(indices, -1), starts, lanes),
        (values, indices, starts * 1000 - 5, lanes),
        (values, indices, starts, lanes * 1000 - 7),
    ):
        y = unstructured_conv2d(random_images(1, 4, 9, 9), *parts, None, 20, KERNEL, STRIDE, PADDING, DILATION)
        assert y.shape == (1, 20, 9, 9)


def test_arguments_that_do_not_fit_are_refused() -> None:
    parts = UnstructuredTensor.from_dense(random_weight(20, 4, KERNEL, 0.8)).parts
    with pytest.raises(pm.PomonaError, match="too small for a kernel of 3×3"):
        unstructured_conv2d(torch.randn(1, 4, 2, 2), *parts, None, 20, KERNEL, STRIDE, (0, 0), DILATION)
    with pytest.raises(pm.PomonaError, match="not a batch of images"):
        unstructured_conv2d(torch.randn(4, 9, 9), *parts, None, 20, KERNEL, STRIDE, PADDING, DILATION)
    with pytest.raises(pm.PomonaError, match="at least 1"):
        unstructured_conv2d(torch.randn(1, 4, 9, 9), *parts, None, 20, KERNEL, (0, 1), PADDING, DILATION)
    with pytest.raises(pm.PomonaError, match="bias or norm has shape"):
        unstructured_conv2d(torch.randn(1, 4, 9, 9), *parts, torch.zeros(3), 20, KERNEL, STRIDE, PADDING, DILATION)


def test_torch_checks_the_operator() -> None:
    parts = UnstructuredTensor.from_dense(random_weight(20, 4, KERNEL, 0.8)).parts
    arguments = (random_images(2, 4, 9, 9), *parts, torch.zeros(20), 20, KERNEL, (2, 2), PADDING, DILATION, True)
    quick = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.pomona.unstructured_conv2d, arguments, test_utils=quick)


@torch.no_grad()
def test_layers_that_are_copied_exported_and_stored(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 9, 3, stride=2))
    prune_unstructured(model, 0.8)
    packed, x = compress(model, **ONLY), random_images(2, 4, 9, 9)
    expected = model(x)
    assert agree(packed(x), expected)
    assert torch.equal(copy.deepcopy(packed)(x), packed(x))
    program = torch.export.export(packed, (x,))
    assert "pomona.unstructured_conv2d" in program.graph_module.code
    assert torch.equal(program.module()(x), packed(x))
    restored = load(save(packed, tmp_path / "model.safetensors"), copy.deepcopy(model))
    assert torch.equal(restored(x), packed(x))


@torch.no_grad()
def test_threads_do_not_change_a_result() -> None:
    layer = prune_unstructured(nn.Conv2d(16, 40, 3, padding=1), 0.8)
    packed, x = compress(layer, **ONLY), random_images(2, 16, 20, 20)
    threads, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(packed(x))
    torch.set_num_threads(threads)
    assert torch.equal(*found)
