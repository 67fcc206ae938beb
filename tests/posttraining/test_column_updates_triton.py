"""SparseGPT's columns by the Triton kernel, on a device or in Triton's interpreter, beside plain torch."""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_interpreter, run_in_interpreter

from pomona.patterns import NM, Pattern, Unstructured
from pomona.posttraining import sparsegpt
from pomona.posttraining.sparsegpt import divide_pattern, inverse_factor, prune_columns, prune_group_of_columns

kernel = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(
        not HAS_TRITON or (DEVICE == "cpu" and not INTERPRETED),
        reason="needs Triton, and a CUDA device or its interpreter",
    ),
]


def draw_layer(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and the factor of the second moments of correlated inputs."""
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(4 * columns, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    weight = torch.randn(rows, columns, generator=generator)
    return weight.to(DEVICE), inverse_factor((x.T @ x / len(x)).double(), 0.05).float().to(DEVICE)


class TestKernel:
    pytestmark = kernel

    @pytest.mark.parametrize(("rows", "columns"), [(3, 20), (16, 128), (37, 100), (1, 1)])
    @pytest.mark.parametrize("width", [1, 4, 7, 100])
    def test_a_group_of_columns(self, rows: int, columns: int, width: int) -> None:
        from pomona.posttraining.column_updates_triton import prune_group

        weight, factor = draw_layer(rows, columns)
        ratios = (factor / factor.diagonal().unsqueeze(1)).contiguous()
        kept = torch.rand(rows, columns, device=DEVICE) < 0.5
        block = slice(columns // 5, columns - columns // 7)
        results = []
        for prune in (prune_group_of_columns, prune_group):
            values = weight.clone()
            removed = torch.zeros(rows, block.stop - block.start, device=DEVICE)
            for first in range(block.start, block.stop, width):
                prune(values, kept, ratios, removed, slice(first, min(first + width, block.stop)), block)
            results.append((values, removed))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        outside = torch.ones(columns, dtype=torch.bool, device=DEVICE)
        outside[block] = False
        assert torch.equal(results[1][0][:, outside], weight[:, outside])

    @pytest.mark.parametrize("pattern", [Unstructured(), NM(2, 4)])
    def test_a_whole_layer(self, pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
        from pomona.posttraining.column_updates_triton import prune_group

        weight, factor = draw_layer(40, 76)
        part, width = divide_pattern(pattern, 76, 16)

        def prune() -> tuple[torch.Tensor, torch.Tensor]:
            return prune_columns(weight, factor, lambda score: part.select_masks([score], 0.5)[0], 16, width)

        monkeypatch.setattr(sparsegpt, "choose_group_kernel", lambda *_: prune_group_of_columns)
        expected, mask = prune()
        monkeypatch.setattr(sparsegpt, "choose_group_kernel", lambda *_: prune_group)
        found, kept = prune()
        assert torch.equal(kept, mask)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_interpreter
def test_the_kernel_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "TestKernel")
