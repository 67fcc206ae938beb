"""Attacks on the arithmetic and the randomness of a private step.

Each is run against the step and against the floating-point step that it was written for. Where an adversary guesses
whether a row was there, at most e^ε / (1 + e^ε) of the guesses may be right, up to δ; here ε = 1, which is 73 %.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from float_arithmetic import FloatStep, TorchSource
from scipy.special import ndtr
from scipy.stats import binomtest
from torch import nn

from pomona.privacy import Budget, PrivateStep, Source
from pomona.privacy.clipping import UNITS
from pomona.privacy.random_source import Purpose

EPSILON, DELTA, SIGMA = 1.0, 1e-5, 3.75
TRIALS = 60
NORM = 10.0  # of the row's gradient, which is clipped to 1
VERSIONS = {"grid": (PrivateStep, Source), "floats": (FloatStep, TorchSource)}


def take_step(version: str, is_member: bool, size: int, dtype: torch.dtype, seed: int | None = None) -> torch.Tensor:
    """Take one step on a row that is there or has a zero gradient, and return the weights, which are released."""
    step_class, source_class = VERSIONS[version]
    model = nn.Linear(size, 1, bias=False, dtype=dtype)
    nn.init.zeros_(model.weight)
    budget = Budget(EPSILON, DELTA, 4, 4, 1, 0.0, SIGMA, 0.0, ((1, EPSILON),))
    optimizer, loss = torch.optim.SGD(model.parameters(), 1.0), lambda output, target: -output.mean()
    step = step_class(model, optimizer, budget, method="dpsgd", loss=loss, source=source_class(seed=seed))
    rows = step.draw()
    features = torch.zeros(4, size, dtype=dtype)
    features[0] = is_member * NORM / math.sqrt(size)
    step(features[rows], rows)
    return model.weight.detach()[0]


def count_right_guesses(version: str, guess, size: int, dtype: torch.dtype, trials: int = TRIALS) -> int:
    """Return how often an adversary who sees the weights is right about the row."""
    coins = np.random.default_rng(0).integers(0, 2, trials).astype(bool)
    return sum(guess(take_step(version, bool(coin), size, dtype)) == bool(coin) for coin in coins)


def exceeds_promise(right: int, trials: int = TRIALS) -> bool:
    """Return whether so many right guesses refute ε = 1 with a confidence of 1 − 1e−6."""
    share = math.exp(EPSILON) / (1 + math.exp(EPSILON)) + DELTA
    return binomtest(right, trials, share, alternative="greater").pvalue < 1e-6


def test_noise_of_the_attacked_steps_is_enough_for_the_promise():
    half = 1 / (2 * SIGMA)
    delta = ndtr(half - EPSILON * SIGMA) - math.exp(EPSILON) * ndtr(-half - EPSILON * SIGMA)
    assert 0.5 * DELTA < delta <= DELTA


# ---- attack 1: the noise is rebuilt from the seed


def remaining_noise(weights: torch.Tensor, seed: int) -> float:
    """Return the norm of what is left of the weights when the noise of a seed is subtracted, over that of the noise."""
    source = Source(seed=seed)
    source.poisson(4, 1.0)
    noise = source.discrete_gaussian(len(weights), math.ceil((SIGMA * UNITS) ** 2) + 9)
    left = weights * 4 * UNITS + noise  # the optimizer subtracts the gradient
    return float(left.norm() / noise.double().norm())


def test_noise_is_rebuilt_from_a_seed_and_not_without_one():
    seeded = take_step("grid", True, 2000, torch.float64, seed=0)
    assert remaining_noise(seeded, seed=0) < 0.01  # the clipped gradient of norm 1 remains
    secure = take_step("grid", True, 2000, torch.float64)
    torch.manual_seed(0)
    again = take_step("grid", True, 2000, torch.float64)
    torch.manual_seed(0)
    assert not torch.equal(again, take_step("grid", True, 2000, torch.float64))  # torch's seed decides nothing
    assert min(remaining_noise(weights, seed) for weights in (secure, again) for seed in range(50)) > 1


def test_what_is_published_has_no_key():
    model = nn.Linear(3, 2)
    budget = Budget(EPSILON, DELTA, 4, 4, 1, 0.0, SIGMA, 0.0, ((1, EPSILON),))
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), 1.0), budget, method="dpsgd")
    assert step.facts()["secure"]
    assert step.source.key.hex() not in repr(step.facts())
    assert repr(step.source.key) not in repr(step.facts())
    assert step.state_dict()["source"]["key"] == step.source.key.hex()


# ---- attack 2: the low bits of a float64 sum are data


def is_off_float32(weights: torch.Tensor) -> bool:
    """Guess that the row is there if the weights are no float32 numbers, as noise alone is."""
    return bool((weights != weights.float().double()).any())


def test_low_bits_of_a_float64_model_tell_nothing():
    assert exceeds_promise(TRIALS)
    assert count_right_guesses("floats", is_off_float32, 50, torch.float64) == TRIALS
    assert not exceeds_promise(count_right_guesses("grid", is_off_float32, 50, torch.float64))


# ---- attack 3: not every float32 is the rounded sum of the gradient and noise


def has_short_significands(weights: torch.Tensor) -> bool:
    """Guess that the row is there if all weights near zero are multiples of a number that its gradient's entries set.

    Noise near zero has all its bits. The sum of noise and an entry x is near zero if the noise is near −x, and then it
    is a multiple of the last bit of both.
    """
    entry = 1 / math.sqrt(len(weights)) / 4  # of the released mean over 4 rows
    last_bit = 2.0 ** (math.floor(math.log2(0.7 * entry)) - 23)
    near = weights[weights.abs() < entry / 4] / last_bit
    return torch.equal(near, near.round())


def test_reachable_float32_numbers_tell_nothing():
    size = 1 << 16
    assert count_right_guesses("floats", has_short_significands, size, torch.float32) == TRIALS
    assert not exceeds_promise(count_right_guesses("grid", has_short_significands, size, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_released_gradients_are_functions_of_integers(dtype):
    """Weights of every dtype are integers in units of the grid, rounded to the dtype; their residues are uniform."""
    weights = take_step("grid", True, 5000, dtype).double() * 4 * UNITS
    if dtype is torch.float64:
        assert torch.equal(weights, weights.round())
        assert np.bincount(weights.long().numpy() % 16, minlength=16).min() > 200
    assert float(weights.std() / UNITS) == pytest.approx(SIGMA, rel=0.1)


# ---- attack 4: few bits of seed


def find_seed(weights: torch.Tensor, seeds: range, source_class: type[Source]) -> int | None:
    """Return the seed whose noise explains the weights, by trying all."""
    for seed in seeds:
        source = source_class(seed=seed)
        if isinstance(source, TorchSource):
            noise = source.normal(len(weights)).double() * SIGMA
        else:
            source.poisson(4, 1.0)
            noise = source.discrete_gaussian(len(weights), math.ceil((SIGMA * UNITS) ** 2) + 9).double() / UNITS
        if float((weights.double() * 4 + noise).norm()) < 0.5 * float(noise.norm()):
            return seed
    return None


def test_seeds_can_be_tried_and_keys_cannot():
    hidden = 577
    attacked = take_step("floats", True, 200, torch.float32, seed=hidden + (1 << 32))
    assert find_seed(attacked, range(1000), TorchSource) == hidden  # torch uses the low 32 bits on a CPU
    assert find_seed(take_step("grid", True, 200, torch.float32), range(1000), Source) is None


def test_all_bits_of_the_key_matter():
    source = Source()
    assert len(source.key) * 8 >= 128
    seen = {tuple(source.words(Purpose.NOISE, 2).tolist())}
    for bit in range(256):
        other = Source()
        other.key = (int.from_bytes(source.key, "little") ^ (1 << bit)).to_bytes(32, "little")
        seen.add(tuple(other.words(Purpose.NOISE, 2).tolist()))
    assert len(seen) == 257
