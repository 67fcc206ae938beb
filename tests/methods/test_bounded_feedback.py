"""The bound on the gradient of outputs that have almost died, which soft methods have."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pomona as pm
from pomona.errors import PomonaError
from pomona.lab.recipes.recipe import Recipe
from pomona.methods import METHODS


def bound(gradient: Tensor, projected: Tensor, output_dim: int = 0, feedback: float = 0.5) -> Tensor:
    """Return the bounded gradient; the mask, which the bound does not read, is empty."""
    return pm.DPF(feedback=feedback).method.transform_gradient(
        gradient, projected, torch.zeros_like(projected, dtype=torch.bool), output_dim
    )


def test_the_bound_by_hand():
    gradient = torch.tensor([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0], [0.3, 0.4]])  # of norms 5, 1, 10 and 0.5
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.04]])  # of norms 1, 1, 0 and 0.04
    # The last two are weak. The lower median of the others is 1, so 0.5 is the bound, which is the norm of the last.
    expected = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.3, 0.4], [0.3, 0.4]])
    torch.testing.assert_close(bound(gradient, weights), expected)
    torch.testing.assert_close(bound(gradient.T.contiguous(), weights.T, 1), expected.T)


def test_an_output_that_reads_only_dead_inputs_is_bounded_by_hand():
    weights, gradient = torch.ones(4, 1), torch.tensor([[2.0], [-1.0], [10.1], [-9.9]])
    # The median is 2, and none is ten times as long.
    assert torch.equal(bound(gradient, weights), gradient)
    # The median is 1, and the output without a gradient does not count.
    torch.testing.assert_close(
        bound(torch.tensor([[1.0], [-1.0], [300.0], [9.9], [0.0]]), torch.ones(5, 1)),
        torch.tensor([[1.0], [-1.0], [10.0], [9.9], [0.0]]),
    )


def test_outputs_without_a_gradient_do_not_count_by_hand():
    gradient = torch.tensor([[0.0], [0.0], [0.0], [2.0], [30.0]])
    torch.testing.assert_close(bound(gradient, torch.ones(5, 1)), torch.tensor([[0.0], [0.0], [0.0], [2.0], [20.0]]))
    # Only the weak output has a gradient, so that there is nothing to compare it with.
    assert torch.equal(bound(gradient[:, :1] * 0 + torch.eye(5)[:, :1], 1 - torch.eye(5)[:, :1]), torch.eye(5)[:, :1])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_there_is_no_bound_where_all_outputs_are_alike(value: float):
    gradient, weights = torch.randn(4, 3, 2, 2).sign(), torch.full((4, 3, 2, 2), value)
    assert torch.equal(bound(gradient, weights), gradient)
    assert torch.equal(bound(torch.zeros(4, 3), torch.eye(4, 3)), torch.zeros(4, 3))


def test_a_bias_is_not_bounded():
    gradient = torch.tensor([1.0, 100.0, 1.0])
    assert torch.equal(bound(gradient, torch.tensor([1.0, 0.0, 1.0])), gradient)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.floats(0, 3), st.integers(0, 2**31))
def test_gradients_keep_their_direction_and_weak_ones_are_bounded(rows: int, inner: int, feedback: float, seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        scales = 10 ** torch.randn(rows, 1, 1, generator=generator, dtype=torch.float64)
        return torch.randn(rows, inner, 2, generator=generator, dtype=torch.float64) * scales

    gradient, weights = draw(), draw() * (torch.rand(rows, 1, 1, generator=generator) < 0.7)
    bounded = bound(gradient, weights, feedback=feedback)
    norms, lengths = [w.norm().item() for w in weights], [g.norm().item() for g in gradient]
    weak = [norm < 0.1 * statistics.fmean(norms) for norm in norms]
    median = statistics.median_low(length for length, is_weak in zip(lengths, weak, strict=True) if not is_weak)
    for before, after, length, is_weak in zip(gradient, bounded, lengths, weak, strict=True):
        factor = min(1, (feedback if is_weak else 10) * median / length)
        torch.testing.assert_close(after, before * factor, rtol=1e-5, atol=1e-6)


class ResidualEnd(nn.Module):
    """A convolution and a norm without ReLU, like the end of a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).flatten(1))


