"""The implementations that `pomona bench` compares: dense, CSR, 2:4, block-sparse, balanced and unstructured products.

All implementations but the dense one keep the same number of weights; balanced and CSR keep the same weights. The
unstructured one keeps weights of rows that differ in scale, so that its rows differ in length, as after training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...patterns import Balanced, Block, Unstructured
from ...sparse import BalancedTensor, BitmapTensor, GapTensor, UnstructuredTensor
from ...sparse.gaps import MAX_COLUMNS as MAX_GAP_COLUMNS
from ...sparse.packed_tensor import PackedTensor

DENSE, BALANCED, UNSTRUCTURED = "dense", "balanced", "unstructured"
OURS = {BALANCED, UNSTRUCTURED}
ROW_SCALE = 0.5  # the standard deviation of the logarithm of a row's scale, where rows differ
TILE_SIZES = {"cpu": 8, "cuda": 32}  # of the block-sparse implementation
# The largest error that rounding explains, relative to the largest value.
ROUNDING_LIMITS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Implementation:
    """One implementation of the product; of several with one name the fastest counts."""

    name: str
    run: Callable[[Tensor], Tensor]
    weight: Tensor  # the dense weight that the implementation represents
    nbytes: int  # bytes of the weight that it reads
    arrange: Callable[[Tensor], Tensor] = lambda x: x  # brings an input into the layout that `run` takes
    packed: PackedTensor | None = None  # the weight in one of our formats

    @classmethod
    def from_packed(cls, name: str, weight: Tensor, packed: PackedTensor) -> Implementation:
        """Return the implementation by the product of a packed weight."""
        return cls(name, packed.linear, weight, packed.nbytes, packed=packed)


def make_implementations(weight: Tensor, block: int, sparsity: float) -> tuple[list[Implementation], dict[str, str]]:
    """Return every implementation for one matrix, and name → reason of those that are not available."""
    mask = Balanced(block=block, pad=True).select_masks([weight.abs()], sparsity)[0]
    pruned = torch.where(mask, weight, 0)
    packed = BalancedTensor.from_dense(pruned, block)
    implementations = [
        Implementation(DENSE, lambda x: linear(x, weight), weight, weight.nbytes),
        *csr_implementations(pruned),
        Implementation.from_packed(BALANCED, pruned, packed),
    ]
    missing: dict[str, str] = {}
    for name, make in (("block-sparse", block_sparse_implementation), ("2:4", two_of_four_implementation)):
        try:
            implementations.insert(-1, make(name, weight, sparsity))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            missing[name] = first_line(error)
    implementations += unstructured_implementations(weight, sparsity)
    return implementations, missing


def prune_unequal_rows(weight: Tensor, sparsity: float, seed: int = 0) -> Tensor:
    """Return a weight without its smallest entries, measured by rows of unequal scale: rows keep unequal counts."""
    scales = torch.randn(len(weight), 1, generator=torch.Generator().manual_seed(seed)).mul(ROW_SCALE).exp()
    mask = Unstructured().select_masks([weight.abs() * scales.to(weight)], sparsity)[0]
    return torch.where(mask, weight, 0)


def unstructured_implementations(weight: Tensor, sparsity: float) -> list[Implementation]:
    """Return the formats for any mask that this device has kernels for, with as many weights as the others."""
    pruned = prune_unequal_rows(weight, sparsity)
    takes_gaps = weight.is_cuda and weight.shape[1] <= MAX_GAP_COLUMNS
    packed: list[PackedTensor] = [(GapTensor if takes_gaps else UnstructuredTensor).from_dense(pruned)]
    if weight.is_cuda and weight.dtype != torch.float32:
        packed.append(BitmapTensor.from_dense(pruned))
    return [Implementation.from_packed(UNSTRUCTURED, pruned, one) for one in packed]


def csr_implementations(pruned: Tensor) -> list[Implementation]:
    """Return CSR (MKL, cuSPARSE) with 32-bit indices, for inputs in rows and for inputs transposed to columns."""
    csr = pruned.to_sparse_csr()
    csr = torch.sparse_csr_tensor(csr.crow_indices().int(), csr.col_indices().int(), csr.values(), csr.shape)
    nbytes = csr.values().nbytes + csr.col_indices().nbytes + csr.crow_indices().nbytes

    def run(x: Tensor) -> Tensor:
        return (csr @ x[0]).unsqueeze(0) if len(x) == 1 else (csr @ x.T).T

    return [
        Implementation("CSR", run, pruned, nbytes),
        Implementation("CSR", lambda transposed: (csr @ transposed).T, pruned, nbytes, lambda x: x.T.contiguous()),
    ]


def block_sparse_implementation(name: str, weight: Tensor, sparsity: float) -> Implementation:
    """Return BSR, which keeps whole tiles, with the same number of weights."""
    size = TILE_SIZES[weight.device.type]
    if any(side % size for side in weight.shape):
        raise ValueError(f"tiles of {size}×{size} do not divide it")
    mask = Block((size, size)).select_masks([weight.abs()], sparsity)[0]
    pruned = torch.where(mask, weight, 0)
    bsr = pruned.to_sparse_bsr((size, size))
    nbytes = bsr.values().nbytes + bsr.col_indices().nbytes + bsr.crow_indices().nbytes
    return Implementation(
        f"{name} {size}×{size}", lambda x: linear(x, bsr) if x.is_cuda else (bsr @ x.T).T, pruned, nbytes
    )


def two_of_four_implementation(name: str, weight: Tensor, sparsity: float) -> Implementation:
    """Return the 2:4 format of the GPU, whose sparsity is always 50 %."""
    if weight.device.type != "cuda":
        raise ValueError("needs a GPU")
    from torch.sparse import to_sparse_semi_structured

    pruned = torch.where(Balanced(block=4).select_masks([weight.abs()], 0.5)[0], weight, 0)
    semi_structured = to_sparse_semi_structured(pruned)
    return Implementation(name, lambda x: linear(x, semi_structured), pruned, weight.nbytes * 9 // 16)


def measure_error(implementation: Implementation, x: Tensor) -> float:
    """Return the largest error of an output compared with float64, relative to the largest value.

    Raise AssertionError where it is our own implementation and rounding does not explain the error.
    """
    exact = x.double() @ implementation.weight.double().T
    output = implementation.run(implementation.arrange(x)).double()
    error = float((output - exact).abs().max() / exact.abs().max())
    if implementation.name in OURS and not is_rounding(error, x.dtype):
        raise AssertionError(
            f"{implementation.name} is wrong: it differs from float64 by {error:.1e} of the largest value"
        )
    return error


def is_rounding(error: float, dtype: torch.dtype) -> bool:
    """Return whether rounding explains an error; it does not explain NaN."""
    return error <= ROUNDING_LIMITS[dtype]


def first_line(error: Exception) -> str:
    """Return the beginning of an error's message, short enough for a column."""
    return str(error).splitlines()[0][:60]
