"""The C kernels: activation, bias, and the device of results."""

from __future__ import annotations

import pytest
import torch
from packing import balanced_weight, is_close

from pomona.sparse import BalancedTensor
from pomona.sparse.cpu import backend

pytestmark = pytest.mark.skipif(backend.load_library() is None, reason="needs the kernels")
INSTRUCTION_SETS = backend.supported_instruction_sets()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_activation_keeps_nans_and_infinities(instruction_set: str, transposed: bool) -> None:
    """With one weight a row and inputs of one, the sums are the weights, and the activation must be that of torch."""
    weight = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 1.5, -1.5, 1e-40, -1e-40]).repeat(10)
    packed = BalancedTensor.from_dense(weight.view(-1, 1), 1)
    for n in (1, 5, 70):
        x = torch.ones(1, n) if transposed else torch.ones(n, 1)
        y = backend.multiply_packed(x, packed.values, packed.indices, None, 80, 1, 1, True, transposed, instruction_set)
        assert y is not None
        assert all(torch.equal(line.nan_to_num(7), weight.relu().nan_to_num(7)) for line in (y.T if transposed else y))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(("block", "kept"), [(32, 3), (32, 4), (64, 5), (200, 9), (400, 7)])
def test_every_row_gets_its_own_bias(block: int, kept: int, instruction_set: str, transposed: bool) -> None:
    """The numbers of rows are around the widths of registers, of groups, and of groups that are read together."""
    for rows, n in ((1, 1), (31, 2), (33, 7), (128, 1), (129, 3), (160, 65), (257, 130)):
        weight = balanced_weight(rows, 400, block=block, kept=kept)
        packed = BalancedTensor.from_dense(weight, block)
        x, bias = torch.randn(n, 400), torch.arange(1.0, rows + 1)
        given = x.T.contiguous() if transposed else x
        y = backend.multiply_packed(
            given, packed.values, packed.indices, bias, rows, 400, block, False, transposed, instruction_set
        )
        assert y is not None
        assert is_close(y.T if transposed else y, x.double() @ weight.double().T + bias)


@pytest.mark.parametrize("transposed", [False, True])
def test_results_are_on_the_cpu_whatever_the_default_device(transposed: bool) -> None:
    x = torch.ones(64, 2) if transposed else torch.ones(2, 64)
    packed = BalancedTensor.from_dense(torch.ones(40, 64).tril(), 32)
    with torch.device("meta"):
        y = backend.multiply_packed(x, packed.values, packed.indices, None, 40, 64, 32, False, transposed)
    assert y is not None
    assert torch.equal(y.T if transposed else y, torch.arange(1.0, 41.0).expand(2, 40))
