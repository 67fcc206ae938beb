"""The operator `torch.ops.pomona.balanced`: the product with a packed matrix, on any device.

x is n × columns and y n × rows; turned, x is columns × n and y rows × n. The columns of x may be several
dimensions, of any strides, overlapping ones too: a convolution is a view of its input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import PomonaError
from . import gpu, native
from .balanced import check, dense

LIBRARY = torch.library.Library("pomona", "DEF")
LIBRARY.define(
    "balanced(Tensor x, Tensor values, Tensor indices, Tensor? bias, int rows, int columns, int block, "
    "bool relu=False, bool turned=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
balanced = torch.ops.pomona.balanced
BACKENDS = {"cpu": native.product, "cuda": gpu.product}  # each may decline, and then the reference does it


def reference(
    x: Tensor,
    values: Tensor,
    indices: Tensor,
    bias: Tensor | None,
    rows: int,
    columns: int,
    block: int,
    relu: bool = False,
    turned: bool = False,
) -> Tensor:
    """What the operator means: the dense product, its activation, in x's own kind."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = dense(values, indices, rows, columns, block).to(wide)
    y = weight @ x.to(wide).reshape(columns, -1) if turned else x.to(wide).reshape(-1, columns) @ weight.T
    if bias is not None:
        y = y + (bias.to(wide).unsqueeze(1) if turned else bias.to(wide))
    return (y.relu() if relu else y).to(x.dtype)


def compute(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int, block: int,
            relu: bool = False, turned: bool = False) -> Tensor:  # fmt: skip
    """The fastest way there is for these tensors."""
    admit(x, values, indices, bias, rows, columns, block, turned)
    backend = BACKENDS.get(x.device.type)
    y = None
    if backend is not None and x.numel() > 0 and rows > 0:
        y = backend(x, values, indices, bias, rows, columns, block, relu, turned)
    return reference(x, values, indices, bias, rows, columns, block, relu, turned) if y is None else y


def fake(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int, block: int,
         relu: bool = False, turned: bool = False) -> Tensor:  # fmt: skip
    """The shape alone, for torch.compile and torch.export."""
    admit(x, values, indices, bias, rows, columns, block, turned)
    return x.new_empty((rows, x.shape[-1]) if turned else (x.shape[0], rows))


def admit(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, columns: int, block: int,
          turned: bool) -> None:  # fmt: skip
    """Refuse what does not fit together."""
    check(values, indices, rows, columns, block)
    inner = x.shape[:-1] if turned else x.shape[1:]
    if x.ndim < 2 or inner.numel() != columns or not x.is_floating_point():
        raise PomonaError(f"x {tuple(x.shape)} of {x.dtype} does not fit a packed matrix of {rows}×{columns}.")
    if bias is not None and bias.shape != (rows,):
        raise PomonaError(f"the bias has shape {tuple(bias.shape)} where {(rows,)} is needed.")
    if x.device != values.device:
        raise PomonaError(f"x is on {x.device}, the packed weight on {values.device}: move one of them.")


LIBRARY.impl("balanced", compute, "CompositeExplicitAutograd")
torch.library.register_fake("pomona::balanced", fake, lib=LIBRARY)
