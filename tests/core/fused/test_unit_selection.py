"""The buffers' selection of weights and of whole units equals that of the allocation, with any selection of scores."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pomona as pm
from pomona import allocation as allocations
from pomona.patterns.selection import select_largest
from pomona.scores import magnitude


class SimpleTopK:
    """A selection with the interface of the kernels' `SegmentedTopK`."""

    def __init__(self, sizes, device) -> None:
        self.sizes = sizes

    def set_counts(self, keep) -> None:
        self.keep = keep

    def select(self, scores, mask) -> None:
        parts = scores.split(self.sizes)
        kept = [select_largest([part], count)[0] for part, count in zip(parts, self.keep, strict=True)]
        mask[: len(scores)].copy_(torch.cat(kept))


PATTERNS = [
    "unstructured",
    "filter(of='filters')",
    "filter(of='filters', norm=1, norms=False)",
    "block(2, 1)",
]


def attach(pattern: str, allocation: str, layout: torch.memory_format) -> pm.Pruner:
    """Attach DPF to a network with layers of several kinds, one of which stores its outputs second."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 6, 2), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(6 * 49, 10), nn.ReLU(), nn.Linear(10, 4)).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pruner = pm.DPF(sparsity=0.5, pattern=pattern, allocation=allocation)
    return pruner.attach(model, optimizer, total_steps=100)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("allocation", ["global", "global(floor=0.1)", "global(floor=0)", "uniform", "erk"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_masks_are_those_of_the_allocation(pattern, allocation, layout):
    pruner = attach(pattern, allocation, layout)
    (buffers,) = pruner.attached_engine().buffers
    buffers.kernels = SimpleNamespace(SegmentedTopK=SimpleTopK)
    buffers.magnitude = torch.empty_like(buffers.latent[: buffers.count])
    resolved = pm.patterns.PATTERNS.resolve(pattern)
    for sparsity in (0.0, 0.3, 0.62, 0.8):
        for slot in pruner.slots:
            slot.latent.copy_(torch.randn(slot.latent.shape))
        assert buffers.set_sparsity(sparsity)
        buffers._select_by_magnitude()
        latents = {slot.name: slot.latent.movedim(slot.target.output_dim, 0) for slot in pruner.slots}
        expected = allocations.select(magnitude(latents), sparsity, resolved, pruner.method.allocation)
        for slot in pruner.slots:
            assert torch.equal(slot.mask.movedim(slot.target.output_dim, 0), expected[slot.name]), (slot.name, sparsity)


def test_units_of_several_sizes_are_left_to_the_method():
    pruner = attach("filter", "global", torch.contiguous_format)  # counted in weights, of which each filter has its own
    (buffers,) = pruner.attached_engine().buffers
    buffers.kernels = SimpleNamespace(SegmentedTopK=SimpleTopK)
    assert not buffers.set_sparsity(0.5)
