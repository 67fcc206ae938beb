"""The operators `torch.ops.pomona.balanced`, the product with a packed matrix, and `balanced_lstm`, on any device.

x is n × columns and y n × rows; turned, x is columns × n and y rows × n. The columns of x may be several
dimensions, of any strides, overlapping ones too: a convolution is a view of its input.

For an LSTM, x is time × n × features, and there is one packed matrix a layer; see `join`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from ..errors import PomonaError
from . import cpu as native
from . import cuda as gpu
from .cuda.conv import Geometry
from .format import LANES, BalancedTensor, check, check_places, check_sizes, dense

LIBRARY = torch.library.Library("pomona", "DEF")
LIBRARY.define(
    "balanced(Tensor x, Tensor values, Tensor indices, Tensor? bias, int rows, int columns, int block, "
    "bool relu=False, bool turned=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "balanced_lstm(Tensor x, Tensor? h, Tensor? c, Tensor[] values, Tensor[] indices, Tensor[] biases, int[] blocks) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "balanced_conv2d(Tensor x, Tensor values, Tensor indices, Tensor? bias, int rows, int block, int[2] kernel, "
    "int[2] stride, int[2] padding, int[2] dilation, bool relu=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
BACKENDS = {"cpu": native.product, "cuda": gpu.product}  # each may decline, and then the reference does it


def followed(x: Tensor, *given: Any) -> bool:
    """Whether operators are more than computed: by a compiler, tracer, mode or transform, or for autograd."""
    return (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.is_meta
        or (torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (x, *given)))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def watched(x: Tensor, *given: Any) -> bool:
    """Whether anybody sees which operators are called: those who follow them, or a profiler."""
    return followed(x, *given) or torch.autograd._profiler_enabled()


def operator(compute: Callable[..., Any], fake: Callable[..., Any], name: str) -> Callable[..., Any]:
    """An operator that is computed without torch's dispatch, which takes as long as a product, where nobody watches."""
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pomona::{name}", fake, lib=LIBRARY)
    registered = getattr(torch.ops.pomona, name)

    @wraps(compute)
    def call(x: Tensor, *given: Any) -> Any:
        return registered(x, *given) if watched(x, *given) else compute(x, *given)

    return call


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
    if backend is not None and x.numel() > 0 and rows > 0:
        y = backend(x, values, indices, bias, rows, columns, block, relu, turned)
        if y is not None:
            return y
    return reference(x, values, indices, bias, rows, columns, block, relu, turned)


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


balanced = operator(compute, fake, "balanced")


# ---- a convolution


def conv_compute(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, block: int,
                 kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
                 relu: bool = False) -> Tensor:  # fmt: skip
    """The fastest way there is for these tensors; else what the operator means, the dense one in float32."""
    how, size = conv_admit(conv_known, x, values, indices, bias, rows, block, kernel, stride, padding, dilation)
    y = gpu.conv.convolve(x, values, indices, bias, rows, block, how, relu) if x.is_cuda and size.numel() else None
    if y is not None:
        return y
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = dense(values, indices, rows, x.shape[1] * kernel[0] * kernel[1], block).view(rows, -1, *kernel).to(wide)
    y = conv2d(x.to(wide), weight, bias if bias is None else bias.to(wide), stride, padding, dilation)
    return (y.relu() if relu else y).to(x.dtype)


def conv_fake(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, rows: int, block: int,
              kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
              relu: bool = False) -> Tensor:  # fmt: skip
    """The shape alone, for torch.compile and torch.export."""
    pairs = kernel, stride, padding, dilation
    return x.new_empty(conv_admit(conv_sizes, x, values, indices, bias, rows, block, *pairs)[1])


Settled = tuple[Geometry, torch.Size]


def conv_admit(settle: Callable[..., Settled], x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None,
               rows: int, block: int, *pairs: Sequence[int]) -> Settled:  # fmt: skip
    """How images are looked at, and the shape of what comes out; what does not fit together is refused."""
    kinds, biased = (x.dtype, values.dtype, indices.dtype), None if bias is None else bias.shape
    settled = settle(x.shape, values.shape, indices.shape, biased, kinds, rows, block, *map(tuple, pairs))
    check_places(values, indices)
    if x.device != values.device:
        raise PomonaError(f"x is on {x.device}, the packed weight on {values.device}: move one of them.")
    return settled


def conv_sizes(x: torch.Size, values: torch.Size, indices: torch.Size, bias: torch.Size | None,
               kinds: tuple[torch.dtype, torch.dtype, torch.dtype], rows: int, block: int,
               *pairs: tuple[int, ...]) -> Settled:  # fmt: skip
    """The same from all that is known without the tensors themselves."""
    if len(x) != 4 or not kinds[0].is_floating_point:
        raise PomonaError(f"x {tuple(x)} of {kinds[0]} is no batch of images.")
    how = Geometry.of(*pairs)
    images, channels, height, width = x
    check_sizes(values, indices, *kinds[1:], rows, channels * how.kernel[0] * how.kernel[1], block)
    if bias is not None and bias != (rows,):
        raise PomonaError(f"the bias has shape {tuple(bias)} where {(rows,)} is needed.")
    high, wide = how.size((height, width))
    if high <= 0 or wide <= 0:
        kernel = "×".join(map(str, how.kernel))
        raise PomonaError(f"an image of {height}×{width} is too small for a kernel of {kernel}.")
    return how, torch.Size((images, rows, high, wide))


conv_known = cache(conv_sizes)  # else it takes the host a good part of a call

balanced_conv2d = operator(conv_compute, conv_fake, "balanced_conv2d")


# ---- an LSTM

