"""The buffers' selection of weights and of whole units equals that of the allocation, with any selection of scores."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import pomona as pm
from pomona import allocation as allocations
from pomona.core.fused.flat_buffers import FlatBuffers
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


KERNELS = SimpleNamespace(SegmentedTopK=SimpleTopK, run_copy=lambda *arguments: None)


def attach(method: type, pattern: str, allocation: str, layout=torch.contiguous_format) -> pm.Pruner:
    """Attach a method to a network with layers of several kinds, one of which stores its outputs second."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, bias=False), nn.ConvTranspose2d(8, 6, 2, bias=False), nn.ReLU(), nn.Flatten()
    head = nn.Linear(6 * 49, 10, bias=False), nn.ReLU(), nn.Linear(10, 4, bias=False)
    model = nn.Sequential(*layers, *head).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return method(sparsity=0.5, pattern=pattern, allocation=allocation).attach(model, optimizer, total_steps=100)


def buffers_of(pruner: pm.Pruner) -> FlatBuffers:
    """Return the pruner's buffers with a selection of scores that runs without a GPU."""
    (buffers,) = pruner.attached_engine().buffers
    buffers.kernels = KERNELS
    buffers.magnitude = torch.empty_like(buffers.latent[: buffers.count])
    return buffers


def selected_scores(pruner: pm.Pruner, operation: str) -> dict[str, Tensor]:
    """Return the scores that an operation selects by, with outputs in front."""
    latents = {slot.name: slot.latent.movedim(slot.target.output_dim, 0) for slot in pruner.slots}
    if operation == "select_by_magnitude":
        return magnitude(latents)
    shift = torch.cat([latent.flatten() for latent in latents.values()]).amin()  # norms need scores of one sign
    return {name: latent - shift if pruner.method.pattern.ranks_units else latent for name, latent in latents.items()}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("allocation", ["global", "global(floor=0.1)", "global(floor=0)", "uniform", "erk"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("method", "operation"), [(pm.DPF, "select_by_magnitude"), (pm.EdgePopup, "store_select_project")]
)
def test_the_masks_are_those_of_the_allocation(method, operation, pattern, allocation, layout):
    pruner = attach(method, pattern, allocation, layout)
    buffers = buffers_of(pruner)
    resolved = pm.patterns.PATTERNS.resolve(pattern)
    for sparsity in (0.0, 0.3, 0.62, 0.8):
        for slot in pruner.slots:
            slot.latent.copy_(torch.randn(slot.latent.shape))
        assert buffers.set_sparsity(sparsity)
        buffers._run_kernels(operation)
        scores = selected_scores(pruner, operation)
        expected = allocations.select(scores, sparsity, resolved, pruner.method.allocation)
        for slot in pruner.slots:
            assert torch.equal(slot.mask.movedim(slot.target.output_dim, 0), expected[slot.name]), (slot.name, sparsity)


def test_units_of_several_sizes_are_left_to_the_method():
    pruner = attach(pm.DPF, "filter", "global")  # counted in weights, of which each filter has its own number
    assert not buffers_of(pruner).set_sparsity(0.5)
