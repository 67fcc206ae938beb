"""The index mechanism against every index set there is, and its sampler against both."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from pomona.errors import PomonaError
from pomona.privacy import IndexMechanism, Source
from pomona.privacy.index_mechanism import cumulative

SMALL = [(d, m) for d in range(1, 9) for m in range(d + 1)]


def sets(d: int, m: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(d), m))


def probabilities(theta: float, d: int, m: int) -> np.ndarray:
    """P(I | I₀) for all pairs, straight from the definition."""
    every = np.array([[j in kept for j in range(d)] for kept in sets(d, m)])
    distance = (every[:, None] != every[None]).sum(-1)
    weights = np.exp(-theta * distance)
    return weights / weights.sum(0)


@pytest.mark.parametrize(("d", "m"), SMALL)
def test_every_index_set_has_its_probability_and_the_cost_is_the_largest_log_ratio(d, m):
    theta, p = 0.4, probabilities(0.4, d, m)
    start, levels = cumulative(theta, d, m)
    swaps = np.diff(np.concatenate([[0.0], levels, [1.0]]))
    for at, row in enumerate(p):
        lost = [m - len(set(sets(d, m)[at]) & set(kept)) for kept in sets(d, m)]
        ours = [swaps[i - start] / (math.comb(m, i) * math.comb(d - m, i)) for i in lost]
        assert row == pytest.approx(ours)
    ratio = np.log(p[:, :, None] / p[:, None]).max()
    if m:
        assert IndexMechanism(m, theta=theta).cost(d) == pytest.approx(ratio)
    assert ratio == pytest.approx(2 * theta * min(m, d - m))


def tally(masks: torch.Tensor) -> np.ndarray:
    """How often each set was drawn, by the number whose bits it is."""
    d = masks.shape[1]
    return np.bincount((masks.long() << torch.arange(d)).sum(1).numpy(), minlength=2**d)


def expected(gradient: torch.Tensor, theta: float, m: int) -> np.ndarray:
    d = len(gradient)
    top = tuple(sorted(gradient.abs().argsort(descending=True)[:m].tolist()))
    p = np.zeros(2**d)
    for kept, chance in zip(sets(d, m), probabilities(theta, d, m)[:, sets(d, m).index(top)], strict=True):
        p[sum(1 << j for j in kept)] = chance
    return p


def refute(counts: np.ndarray, p: np.ndarray) -> float:
    assert counts[p == 0].sum() == 0
    return float(chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue)


def test_a_million_draws_fit_the_distribution():
    gradient = torch.tensor([0.3, -2.0, 0.1, 1.0, -0.2, 0.7])
    mechanism = IndexMechanism(2, theta=0.6, group=6)
    masks = mechanism.sample(gradient.repeat(1_000_000), Source(seed=0)).view(-1, 6)
    assert refute(tally(masks), expected(gradient, 0.6, 2)) > 1e-3


@pytest.mark.parametrize(("d", "m"), [(d, m) for d, m in SMALL if 0 < m < d])
def test_the_sampler_fits_for_every_small_size(d, m):
    gradient = torch.randn(d, generator=torch.Generator().manual_seed(d * m))
    masks = IndexMechanism(m, theta=0.5, group=d).sample(gradient.repeat(20_000), Source(seed=7)).view(-1, d)
    assert refute(tally(masks), expected(gradient, 0.5, m)) > 1e-4


@pytest.mark.parametrize(("theta", "m"), [(0.5, 3), (0.0, 5)])
def test_one_long_vector_is_drawn_from_the_same_distribution(theta, m):
    gradient, source = torch.tensor([1.0, 5.0, -3.0, 0.5, 4.0, -0.1]), Source(seed=1)
    mechanism = IndexMechanism(m, theta=theta)
    masks = torch.stack([mechanism.sample(gradient, source) for _ in range(3_000)])
    assert refute(tally(masks), expected(gradient, theta, m)) > 1e-3


def test_secure_draws_fit_too():
    gradient = torch.tensor([1.0, 5.0, -3.0, 0.5])
    masks = IndexMechanism(2, theta=0.5, group=4).sample(gradient.repeat(50_000), Source(secure=True)).view(-1, 4)
    assert refute(tally(masks), expected(gradient, 0.5, 2)) > 1e-6


@settings(max_examples=60, deadline=None)
@given(
    d=st.integers(1, 900),
    keep=st.one_of(st.floats(0.01, 1.0), st.integers(1, 20)),
    group=st.one_of(st.none(), st.integers(20, 300)),
    theta=st.one_of(st.sampled_from([0.0, math.inf]), st.floats(0.0, 5.0)),
)
def test_the_count_is_exact_in_every_group(d, keep, group, theta):
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


def test_groups_cost_what_their_sensitivities_add_up_to():
    # 600 entries: two groups of 256 that keep 26, and one of 88 that keeps 9.
    mechanism = IndexMechanism(0.1, theta=0.5, group=256)
    assert mechanism.groups(600) == ([256, 256, 88], [26, 26, 9])
    assert mechanism.cost(600) == pytest.approx(2 * 0.5 * (26 + 26 + 9))
    assert IndexMechanism(0.1, epsilon=61.0, group=256).theta_of(600) == pytest.approx(0.5)
    assert IndexMechanism(0.9, theta=0.5).cost(100) == pytest.approx(10)  # min(m, d − m)


def test_what_is_lost_is_what_was_promised():
    # The source document's vacuity: at θ = 1 two thirds of a group of 256 are lost, at θ = 2 a third.
    gradient = torch.randn(256 * 400, generator=torch.Generator().manual_seed(0))
    top = IndexMechanism(25, theta=math.inf, group=256).sample(gradient)
    for theta, share in ((0.5, 0.80), (1.0, 0.64), (2.0, 0.32), (3.0, 0.13)):
        mechanism = IndexMechanism(25, theta=theta, group=256)
        assert mechanism.lost(len(gradient)) == pytest.approx(share, abs=0.006)
        mask = mechanism.sample(gradient, Source(seed=4))
        assert 1 - float((mask & top).sum() / top.sum()) == pytest.approx(mechanism.lost(len(gradient)), abs=0.01)
    assert IndexMechanism(0.1, theta=0.0).lost(1000) == pytest.approx(0.9)


def test_the_swaps_of_a_long_vector_follow_their_mean():
    gradient, source = torch.randn(20_000, generator=torch.Generator().manual_seed(0)), Source(seed=0)
    mechanism = IndexMechanism(0.05, theta=1.2)
    top = IndexMechanism(0.05, theta=math.inf).sample(gradient)
    lost = [1 - float((mechanism.sample(gradient, source) & top).sum() / 1000) for _ in range(50)]
    assert np.mean(lost) == pytest.approx(mechanism.lost(20_000), abs=0.005)


def test_shapes_and_seeds_are_kept():
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
        ({"keep": 0.5}, "theta or by epsilon"),
        ({"keep": 0.5, "theta": 1.0, "epsilon": 1.0}, "one of the two"),
        ({"keep": 0.5, "theta": -1.0}, "must not be negative"),
        ({"keep": 0.5, "epsilon": -1.0}, "must not be negative"),
        ({"keep": 0.5, "theta": 1.0, "group": 0}, "1 entry or more"),
    ],
)
def test_bad_mechanisms_are_refused(options, message):
    with pytest.raises(PomonaError, match=message):
        IndexMechanism(**options)


def test_nothing_to_choose_from_is_refused():
    with pytest.raises(PomonaError, match="empty"):
        IndexMechanism(0.5, theta=1.0).sample(torch.zeros(0))


# ---- the source of randomness


@pytest.mark.parametrize("secure", [False, True])
def test_a_source_gives_what_its_names_say(secure):
    source = Source(secure=secure) if secure else Source(seed=5)
    u, z = source.uniform(50_000).numpy(), source.normal(50_000).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert kstest(u, "uniform").pvalue > 1e-6
    assert kstest(z, "norm").pvalue > 1e-6
    assert z.dtype == np.float32
    rows = source.poisson(100_000, 0.1)
    assert len(rows) == pytest.approx(10_000, abs=500)
    assert bool((rows.diff() > 0).all())
    assert len(source.poisson(10, 1.0)) == 10


def test_a_source_without_a_seed_never_repeats_and_keeps_none():
    one, two = Source(), Source()
    assert not torch.equal(one.bits(4), two.bits(4))
    assert Source(secure=True).state_dict() == {}
    with pytest.raises(PomonaError, match="has no seed"):
        Source(seed=1, secure=True)


def test_a_source_goes_on_from_its_state():
    source = Source(seed=1)
    source.normal(3)
    state = source.state_dict()
    ahead, other = source.normal(5), Source(seed=9)
    other.load_state_dict(state)
    assert torch.equal(other.normal(5), ahead)
    with pytest.raises(PomonaError, match="cannot follow"):
        Source(secure=True).load_state_dict(state)


@pytest.mark.gpu
def test_the_gpu_draws_from_the_same_distribution():
    gradient = torch.tensor([0.3, -2.0, 0.1, 1.0, -0.2, 0.7], device="cuda")
    mechanism = IndexMechanism(2, theta=0.6, group=6)
    masks = mechanism.sample(gradient.repeat(1_000_000), Source("cuda", seed=0)).view(-1, 6)
    assert refute(tally(masks.cpu()), expected(gradient.cpu(), 0.6, 2)) > 1e-3
    whole = torch.randn(1_000_000, device="cuda")
    mask = IndexMechanism(100_000, theta=1.0).sample(whole, Source("cuda", seed=0))
    top = IndexMechanism(100_000, theta=math.inf).sample(whole)
    assert int(mask.sum()) == 100_000
    assert 1 - float((mask & top).sum()) / 1e5 == pytest.approx(
        IndexMechanism(100_000, theta=1.0).lost(10**6), abs=0.01
    )
