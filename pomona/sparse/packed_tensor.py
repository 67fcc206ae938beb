"""What every packed storage format has: its tensors, its sizes, and the product with a dense input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..errors import PomonaError, require
from ..masking import matrix_shape

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DTYPE_CODES = {
    dtype: code for code, dtype in enumerate(DTYPES)
}  # by which the kernels identify the dtype of the values
SAME_SIZE_INTEGER = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def product_not_registered(*arguments: Any) -> Tensor:
    """Raise RuntimeError: the operators are not imported."""
    raise RuntimeError("no product is registered for packed tensors: import pomona.sparse.ops first.")


class PackedTensor(ABC):
    """A matrix without most of its zeros, or a convolution weight as the matrix out × (in · kh · kw).

    Its tensors are attributes with the names `part_names`, the values first.
    """

    format_name: ClassVar[str]
    part_names: ClassVar[tuple[str, ...]]
    # The operator, which takes x, the parts, a bias, the sizes, and whether to apply a ReLU. `pomona.sparse.ops` sets
    # it when it is imported: the operators depend on the formats, so that the formats cannot import them.
    product: ClassVar[Callable[..., Tensor]] = staticmethod(product_not_registered)

    values: Tensor
    shape: torch.Size

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors of the format, in the order in which the operator takes them."""
        return tuple(getattr(self, name) for name in self.part_names)

    @property
    def matrix(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return matrix_shape(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the stored values."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, padding included."""
        return sum(part.nbytes for part in self.parts)

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """The numbers that describe the matrix, rows and columns first, in the order of the operator."""

    @property
    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """Everything but the tensors as plain values, for the header of a file."""

    @classmethod
    @abstractmethod
    def from_parts(cls, parts: Sequence[Tensor], metadata: Mapping[str, Any]) -> Self:
        """Return the tensor of these parts; raise PomonaError where their shapes or dtypes do not fit together."""

    @staticmethod
    @abstractmethod
    def unpack(*arguments: Any) -> Tensor:
        """Return the dense matrix, rows × columns, of the parts and sizes given."""

    @abstractmethod
    def verify(self) -> Self:
        """Return this tensor if its contents are those of a packed weight, else raise PomonaError.

        This is for tensors read from a file: the constructor checks shapes and dtypes, not contents.
        """

    def dense(self) -> Tensor:
        """Return the dense weight, bit for bit; only a −0.0 that was not stored becomes 0.0."""
        return self.unpack(*self.parts, *self.sizes).view(self.shape)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return a copy on another device or with values of another dtype; the arguments are those of `Tensor.to`."""
        values = self.values.to(*args, **kwargs)
        return self.from_parts([values, *(part.to(values.device) for part in self.parts[1:])], self.metadata)

    def linear(self, x: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
        """Return x Wᵀ + bias over the last dimension of x, as `torch.nn.functional.linear` does, and its ReLU if asked.

        Raise PomonaError where x does not have one feature for each column.
        """
        rows, columns = self.matrix
        if x.ndim < 1 or x.shape[-1] != columns:
            raise PomonaError(
                f"the input has {tuple(x.shape)[-1:]} features where the packed weight has {columns} columns."
            )
        flat = x if x.ndim == 2 else x.reshape(-1, columns)
        y = self.product(flat, *self.parts, bias, *self.sizes, relu)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], rows)


def require_packable(weight: Tensor) -> None:
    """Raise PomonaError for a weight whose dtype or shape cannot be packed."""
    supported = dtype_names(DTYPES)
    require(weight.dtype in DTYPES, f"only {supported} can be packed, got {weight.dtype}: convert it first.")
    is_matrix = weight.ndim >= 2 and weight.shape[1:].numel() > 0
    require(is_matrix, f"only a matrix can be packed, got shape {tuple(weight.shape)}.")


def require_value_dtype(dtype: torch.dtype) -> None:
    """Raise PomonaError for a floating-point dtype that packed values cannot have, as after `.double()`."""
    valid = dtype in DTYPES or not dtype.is_floating_point
    limit = f"packed values are of {dtype_names(DTYPES)}, got {dtype}"
    require(valid, f"{limit}: convert the dense model, pm.decompress(model), instead of the packed one.")


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Return the names of dtypes, separated by commas and without the prefix "torch."."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def to_words(index: Tensor) -> Tensor:
    """Return numbers below 65,536 as the same 16 bits of signed integers."""
    return (index - (index >> 15 << 16)).to(torch.int16).contiguous()


def from_words(words: Tensor) -> Tensor:
    """Return the numbers below 65,536 that `to_words` stored in 16 bits."""
    return words.long() & 0xFFFF
