"""The index mechanism against an enumeration of all index sets, and the sampler against both."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from pomona.errors import PomonaError
from pomona.privacy import IndexMechanism, Source, index_mechanism
from pomona.privacy.index_mechanism import draw_swap_counts, invert_exactly, swap_count_cdf, swap_entries

SMALL = [(d, m) for d in range(1, 9) for m in range(d + 1)]


def index_sets(d: int, m: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(d), m))


def enumerate_probabilities(theta: float, d: int, m: int) -> np.ndarray:
    """Return P(I | I₀) for all pairs of index sets, by the definition."""
    every = np.array([[j in kept for j in range(d)] for kept in index_sets(d, m)])
    distance = (every[:, None] != every[None]).sum(-1)
    weights = np.exp(-theta * distance)
    return weights / weights.sum(0)


@pytest.mark.parametrize(("d", "m"), SMALL)
def test_probability_of_every_index_set_and_the_cost_as_largest_log_ratio(d, m):
    theta, p = 0.4, enumerate_probabilities(0.4, d, m)
    start, levels = swap_count_cdf(theta, d, m)
    swaps = np.diff(np.concatenate([[0.0], levels, [1.0]]))
    for at, row in enumerate(p):
        lost = [m - len(set(index_sets(d, m)[at]) & set(kept)) for kept in index_sets(d, m)]
        ours = [swaps[i - start] / (math.comb(m, i) * math.comb(d - m, i)) for i in lost]
        assert row == pytest.approx(ours)
    ratio = np.log(p[:, :, None] / p[:, None]).max()
    if m:
        assert IndexMechanism(m, theta=theta).cost(d) == pytest.approx(ratio)
    assert ratio == pytest.approx(2 * theta * min(m, d - m))


def count_index_sets(masks: torch.Tensor) -> np.ndarray:
    """Return how often each index set was drawn; a set is numbered by the binary number of its mask."""
    d = masks.shape[1]
    return np.bincount((masks.long() << torch.arange(d)).sum(1).numpy(), minlength=2**d)


def expected_probabilities(gradient: torch.Tensor, theta: float, m: int) -> np.ndarray:
    """Return the probability of each index set, ordered as `count_index_sets` orders them."""
    d = len(gradient)
    top = tuple(sorted(gradient.abs().argsort(descending=True)[:m].tolist()))
    p = np.zeros(2**d)
    every = index_sets(d, m)
    for kept, probability in zip(every, enumerate_probabilities(theta, d, m)[:, every.index(top)], strict=True):
        p[sum(1 << j for j in kept)] = probability
    return p


def chi_square_p_value(counts: np.ndarray, p: np.ndarray) -> float:
    assert counts[p == 0].sum() == 0
    return float(chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue)


def test_a_million_draws_follow_the_distribution():
    gradient = torch.tensor([0.3, -2.0, 0.1, 1.0, -0.2, 0.7])
    mechanism = IndexMechanism(2, theta=0.6, group=6)
    masks = mechanism.sample(gradient.repeat(1_000_000), Source(seed=0)).view(-1, 6)
    assert chi_square_p_value(count_index_sets(masks), expected_probabilities(gradient, 0.6, 2)) > 1e-3


@pytest.mark.parametrize(("d", "m"), [(d, m) for d, m in SMALL if 0 < m < d])
def test_draws_follow_the_distribution_for_every_small_size(d, m):
    gradient = torch.randn(d, generator=torch.Generator().manual_seed(d * m))
    masks = IndexMechanism(m, theta=0.5, group=d).sample(gradient.repeat(20_000), Source(seed=7)).view(-1, d)
    assert chi_square_p_value(count_index_sets(masks), expected_probabilities(gradient, 0.5, m)) > 1e-4


@pytest.mark.parametrize(("theta", "m"), [(0.5, 3), (0.0, 5)])
def test_draws_without_groups_follow_the_distribution(theta, m):
    gradient, source = torch.tensor([1.0, 5.0, -3.0, 0.5, 4.0, -0.1]), Source(seed=1)
    mechanism = IndexMechanism(m, theta=theta)
    masks = torch.stack([mechanism.sample(gradient, source) for _ in range(3_000)])
    assert chi_square_p_value(count_index_sets(masks), expected_probabilities(gradient, theta, m)) > 1e-3


def test_secure_draws_follow_the_distribution():
    gradient = torch.tensor([1.0, 5.0, -3.0, 0.5])
    masks = IndexMechanism(2, theta=0.5, group=4).sample(gradient.repeat(50_000), Source()).view(-1, 4)
    assert chi_square_p_value(count_index_sets(masks), expected_probabilities(gradient, 0.5, 2)) > 1e-6


@settings(max_examples=60, deadline=None)
@given(
    d=st.integers(1, 900),
    keep=st.one_of(st.floats(0.01, 1.0), st.integers(1, 20)),
    group=st.one_of(st.none(), st.integers(20, 300)),
    theta=st.one_of(st.sampled_from([0.0, math.inf]), st.floats(0.0, 5.0)),
)
def test_kept_count_is_exact_in_every_group(d, keep, group, theta):
    mechanism = IndexMechanism(keep, theta=theta, group=group)
    if isinstance(keep, int) and keep > min(group or d, d):
        with pytest.raises(PomonaError, match="is more than"):
            mechanism.cost(d)
        return
    gradient = torch.randn(d, generator=torch.Generator().manual_seed(d))
    mask = mechanism.sample(gradient, Source(seed=3))
    assert mask.shape == gradient.shape
    sizes, kept = mechanism.groups(d)
    assert sum(sizes) == d
    assert [int(part.sum()) for part in mask.split(sizes)] == kept
    if theta == math.inf:
        for part, scores, m in zip(mask.split(sizes), gradient.abs().split(sizes), kept, strict=True):
            assert sorted(scores[part]) == sorted(scores.sort(descending=True).values[:m])


def test_cost_of_groups_is_the_sum_of_their_sensitivities():
    # 600 entries: two groups of 256 that keep 26, and one of 88 that keeps 9.
    mechanism = IndexMechanism(0.1, theta=0.5, group=256)
    assert mechanism.groups(600) == ([256, 256, 88], [26, 26, 9])
    assert mechanism.cost(600) == pytest.approx(2 * 0.5 * (26 + 26 + 9))
    assert IndexMechanism(0.1, epsilon=61.0, group=256).theta_for(600) == pytest.approx(0.5)
    assert IndexMechanism(0.9, theta=0.5).cost(100) == pytest.approx(10)  # min(m, d − m)


def test_missed_share_of_the_top_k_is_the_predicted_one():
    # At θ = 1 two thirds of the top-k of a group of 256 are lost, at θ = 2 one third.
    gradient = torch.randn(256 * 400, generator=torch.Generator().manual_seed(0))
    top = IndexMechanism(25, theta=math.inf, group=256).sample(gradient)
    for theta, share in ((0.5, 0.80), (1.0, 0.64), (2.0, 0.32), (3.0, 0.13)):
        mechanism = IndexMechanism(25, theta=theta, group=256)
        assert mechanism.lost(len(gradient)) == pytest.approx(share, abs=0.006)
        mask = mechanism.sample(gradient, Source(seed=4))
        assert 1 - float((mask & top).sum() / top.sum()) == pytest.approx(mechanism.lost(len(gradient)), abs=0.01)
    assert IndexMechanism(0.1, theta=0.0).lost(1000) == pytest.approx(0.9)


def test_mean_swap_count_of_a_long_vector_is_the_predicted_one():
    gradient, source = torch.randn(20_000, generator=torch.Generator().manual_seed(0)), Source(seed=0)
    mechanism = IndexMechanism(0.05, theta=1.2)
    top = IndexMechanism(0.05, theta=math.inf).sample(gradient)
    lost = [1 - float((mechanism.sample(gradient, source) & top).sum() / 1000) for _ in range(50)]
    assert np.mean(lost) == pytest.approx(mechanism.lost(20_000), abs=0.005)


def test_mask_has_the_gradient_shape_and_depends_on_the_seed():
    gradient = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    mechanism = IndexMechanism(0.3, theta=0.2)
    one, two, other = (mechanism.sample(gradient, Source(seed=s)) for s in (1, 1, 2))
    assert one.shape == gradient.shape
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.0, "theta": 1.0}, "a share in"),
        ({"keep": 0, "theta": 1.0}, "a count from 1"),
        ({"keep": 1.5, "theta": 1.0}, "a share in"),
        ({"keep": 0.5}, "takes theta or epsilon"),
        ({"keep": 0.5, "theta": 1.0, "epsilon": 1.0}, "exactly one of the two"),
        ({"keep": 0.5, "theta": -1.0}, "must not be negative"),
        ({"keep": 0.5, "epsilon": -1.0}, "must not be negative"),
        ({"keep": 0.5, "theta": 1.0, "group": 0}, "1 entry or more"),
    ],
)
def test_bad_mechanisms_are_refused(options, message):
    with pytest.raises(PomonaError, match=message):
        IndexMechanism(**options)


def test_empty_gradient_is_refused():
    with pytest.raises(PomonaError, match="the gradient is empty"):
        IndexMechanism(0.5, theta=1.0).sample(torch.zeros(0))


# ---- rounding errors


def test_exact_inversion_is_that_of_the_definition():
    # θ = log(2) / 2, so e^{−2θ} = ½: of 5 entries 2 are kept, and the weights are 1, 2·3/2 = 3 and 1·3/4.
    theta, total = math.log(2) / 2, Fraction(19, 4)
    for count, edge in ((0, Fraction(1)), (1, Fraction(4)), (2, total)):
        assert invert_exactly(theta, 5, 2, (edge - Fraction(1, 10**12)) / total) == count
    assert invert_exactly(theta, 5, 2, Fraction(0)) == 0
    assert invert_exactly(theta, 5, 2, (1 + Fraction(1, 10**12)) / total) == 1


@pytest.mark.parametrize(("theta", "size", "kept"), [(0.5, 256, 26), (0.001, 40, 30), (3.0, 2000, 200), (0.0, 90, 45)])
def test_counts_that_are_all_drawn_exactly_are_the_same(monkeypatch, theta, size, kept):
    before = draw_swap_counts(theta, size, kept, 300, Source(seed=1))
    asked = []
    integer = Source.integer
    monkeypatch.setattr(Source, "integer", lambda self, bits: asked.append(bits) or integer(self, bits))
    monkeypatch.setattr(index_mechanism, "CDF_ERROR", 1.0)
    assert torch.equal(draw_swap_counts(theta, size, kept, 300, Source(seed=1)), before)
    assert len(asked) == 300


def test_keys_that_tie_at_the_ends_of_the_mask_are_drawn_again():
    class Tied(Source):
        """A source whose first keys are all equal."""

        def bits(self, *shape, **options):
            keys = super().bits(*shape, **options)
            return keys if self.calls[index_mechanism.Purpose.SWAP_KEYS] > 1 else keys * 0

    source, top = Tied(seed=1), torch.tensor([[True, True, False, False, False]])
    mask = swap_entries(top, 2, torch.tensor([1]), source)
    assert int(mask.sum()) == 2
    assert source.calls[index_mechanism.Purpose.SWAP_KEYS] == 2


@pytest.mark.gpu
def test_draws_on_a_gpu_follow_the_distribution():
    gradient = torch.tensor([0.3, -2.0, 0.1, 1.0, -0.2, 0.7], device="cuda")
    mechanism = IndexMechanism(2, theta=0.6, group=6)
    masks = mechanism.sample(gradient.repeat(1_000_000), Source("cuda", seed=0)).view(-1, 6)
    assert chi_square_p_value(count_index_sets(masks.cpu()), expected_probabilities(gradient.cpu(), 0.6, 2)) > 1e-3
    whole = torch.randn(1_000_000, device="cuda")
    mask = IndexMechanism(100_000, theta=1.0).sample(whole, Source("cuda", seed=0))
    top = IndexMechanism(100_000, theta=math.inf).sample(whole)
    assert int(mask.sum()) == 100_000
    assert 1 - float((mask & top).sum()) / 1e5 == pytest.approx(
        IndexMechanism(100_000, theta=1.0).lost(10**6), abs=0.01
    )
