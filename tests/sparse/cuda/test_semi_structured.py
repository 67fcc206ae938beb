"""Products of 2:4 matrices by PyTorch's kernels: when they are used, with what, and on a device."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from packing import is_close, two_of_four_weight
from recorded_kernels import GPUS
from torch import Tensor

from pomona.sparse import TwoOfFourTensor
from pomona.sparse.cuda import semi_structured
from pomona.sparse.packed_tensor import DTYPES

HALVES = DTYPES[1:]


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), *GPUS])
def test_the_capability_and_the_dtype_decide(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda dense: dense)
    for dtype, other in product(DTYPES, DTYPES):
        packed = TwoOfFourTensor.from_dense(two_of_four_weight(40, 64).to(dtype))
        x = torch.randn(3, 64).to(other)
        y = semi_structured.multiply_two_of_four(x, *packed.parts, None, 40, 64, False, False)
        assert (y is not None) == (capability >= (8, 0) and dtype == other and dtype in HALVES)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The dense matrices that are converted; in this process they stay dense."""
    seen: list[Tensor] = []

    def convert(dense: Tensor) -> Tensor:
        seen.append(dense)
        return dense

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", convert)
    return seen


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "columns", "n"), [(40, 70, 5), (64, 128, 64), (1, 1, 1), (130, 65, 3)])
def test_matrices_and_vectors_are_padded_to_whole_tiles(
    rows: int, columns: int, n: int, dtype: torch.dtype, converted: list[Tensor]
) -> None:
    weight = two_of_four_weight(rows, columns).to(dtype)
    packed = TwoOfFourTensor.from_dense(weight)
    x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    for relu, transposed in product((False, True), (False, True)):
        given = x.T.contiguous() if transposed else x
        y = semi_structured.multiply_two_of_four(given, *packed.parts, bias, rows, columns, relu, transposed)
        assert y is not None
        assert y.dtype == dtype
        assert y.is_contiguous()
        assert is_close(y.T if transposed else y, exact.relu() if relu else exact)
    assert len(converted) == 1, "the converted matrix is kept for the next call"
    assert [side % semi_structured.ALIGNMENT for side in converted[0].shape] == [0, 0]
    packed.values.mul_(2)
    y = semi_structured.multiply_two_of_four(x, *packed.parts, None, rows, columns, False, False)
    assert y is not None
    assert is_close(y, 2 * x.double() @ weight.double().T)
    assert len(converted) == 2, "it is converted again where a part has changed"


@pytest.mark.usefixtures("converted")
def test_a_vector_with_an_infinity_gives_nans() -> None:
    packed = TwoOfFourTensor.from_dense(two_of_four_weight(40, 64).half())
    x = torch.randn(3, 64).half()
    x[1, 5] = torch.inf
    y = semi_structured.multiply_two_of_four(x, *packed.parts, None, 40, 64, True, False)
    assert y is not None
    assert y.isnan().any(1).tolist() == [False, True, False]
    assert bool(y[1].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_on_a_device(dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < semi_structured.MIN_CAPABILITY:
        pytest.skip("needs sparse tensor cores")
    weight = two_of_four_weight(520, 1000).to(dtype)
    packed, bias = TwoOfFourTensor.from_dense(weight).to("cuda"), torch.randn(520).to(dtype)
    for n, transposed in product((1, 17, 64, 200), (False, True)):
        x = torch.randn(n, 1000).to(dtype)
        given = (x.T.contiguous() if transposed else x).cuda()
        y = packed.product(given, *packed.parts, bias.cuda(), *packed.sizes, False, transposed)
        assert is_close((y.T if transposed else y).cpu(), x.double() @ weight.double().T + bias.double())
