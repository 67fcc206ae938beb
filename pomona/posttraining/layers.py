"""A layer with calibrated inputs: its weight as a matrix, and its inputs as rows that the matrix multiplies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.targets import Target
from ..errors import require


@dataclass(frozen=True)
class CalibratedLayer:
    """A linear layer, GPT-2's Conv1D or a convolution of one group: y = rows · matrixᵀ."""

    target: Target
    modules: tuple[nn.Module, ...]  # all that have this weight: several where it is tied

    @property
    def name(self) -> str:
        """The name of the weight."""
        return self.target.name

    @property
    def module(self) -> nn.Module:
        """The layer itself."""
        return self.target.module

    @property
    def columns(self) -> int:
        """The number of columns of the matrix."""
        return self.target.fan_in

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the layer is pruned: float32, or wider where the weight is."""
        return torch.promote_types(self.target.parameter.dtype, torch.float32)

    def read_matrix(self) -> Tensor:
        """Return a copy of the weight, outputs × (inputs · kernel)."""
        weight = self.target.parameter.detach().movedim(self.target.output_dim, 0)
        return weight.flatten(1).to(self.compute_dtype, copy=True)

    def write_matrix(self, matrix: Tensor) -> None:
        """Write a matrix back as the weight."""
        weight = self.target.parameter.data
        outputs_first = matrix.view(self.target.outputs_first)
        weight.copy_(outputs_first.movedim(0, self.target.output_dim))

    def as_mask(self, kept: Tensor) -> Tensor:
        """Return the mask of the matrix in the shape of the weight."""
        return kept.view(self.target.outputs_first).movedim(0, self.target.output_dim).contiguous()

    def validate_inputs(self, has_any: bool, are_finite: bool) -> None:
        """Raise PomonaError where no calibration data has reached the layer, or some of it was not finite."""
        require(has_any, f"{self.name} has no input in these data: leave it out by exclude=[…].")
        require(
            are_finite,
            f"{self.name} has infinite or NaN inputs in these data: leave out the samples that lead to them, or prune "
            "the model in a wider dtype.",
        )

    def input_rows(self, x: Tensor) -> Tensor:
        """Return the rows that the layer multiplies for an input: one for each sample, token or pixel."""
        if isinstance(self.module, (nn.Conv1d, nn.Conv2d)):
            return unfold_input(self.module, x.to(self.compute_dtype))
        return x.reshape(-1, x.shape[-1])


def is_calibrated(module: nn.Module) -> bool:
    """Return whether the inputs of a layer can be observed: it multiplies one matrix whenever it is called."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return module.groups == 1
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def unfold_input(conv: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Return the windows of an input that a convolution multiplies, one in each row."""
    kernel, stride, dilation = conv.kernel_size, conv.stride, conv.dilation
    batched = x if x.ndim == len(kernel) + 2 else x.unsqueeze(0)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    padded = F.pad(batched, conv._reversed_padding_repeated_twice, mode=mode)
    if len(kernel) == 1:
        padded = padded.unsqueeze(2)
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
    windows = F.unfold(padded, kernel, dilation=dilation, stride=stride)
    return windows.transpose(1, 2).reshape(-1, windows.shape[1])
