"""SparseGPT beside the algorithm written down naively, and beside exact least squares."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import pomona as pm
from pomona.errors import PomonaError
from pomona.posttraining.sparsegpt import divide_pattern, inverse_factor, prune_columns


def naive_sparsegpt(weight: np.ndarray, hessian: np.ndarray, sparsity: float, block: int) -> np.ndarray:
    """Prune column after column; the inverse Hessian of the columns that are left is computed anew for each."""
    weight, columns = weight.astype(np.float64).copy(), weight.shape[1]
    keep = np.ones(weight.shape, bool)
    inverse_diagonals = [np.linalg.inv(hessian[j:, j:])[0, 0] for j in range(columns)]
    for j in range(columns):
        if j % block == 0:
            group = slice(j, min(j + block, columns))
            score = weight[:, group] ** 2 / np.array(inverse_diagonals[group])
            count = round(sparsity * score.size)
            smallest = np.argsort(score.ravel(), kind="stable")[:count]
            chosen = np.ones(score.size, bool)
            chosen[smallest] = False
            keep[:, group] = chosen.reshape(score.shape)
        inverse = np.linalg.inv(hessian[j:, j:])
        removed = np.where(keep[:, j], 0.0, weight[:, j])
        weight[:, j:] -= np.outer(removed / inverse[0, 0], inverse[0])
    return weight * keep


def layer_error(weight, pruned, moments) -> float:
    """Return the squared change of a layer's outputs, summed over the calibration data."""
    difference = torch.as_tensor(pruned) - torch.as_tensor(weight)
    return float((difference @ torch.as_tensor(moments) * difference).sum())


def draw_layer(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and the second moments of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = 8 + seed % 9, 16 + 5 * (seed % 7)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    x = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64) @ mixing
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64), x.T @ x / len(x)


@pytest.mark.parametrize("seed", range(20))
def test_the_result_is_that_of_the_naive_algorithm(seed):
    weight, moments = draw_layer(seed)
    block, sparsity = (8, 16, 128)[seed % 3], (0.5, 0.7, 0.25)[seed % 3]
    factor = inverse_factor(moments, 0.01)
    pattern, width = divide_pattern(pm.Unstructured(), weight.shape[1], block)
    pruned, kept = prune_columns(weight, factor, lambda s: pattern.select_masks([s], sparsity)[0], width, width)
    hessian = moments + 0.01 * moments.diagonal().mean() * torch.eye(len(moments), dtype=torch.float64)
    expected = naive_sparsegpt(weight.numpy(), hessian.numpy(), sparsity, block)
    assert torch.equal(pruned == 0, ~kept)
    torch.testing.assert_close(pruned, torch.as_tensor(expected), rtol=1e-7, atol=1e-9)
    error = layer_error(weight, pruned, moments)
    assert error <= layer_error(weight, expected, moments) * (1 + 1e-9)
    assert error < layer_error(weight, weight * kept, moments)  # the updates make up for some of what was removed


def test_updates_in_blocks_change_nothing_but_rounding():
    weight, moments = draw_layer(3)
    factor = inverse_factor(moments, 0.01)
    select = pm.NM(2, 4).select_masks
    results = [
        prune_columns(weight[:, :28], factor[:28, :28], lambda s: select([s], 0.5)[0], block, 4)[0]
        for block in (4, 12, 28)
    ]
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


def test_the_last_columns_reach_the_least_squares_of_their_row():
    """With one pruned column in front, the update is the exact least-squares solution."""
    weight, moments = draw_layer(5)
    factor = inverse_factor(moments, 1e-12)
    mask = torch.ones_like(weight, dtype=torch.bool)
    mask[:, 0] = False
    pruned, _ = prune_columns(weight, factor, lambda score: mask, weight.shape[1], weight.shape[1])
    # min over v of (w − (0, v)) H (w − (0, v))ᵀ: v = w₁ + w₀ H₀₁ H₁₁⁻¹
    exact = weight[:, 1:] + weight[:, :1] * torch.linalg.solve(moments[1:, 1:], moments[1:, 0])
    torch.testing.assert_close(pruned[:, 1:], exact, rtol=1e-5, atol=1e-6)


PATTERNS = [
    "unstructured",
    "2:4",
    "balanced(8)",
    "balanced(blocks=4)",
    "block(2, 4)",
    "block(None, 4)",
    "block(2, None)",
    "kernel",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_pattern_keeps_its_structure_and_its_count(pattern):
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 8, 4, padding=1), nn.ReLU(), nn.Conv2d(8, 8, (2, 4))
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.LazyLinear(4))
    data = [torch.randn(4, 3, 7, 7)]
    model(data[0])
    report = pm.SparseGPT(0.5, pattern=pattern).prune(model, data)
    resolved = pm.patterns.PATTERNS.resolve(pattern)
    assert set(report.masks) == {"0.weight", "2.weight"}
    for name, mask in report.masks.items():
        weight = model.get_parameter(name)
        assert bool((weight[~mask] == 0).all())
        expected = resolved.select_masks([torch.rand(mask.shape)], 0.5)[0].sum()
        assert int(mask.sum()) == int(expected)
        assert torch.equal(resolved.select_masks([mask.float()], 0.5)[0], mask)  # the mask is one of the pattern's


def test_an_input_that_is_always_zero_does_no_harm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(64, 12)
    x[:, 3] = 0
    before = model(x).detach()
    pm.SparseGPT(0.5, include="0").prune(model, [x])
    assert bool(torch.isfinite(model(x)).all())
    assert float((model(x).detach() - before).norm() / before.norm()) < 0.9


def test_weights_of_an_input_that_is_always_zero_are_pruned_first():
    """Inputs of any scale: what a weight costs is relative to that of the others."""
    for scale in (1e-3, 1.0, 1e3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2))
        x = scale * torch.randn(64, 8)
        x[:, [2, 5]] = 0
        report = pm.SparseGPT(0.25, include="0").prune(model, [x])
        assert torch.equal(report.masks["0.weight"][0], torch.tensor([1, 1, 0, 1, 1, 0, 1, 1], dtype=torch.bool))


def test_inputs_that_are_all_zero_lead_to_a_plain_magnitude_mask():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2))
    weight = model[0].weight.detach().clone()
    pm.SparseGPT(0.5, include="0").prune(model, [torch.zeros(3, 8)])
    kept = pm.Unstructured().select_masks([weight.abs()], 0.5)[0]
    torch.testing.assert_close(model[0].weight.detach(), weight * kept)


def test_what_cannot_work_is_refused():
    with pytest.raises(PomonaError, match="prunes one layer at a time, and a common threshold"):
        pm.SparseGPT(0.5, allocation="global")
    with pytest.raises(PomonaError, match="removes outputs with their biases"):
        pm.SparseGPT(0.5, pattern="filter")
    with pytest.raises(PomonaError, match="block counts columns and must be a whole number ≥ 1, got 0"):
        pm.SparseGPT(0.5, block=0)
    with pytest.raises(PomonaError, match="damping must be a positive finite number, got 0"):
        pm.SparseGPT(0.5, damping=0.0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(PomonaError, match="infinite or NaN inputs"):
        pm.SparseGPT(0.5).prune(model, [torch.full((2, 4), torch.inf)])
