"""DPF's bound on the gradient of outputs whose weights are all pruned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pomona as pm
from pomona.errors import PomonaError
from pomona.lab.recipes.recipe import Recipe

BOUND = pm.DPF(feedback=0.5).method


def test_the_bound_by_hand():
    gradient = torch.tensor([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0], [0.3, 0.4]])  # of norms 5, 1, 10 and 0.5
    mask = torch.tensor([[1, 0], [0, 1], [0, 0], [0, 0]]).bool()
    # The first two keep a weight: their norms are 3 on average, so 1.5 is the bound; it scales the third, not the last.
    expected = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.9, 1.2], [0.3, 0.4]])
    torch.testing.assert_close(BOUND.transform_gradient(gradient, mask, 0), expected)
    torch.testing.assert_close(BOUND.transform_gradient(gradient.T.contiguous(), mask.T, 1), expected.T)


@pytest.mark.parametrize("kept", [False, True])
def test_there_is_no_bound_without_kept_or_removed_outputs(kept: bool):
    gradient = torch.randn(4, 3, 2, 2)
    assert torch.equal(BOUND.transform_gradient(gradient, torch.full((4, 3, 2, 2), kept), 0), gradient)
    assert torch.equal(BOUND.transform_gradient(torch.zeros(4, 3), torch.eye(4, 3).bool(), 0), torch.zeros(4, 3))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.floats(0, 3), st.integers(0, 2**31))
def test_gradients_keep_their_direction_and_their_norms_are_bounded(
    rows: int, inner: int, side: int, bound: float, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    shape = rows, inner, side, side
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64) * 10
    mask = torch.rand(shape, generator=generator) < torch.rand(rows, 1, 1, 1, generator=generator) / 2
    given, kept = gradient.flatten(1), mask.flatten(1).any(1)
    left = pm.DPF(feedback=bound).method.transform_gradient(gradient, mask, 0).flatten(1)
    assert torch.equal(left[kept], given[kept])
    for before, after in zip(given[~kept], left[~kept], strict=True):
        longest = bound * given[kept].norm(dim=1).mean() if kept.any() else torch.inf
        expected = before * min(1, longest / before.norm())
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)


class ResidualEnd(nn.Module):
    """A convolution and a norm without ReLU, like the end of a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).flatten(1))


def measure_step(feedback: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return how far a step moves each dense filter, the norm of its gradient, and which filters are kept."""
    torch.manual_seed(0)
    model = ResidualEnd()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = pm.DPF(
        sparsity=0.5, pattern=pm.Filter(of="filters"), schedule="constant", every=5, settle=0, feedback=feedback
    )
    pruner.attach(model, optimizer, total_steps=10)
    (slot,) = pruner.slots
    before, kept = slot.latent.clone(), slot.mask.flatten(1).any(1)
    model(torch.randn(8, 3, 6, 6)).logsumexp(1).sum().backward()
    gradient = model.conv.weight.grad.clone()
    optimizer.step()
    assert torch.equal(model.conv.weight.grad, gradient)  # the user's gradient is not changed
    return (slot.latent - before).flatten(1).norm(dim=1), gradient.flatten(1).norm(dim=1), kept


def test_a_removed_filter_moves_no_further_than_others_on_average():
    moved, gradient, kept = measure_step(None)
    torch.testing.assert_close(moved, gradient)
    assert moved[~kept].mean() > 50 * moved[kept].mean()  # caused by the 1/√ε of the batch norm
    moved, gradient, kept = measure_step(1.0)
    torch.testing.assert_close(moved[kept], gradient[kept])
    torch.testing.assert_close(moved[~kept], gradient[kept].mean().expand(3))


def test_a_bound_below_zero_is_refused():
    with pytest.raises(PomonaError, match=r"0 or more, or None for no bound, got -1"):
        pm.DPF(feedback=-1)


def test_the_default_does_not_change_the_fingerprint_of_a_run():
    plain, bound = (
        Recipe.load({"data": "digits", "model": "mlp", "method": f"dpf(feedback={value})"}) for value in (None, 1.0)
    )
    assert "method.feedback" not in plain._settings()
    assert plain.fingerprint() != bound.fingerprint()