Packs = Sequence[Tensor]  # a tensor for each layer
Three = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def join(weights: Sequence[tuple[Tensor, Tensor]], biases: Sequence[Tensor], block: int) -> Three:
    """One layer's values, indices and biases: [W_ih W_hh] of each direction as one matrix, and directions × rows.

    Both parts are of whole blocks. The rows of a unit's gates lie side by side, and those of a direction are filled up
    to a multiple of 32.
    """
    parts = [torch.cat([pad(w, (0, -w.shape[1] % block)) for w in pair], 1) for pair in weights]
    rows = torch.cat([pad(by_unit(part), (0, 0, 0, -len(part) % LANES)) for part in parts])
    packed = BalancedTensor.from_dense(rows, block)
    return packed.values, packed.indices, torch.stack([by_unit(bias.float()) for bias in biases])


def by_unit(rows: Tensor) -> Tensor:
    """The gates of a unit side by side."""
    return rows.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1)


def apart(values: Tensor, indices: Tensor, columns: int, units: int, directions: int, block: int) -> list[Tensor]:
    """The matrix of each direction again, its rows by gate and its columns without what fills up blocks."""
    wide, filled = values.shape[1] * block, -(-columns // block) * block
    rows = dense(values, indices, values.shape[0] * LANES, wide, block).unflatten(0, (directions, -1))[:, : 4 * units]
    both = torch.cat([rows[..., :columns], rows[..., filled : filled + units]], 2)
    return [part.unflatten(0, (-1, 4)).transpose(0, 1).flatten(0, 1) for part in both]


def lstm_reference(
    x: Tensor, h: Tensor | None, c: Tensor | None, values: Packs, indices: Packs, biases: Packs, blocks: Sequence[int]
) -> Three:
    """What the operator means, as torch.nn.LSTM has it: sums and gates in float32 at the least, states in x's kind."""
    directions, units = len(biases[0]), biases[0].shape[1] // 4
    wide, states = torch.promote_types(x.dtype, torch.float32), []
    zero = x.new_zeros(len(values) * directions, x.shape[1], units)
    h, c = zero if h is None else h, zero if c is None else c
    for layer, bias in enumerate(biases):
        weights = apart(values[layer], indices[layer], x.shape[2], units, directions, blocks[layer])
        ways = []
        for way, weight in enumerate(weights):
            state, cell, outputs = h[layer * directions + way], c[layer * directions + way], []
            for given in x.flip(0) if way else x:
                sums = torch.cat([given, state], 1).to(wide) @ weight.to(wide).T + bias[way].view(-1, 4).T.flatten()
                i, f, g, o = sums.chunk(4, 1)
                new = f.sigmoid() * cell.to(wide) + i.sigmoid() * g.tanh()
                state, cell = (o.sigmoid() * new.tanh()).to(x.dtype), new.to(x.dtype)
                outputs.append(state)
            ways.append(torch.stack(outputs[::-1] if way else outputs))
            states.append((state, cell))
        x = torch.cat(ways, 2)
    return x, torch.stack([state for state, _ in states]), torch.stack([cell for _, cell in states])


def lstm_compute(x: Tensor, h: Tensor | None, c: Tensor | None, values: Packs, indices: Packs, biases: Packs,
                 blocks: Sequence[int]) -> Three:  # fmt: skip
    """The fastest way there is for these tensors."""
    lstm_admit(x, h, c, values, indices, biases, blocks)
    done = gpu.lstm.run(x, h, c, values, indices, biases, blocks) if x.is_cuda else None
    return lstm_reference(x, h, c, values, indices, biases, blocks) if done is None else done


def lstm_fake(x: Tensor, h: Tensor | None, c: Tensor | None, values: Packs, indices: Packs, biases: Packs,
              blocks: Sequence[int]) -> Three:  # fmt: skip
    """The shapes alone, for torch.compile and torch.export."""
    lstm_admit(x, h, c, values, indices, biases, blocks)
    directions, units = len(biases[0]), biases[0].shape[1] // 4
    state = (len(values) * directions, x.shape[1], units)
    return x.new_empty(*x.shape[:2], directions * units), x.new_empty(state), x.new_empty(state)


def lstm_admit(x: Tensor, h: Tensor | None, c: Tensor | None, values: Packs, indices: Packs, biases: Packs,
               blocks: Sequence[int]) -> None:  # fmt: skip
    """Refuse what does not fit together."""
    if x.ndim != 3 or x.shape[0] < 1 or not len(values) == len(indices) == len(biases) == len(blocks) > 0:
        raise PomonaError(f"x {tuple(x.shape)} and packed weights of {len(values)} layers do not make an LSTM.")
    columns, (directions, rows) = x.shape[2], biases[0].shape
    for value, index, bias, block in zip(values, indices, biases, blocks, strict=True):
        inner = sum(-(-width // block) * block for width in (columns, rows // 4))
        check(value, index, directions * -(-rows // LANES) * LANES, inner, block)
        if bias.shape != (directions, rows) or bias.dtype != torch.float32 or not bias.is_contiguous():
            raise PomonaError(f"the biases are float32 of shape {(directions, rows)}, got {tuple(bias.shape)}.")
        if not x.device == value.device == bias.device:
            raise PomonaError(f"x is on {x.device}, the packed weight on {value.device}: move one of them.")
        columns = directions * rows // 4
    state = (len(values) * directions, x.shape[1], rows // 4)
    for given in (h, c):
        if given is not None and given.shape != state:
            raise PomonaError(f"a state has shape {tuple(given.shape)} where {state} is needed.")


balanced_lstm = operator(lstm_compute, lstm_fake, "balanced_lstm")
