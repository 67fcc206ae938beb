"""Linear layers with dense int8 or int4 weights and the kernels that PyTorch has for them, beside which ours run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

GROUP = 128  # columns that share a scale and a zero point in int4
INNER_TILES = 8  # of the CUDA kernel's layout


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale for each output, by `torch._weight_int8pack_mm`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scales = (weight.float().abs().amax(1) / 127).clamp(min=1e-12).to(torch.bfloat16)
        self.register_buffer("scales", scales)
        codes = (weight.float() / scales.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._weight_int8pack_mm(x.flatten(0, -2), self.codes, self.scales).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def dense_weight(self) -> Tensor:
        """Return the weights that the codes stand for, in float32."""
        return self.codes.float() * self.scales.float().unsqueeze(1)

    @property
    def weight_bytes(self) -> int:
        """The bytes of codes and scales."""
        return int(self.codes.nbytes + self.scales.nbytes)


class Int4Linear(nn.Module):
    """A linear layer with int4 weights, in groups of 128 columns with a scale and a zero point each.

    The kernel is `torch._weight_int4pack_mm`, with another layout on a CPU than on a GPU.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        groups = weight.float().unflatten(1, (-1, GROUP))
        low, high = groups.aminmax(dim=-1)
        steps = ((high - low) / 15).clamp(min=1e-12).to(torch.bfloat16)
        zeros = (low + 8 * steps.float()).to(torch.bfloat16)
        middle = zeros.float().unsqueeze(-1)
        codes = ((groups - middle) / steps.float().unsqueeze(-1) + 8).round().clamp(0, 15).flatten(1).to(torch.int32)
        self.codes = codes.to(torch.uint8)  # for `dense_weight`
        self.register_buffer("packed", pack_int4(codes))
        self.register_buffer("scales", torch.stack([steps, zeros], -1).transpose(0, 1).contiguous())
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm if x.is_cuda else torch.ops.aten._weight_int4pack_mm_for_cpu
        y = multiply(x.flatten(0, -2), self.packed, GROUP, self.scales).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def dense_weight(self) -> Tensor:
        """Return the weights that the codes stand for, in float32."""
        steps, zeros = self.scales.float().transpose(0, 1).unsqueeze(-1).unbind(2)
        return ((self.codes.float().unflatten(1, (-1, GROUP)) - 8) * steps + zeros).flatten(1)

    @property
    def weight_bytes(self) -> int:
        """The bytes of codes, scales and zero points."""
        return int(self.packed.nbytes + self.scales.nbytes)


def pack_int4(codes: Tensor) -> Tensor:
    """Return codes of 4 bits, outputs × inputs, in the layout of the kernel of their device."""
    if not codes.is_cuda:
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(pairs, INNER_TILES)
