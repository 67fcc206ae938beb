"""The operator `torch.ops.pomona.balanced_lstm`: an LSTM with one joint packed matrix [W_ih W_hh] a layer.

x is time × n × features. `pack_joint_weights` makes the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...errors import PomonaError
from ..cuda.lstm import run_lstm
from ..format import LANES, BalancedTensor, unpack_matrix, validate_packed
from .registration import register_operator

GATES = 4  # input, forget, cell and output, in torch's order
LayerTensors = Sequence[Tensor]  # one tensor for each layer
ThreeTensors = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def pack_joint_weights(weights: Sequence[tuple[Tensor, Tensor]], biases: Sequence[Tensor], block: int) -> ThreeTensors:
    """Return the packed values, the indices and the biases of one layer, from W_ih, W_hh and a bias per direction.

    W_ih and W_hh of a direction become one matrix, each padded to whole blocks. The rows of a unit's gates lie side by
    side, and the rows of a direction are padded to a multiple of 32. The biases are directions × rows.
    """
    joined = [torch.cat([pad(w, (0, -w.shape[1] % block)) for w in pair], 1) for pair in weights]
    rows = torch.cat([pad(order_by_unit(part), (0, 0, 0, -len(part) % LANES)) for part in joined])
    packed = BalancedTensor.from_dense(rows, block)
    return packed.values, packed.indices, torch.stack([order_by_unit(bias.float()) for bias in biases])


def order_by_unit(rows: Tensor) -> Tensor:
    """Return rows that were ordered by gate, ordered by unit: the gates of a unit side by side."""
    return rows.unflatten(0, (GATES, -1)).transpose(0, 1).flatten(0, 1)


def order_by_gate(rows: Tensor) -> Tensor:
    """Return rows that were ordered by unit, ordered by gate: the inverse of `order_by_unit`."""
    return rows.unflatten(0, (-1, GATES)).transpose(0, 1).flatten(0, 1)


def unpack_joint_weights(
    values: Tensor, indices: Tensor, columns: int, units: int, directions: int, block: int
) -> list[Tensor]:
    """Return the dense [W_ih W_hh] of each direction, with rows ordered by gate and no padding."""
    width, padded = values.shape[1] * block, -(-columns // block) * block
    rows = unpack_matrix(values, indices, values.shape[0] * LANES, width, block)
    rows = rows.unflatten(0, (directions, -1))[:, : GATES * units]
    joined = torch.cat([rows[..., :columns], rows[..., padded : padded + units]], 2)
    return [order_by_gate(part) for part in joined]


def reference_lstm(x: Tensor, h: Tensor | None, c: Tensor | None, values: LayerTensors, indices: LayerTensors,
                   biases: LayerTensors, blocks: Sequence[int]) -> ThreeTensors:  # fmt: skip
    """Return outputs and states as torch.nn.LSTM defines them: the definition of the operator.

    Sums and gates are in float32 or wider, states in the dtype of x.
    """
    directions, units = len(biases[0]), biases[0].shape[1] // GATES
    dtype, states = torch.promote_types(x.dtype, torch.float32), []
    zeros = x.new_zeros(len(values) * directions, x.shape[1], units)
    h, c = zeros if h is None else h, zeros if c is None else c
    for layer, bias in enumerate(biases):
        weights = unpack_joint_weights(values[layer], indices[layer], x.shape[2], units, directions, blocks[layer])
        outputs_by_direction = []
        for direction, weight in enumerate(weights):
            state, cell, outputs = h[layer * directions + direction], c[layer * directions + direction], []
            gate_bias = order_by_gate(bias[direction])
            for step in x.flip(0) if direction else x:
                sums = torch.cat([step, state], 1).to(dtype) @ weight.to(dtype).T + gate_bias
                i, f, g, o = sums.chunk(GATES, 1)
                new_cell = f.sigmoid() * cell.to(dtype) + i.sigmoid() * g.tanh()
                state, cell = (o.sigmoid() * new_cell.tanh()).to(x.dtype), new_cell.to(x.dtype)
                outputs.append(state)
            outputs_by_direction.append(torch.stack(outputs[::-1] if direction else outputs))
            states.append((state, cell))
        x = torch.cat(outputs_by_direction, 2)
    return x, torch.stack([state for state, _ in states]), torch.stack([cell for _, cell in states])


def compute_lstm(x: Tensor, h: Tensor | None, c: Tensor | None, values: LayerTensors, indices: LayerTensors,
                 biases: LayerTensors, blocks: Sequence[int]) -> ThreeTensors:  # fmt: skip
    """Return outputs and states by the CUDA kernel, or by the reference where there is none for these tensors."""
    validate_lstm(x, h, c, values, indices, biases, blocks)
    result = run_lstm(x, h, c, values, indices, biases, blocks) if x.is_cuda else None
    return reference_lstm(x, h, c, values, indices, biases, blocks) if result is None else result


def fake_lstm(x: Tensor, h: Tensor | None, c: Tensor | None, values: LayerTensors, indices: LayerTensors,
              biases: LayerTensors, blocks: Sequence[int]) -> ThreeTensors:  # fmt: skip
    """Return empty tensors of the shapes of outputs and states, for torch.compile and torch.export."""
    validate_lstm(x, h, c, values, indices, biases, blocks)
    directions, units = len(biases[0]), biases[0].shape[1] // GATES
    state = (len(values) * directions, x.shape[1], units)
    return x.new_empty(*x.shape[:2], directions * units), x.new_empty(state), x.new_empty(state)


def validate_lstm(x: Tensor, h: Tensor | None, c: Tensor | None, values: LayerTensors, indices: LayerTensors,
                  biases: LayerTensors, blocks: Sequence[int]) -> None:  # fmt: skip
    """Raise PomonaError unless the arguments of an LSTM fit together."""
    if x.ndim != 3 or x.shape[0] < 1 or not len(values) == len(indices) == len(biases) == len(blocks) > 0:
        raise PomonaError(f"x {tuple(x.shape)} and packed weights of {len(values)} layers do not make an LSTM.")
    columns, (directions, rows) = x.shape[2], biases[0].shape
    for value, index, bias, block in zip(values, indices, biases, blocks, strict=True):
        inner = sum(-(-width // block) * block for width in (columns, rows // GATES))
        validate_packed(value, index, directions * -(-rows // LANES) * LANES, inner, block)
        if bias.shape != (directions, rows) or bias.dtype != torch.float32 or not bias.is_contiguous():
            raise PomonaError(f"the biases are float32 of shape {(directions, rows)}, got {tuple(bias.shape)}.")
        if not x.device == value.device == bias.device:
            raise PomonaError(f"x is on {x.device}, the packed weight on {value.device}: move one of them.")
        columns = directions * rows // GATES
    state = (len(values) * directions, x.shape[1], rows // GATES)
    for given in (h, c):
        if given is not None and given.shape != state:
            raise PomonaError(f"a state has shape {tuple(given.shape)} where {state} is needed.")


balanced_lstm = register_operator(
    "balanced_lstm(Tensor x, Tensor? h, Tensor? c, Tensor[] values, Tensor[] indices, Tensor[] biases, int[] blocks) "
    "-> (Tensor, Tensor, Tensor)",
    compute_lstm,
    fake_lstm,
)
