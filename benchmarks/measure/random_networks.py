"""Random networks from all operations that certificates support: every one a short program on small tensors.

A network starts from a vector, a sequence or an image. Each of its steps draws an operation that fits one of the values
so far, with random settings, and two values may be added, joined, gated or attended to. The result is the last value.
"""

from __future__ import annotations

import copy

import torch
from random_operations import OPERATIONS, Draw, Operation
from torch import Tensor, nn

LARGEST = 80  # entries of a value
INPUT_SHAPES = ((3,), (6,), (10,), (4, 3), (3, 6), (2, 4, 4), (3, 5, 3), (1, 6, 6), (4, 3, 3))
LAYERS = ("linear", "convolution", "layer and batch norm")  # the first step of a network is one of them


class RandomNetwork(nn.Module):
    """A list of modules, each on the results of earlier ones; the last one is the output."""

    def __init__(self, draw: Draw, shape: tuple[int, ...], length: int, operations: list[Operation]) -> None:
        super().__init__()
        self.steps, self.reads, self.names = nn.ModuleList(), [], []
        values = [torch.randn(2, *shape)]
        attempts = 0
        while len(self.steps) < length and attempts < 40 * length:
            attempts += 1
            index = len(values) - 1 if draw.random() < 0.75 else draw.randrange(len(values))
            x = values[index]
            fitting = [op for op in operations if x.ndim - 1 in op.axes and (self.names or op.name in LAYERS)]
            op = draw.choices(fitting, [op.weight for op in fitting])[0]
            partners = [k for k, other in enumerate(values) if other.shape == x.shape]
            reads = [index] + [draw.choice(partners) for _ in range(op.inputs - 1)]
            try:
                module = op.build(draw, x).eval()
                randomize_statistics(module)
                with torch.no_grad():
                    result = module(*[values[k].clone() for k in reads])
            except (RuntimeError, ValueError, IndexError):
                continue  # the settings do not fit the shape
            usable = result.ndim in (2, 3, 4) and len(result) == 2 and 0 < result[0].numel() <= LARGEST
            if usable and bool(result.isfinite().all()) and float(result.abs().max()) < 1e3:
                self.steps.append(module)
                self.reads.append(reads)
                self.names.append(op.name)
                values.append(result)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for module, reads in zip(self.steps, self.reads, strict=True):
            values.append(module(*[values[k] for k in reads]))
        return values[-1]


def randomize_statistics(module: nn.Module) -> None:
    """Give normalization layers parameters and statistics as after training."""
    for part in module.modules():
        for name in ("weight", "bias"):
            tensor = getattr(part, name, None)
            if isinstance(tensor, nn.Parameter) and tensor.ndim == 1:
                tensor.data.copy_(torch.randn(tensor.shape))
        if isinstance(getattr(part, "running_mean", None), Tensor):
            part.running_mean.copy_(torch.randn(part.running_mean.shape) / 2)
            part.running_var.copy_(0.3 + 2 * torch.rand(part.running_var.shape))


def random_network(seed: int) -> tuple[RandomNetwork, tuple[int, ...]]:
    """Return the network of a seed, and the shape of its input without the batch."""
    draw = Draw(seed)
    torch.manual_seed(seed)
    shape = draw.choice(INPUT_SHAPES)
    return RandomNetwork(draw, shape, draw.randint(2, 7), OPERATIONS), shape


def random_pruning(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return a state dict of a model with weights pruned or moved: all or some layers, by a little or by much."""
    draw, generator = Draw(seed), torch.Generator().manual_seed(seed)
    share, noise = draw.choice((0.05, 0.3, 0.8)), draw.choice((0.0, 0.0, 1e-6, 1e-2, 0.2))
    state = copy.deepcopy(model.state_dict())
    for tensor in state.values():
        if tensor.is_floating_point() and draw.random() < 0.7:
            kept = torch.rand(tensor.shape, generator=generator) >= share
            moved = tensor + noise * torch.rand(tensor.shape, generator=generator)
            tensor.copy_(moved * kept if tensor.ndim > 1 else moved)
    return state