def measure_step(
    feedback: float | None, dead_input: bool = False, shrink: float = 1.0, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how far a step moves each dense filter, the norm of its gradient, and which filters are not zero.

    With `dead_input`, the first filter reads only a channel that is zero in all images. The first filter's dense
    weights are multiplied by `shrink` after the mask was chosen.
    """
    torch.manual_seed(0)
    model = ResidualEnd()
    if dead_input:
        model.conv.weight.data[0, 1:] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = pm.DPF(schedule="constant", every=5, settle=0, feedback=feedback, **options)
    pruner.attach(model, optimizer, total_steps=10)
    (slot,) = pruner.slots
    slot.latent[0] *= shrink
    with torch.no_grad():
        slot.project()
    before, kept = slot.latent.clone(), (model.conv.weight.detach() != 0).flatten(1).any(1)
    images = torch.randn(8, 3, 6, 6)
    if dead_input:
        images[:, 0] = 0
    model(images).logsumexp(1).sum().backward()
    gradient = model.conv.weight.grad.clone()
    optimizer.step()
    assert torch.equal(model.conv.weight.grad, gradient)  # the user's gradient is not changed
    return (slot.latent - before).flatten(1).norm(dim=1), gradient.flatten(1).norm(dim=1), kept


FILTERS = {"sparsity": 0.5, "pattern": "filter(of='filters')"}


def test_a_removed_filter_moves_no_further_than_others():
    moved, gradient, kept = measure_step(None, **FILTERS)
    torch.testing.assert_close(moved, gradient)
    assert moved[~kept].mean() > 50 * moved[kept].mean()  # caused by the 1/√ε of the batch norm
    moved, gradient, kept = measure_step(1.0, **FILTERS)
    torch.testing.assert_close(moved[kept], gradient[kept])
    torch.testing.assert_close(moved[~kept], gradient[kept].median().expand(3))


def test_a_filter_that_soft_thresholds_made_zero_is_bounded():
    options = {"sparsity": 0.5, "compressor": "soft", "shrink": 1e-3}
    moved, _, kept = measure_step(None, **options)
    assert kept.tolist() == [False, *[True] * 5]  # the mask keeps weights of the first, all below the threshold
    assert moved[0] > 50 * moved[1:].median()
    moved, gradient, _ = measure_step(1.0, **options)
    torch.testing.assert_close(moved[0], gradient[1:].median())


def test_a_filter_that_reads_a_dead_channel_is_bounded():
    options = {"sparsity": 0.0, "compressor": "none", "dead_input": True}
    moved, gradient, _ = measure_step(None, **options)
    assert moved[0] == gradient[0]
    bounded, gradient, kept = measure_step(1.0, **options)
    assert kept.all()
    torch.testing.assert_close(bounded[1:], gradient[1:])
    torch.testing.assert_close(bounded[0], 10 * gradient.median().minimum(gradient[0] / 10))


@pytest.mark.parametrize("name", ["dpf", "st3", "feather"])
def test_soft_methods_have_the_bound_by_default(name: str):
    spec = METHODS[name]
    assert spec().feedback == 1
    assert spec().transforms_gradient
    assert spec(feedback=math.inf) == spec(feedback=None)
    gradient, weights = torch.tensor([[1.0, 2.0], [300.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    bounded = spec().transform_gradient(gradient, weights, weights != 0, 0)
    torch.testing.assert_close(bounded, torch.tensor([[1.0, 2.0], [math.sqrt(5), 0.0]]))
    assert all(METHODS[other].weights != "soft" for other in METHODS if other not in ("dpf", "st3", "feather"))


def test_feather_scales_the_bounded_gradient_of_pruned_weights():
    gradient, weights = torch.tensor([[3.0, 4.0], [300.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    method = pm.Feather(sparsity=0.9, theta=0.5).method
    expected = torch.tensor([[3.0, 2.0], [2.5, 0.0]])
    torch.testing.assert_close(method.transform_gradient(gradient, weights, weights != 0, 0), expected)
    free = pm.Feather(sparsity=0.9, theta=0.5, feedback=None).method
    assert free.transform_gradient(gradient, weights, weights != 0, 0).tolist() == [[3.0, 2.0], [150.0, 0.0]]


def test_a_bound_below_zero_is_refused():
    with pytest.raises(PomonaError, match=r"0 or more, or None for no bound, got -1"):
        pm.DPF(feedback=-1)


def test_no_bound_does_not_change_the_fingerprint_of_a_run():
    plain, unbounded, bounded = (
        Recipe.load({"data": "digits", "model": "mlp", "method": f"dpf(feedback={value})"})
        for value in (None, "inf", 1.0)
    )
    assert "method.feedback" not in plain.settings()
    assert plain.fingerprint() == unbounded.fingerprint() != bounded.fingerprint()
