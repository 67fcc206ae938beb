"""The dense weight of a packed layer as its `weight` attribute, without the work and memory of unpacking it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

# What is read from the tensor as it is, and the products that a model may compute with a layer's weight itself.
PROPERTIES = ("device", "dtype", "is_cpu", "is_cuda", "is_meta", "layout", "nbytes", "ndim", "requires_grad", "shape")
METHODS = ("__len__", "dim", "element_size", "get_device", "is_complex", "is_floating_point", "numel", "size")
METADATA = {
    *(getattr(Tensor, name).__get__ for name in PROPERTIES),
    *(getattr(Tensor, name) for name in METHODS),
    torch.is_floating_point,
}
PRODUCTS = {F.linear, F.conv2d, torch.addmm, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}


class LazyWeight(Tensor):
    """A dense weight that is unpacked where its values are used, not where only its shape, dtype or device is read.

    Models look at a weight to convert their inputs to its dtype, for instance. `unpack` is told whether the values are
    for a product, which models compute at each call; those for anything else live as long as this tensor.
    """

    unpack: Callable[[bool], Tensor]
    plain: Tensor | None = None

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, unpack: Callable[[bool], Tensor]
    ) -> LazyWeight:
        weight: LazyWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        weight.unpack = unpack
        return weight

    def read_values(self, for_product: bool) -> Tensor:
        """Return the dense weight as a plain tensor."""
        if self.plain is None and for_product:
            return self.unpack(True)
        if self.plain is None:
            self.plain = self.unpack(False)
        return self.plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with plain tensors in place of weights, or read their metadata."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for_product = func in PRODUCTS
        args, kwargs = tree_map_only(LazyWeight, lambda weight: weight.read_values(for_product), (args, kwargs or {}))
        return func(*args, **kwargs)

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment] # for code in C++, which knows no functions of Python
