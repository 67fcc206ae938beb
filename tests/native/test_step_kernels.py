"""The C kernels of the engine's step against PyTorch, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pomona.compressors import SoftThreshold
from pomona.methods._latent import WEAK, BoundedFeedback
from pomona.native import library, step

INSTRUCTION_SETS = library.supported_instruction_sets() if step.load_kernel("mask") is not None else []
pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="needs the kernels")

SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 3e38)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
quick = settings(max_examples=60, deadline=None)
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=4).filter(lambda shape: math.prod(shape) < 40_000)
layouts = st.sampled_from(["contiguous", "channels last", "offset"])
instruction_sets = st.sampled_from(INSTRUCTION_SETS or ["plain"])


def draw_weights(
    shape: list[int], layout: str, seed: int, dtype: torch.dtype = torch.float32, special: int = 0
) -> Tensor:
    """Return random weights, `special` of which are NaN, infinite, zero, subnormal or very large."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "channels last" and len(shape) == 4:
        weight = torch.empty(shape, dtype=dtype).to(memory_format=torch.channels_last)
    elif layout == "offset":  # not aligned to a vector
        weight = torch.empty(math.prod(shape) + 1, dtype=dtype)[1:].view(shape)
    else:
        weight = torch.empty(shape, dtype=dtype)
    weight.copy_(torch.randn(shape, generator=generator))
    places = torch.randint(weight.numel(), (special,), generator=generator)
    values = torch.tensor(SPECIAL).to(dtype)[torch.randint(len(SPECIAL), (special,), generator=generator)]
    for place, value in zip(places.tolist(), values, strict=True):
        weight[tuple(int(i) for i in torch.unravel_index(torch.tensor(place), weight.shape))] = value
    return weight


def draw_mask(weight: Tensor, sparsity: float, seed: int) -> Tensor:
    """Return a random mask that lies in memory as its weight does."""
    mask = torch.empty_like(weight, dtype=torch.bool)
    return mask.copy_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed + 1)) >= sparsity)


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal to the last bit, with all NaN alike."""
    nan = one.isnan()
    bits = [t.masked_fill(nan, 0).view(INTEGERS[t.element_size()]) for t in (one, other)]
    return torch.equal(nan, other.isnan()) and torch.equal(*bits)


@quick
@given(
    shapes,
    layouts,
    st.floats(0, 1),
    st.integers(0, 2**32),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    instruction_sets,
    st.booleans(),
    st.sampled_from([0.0, math.inf, -math.inf, 1.0]),
)
def test_masked_values_have_the_bits_of_where(
    shape, layout, sparsity, seed, dtype, instruction_set, in_place, fill
) -> None:
    weight = draw_weights(shape, layout, seed, dtype, special=5)
    mask = draw_mask(weight, sparsity, seed)
    if weight.stride() != mask.stride():
        return
    expected = torch.where(mask, weight, torch.tensor(fill, dtype=dtype))
    out = weight if in_place else torch.empty_like(weight)
    version = out._version
    assert step.mask_values(weight, mask, out, fill, instruction_set)
    assert has_same_bits(out, expected)
    assert out._version == version + 1


@quick
@given(shapes, layouts, st.floats(0, 1), st.integers(0, 2**32), instruction_sets, st.integers(0, 5))
def test_soft_thresholds_have_the_bits_of_torch(shape, layout, sparsity, seed, instruction_set, special) -> None:
    weight = draw_weights(shape, layout, seed, special=special)
    mask = draw_mask(weight, sparsity, seed)
    calibration = SoftThreshold().calibrate(weight, mask, 0)
    if seed % 5 == 0:
        calibration[seed % 2].view(-1)[0] = math.nan
    expected = torch.where(mask, weight, 0)
    SoftThreshold().compress(expected, mask, calibration)
    out, norms = torch.empty_like(weight), torch.empty(calibration[0].numel())
    if step.project_rows(weight, mask, out, calibration, norms, instruction_set):
        # Where the threshold is 0, torch gives −0.0 for −0.0 in its vectors and 0.0 in the values after them.
        assert has_same_bits(out + 0.0, expected + 0.0)
        assert not out[~mask].signbit().any()
        assert not out[~mask].any()
        exact = expected.double().flatten(1).norm(dim=1) if len(norms) > 1 else expected.double().norm()[None]
        finite = exact.isfinite() & (exact > 1e-15) & (exact < 1e18)
        assert torch.allclose(norms[finite].double(), exact[finite], rtol=1e-5)


@quick
@given(shapes, layouts, st.floats(0, 1), st.integers(0, 2**32), st.integers(0, 5))
def test_calibrations_have_the_bits_of_torch(shape, layout, sparsity, seed, special) -> None:
    weight = draw_weights(shape, layout, seed, special=special)
    mask = draw_mask(weight, sparsity, seed)
    found = step.measure_magnitudes(weight, mask)
    if found is not None:
        magnitude = weight.abs()
        assert all(map(has_same_bits, found, (magnitude, magnitude.masked_fill(mask, 0).amax())))
        assert found[0].stride() == weight.stride()
        assert step.scale_by_mask(found[0], mask)
        assert has_same_bits(found[0], magnitude * mask)


@quick
@given(st.integers(1, 50_000), st.floats(0, 1), st.integers(0, 2**32))
def test_changes_of_a_mask_are_counted(count, sparsity, seed) -> None:
    one, other = (draw_mask(torch.empty(count), sparsity, s) for s in (seed, seed + 7))
    assert step.count_changes(one, other) == (int(one.sum()), int(other.sum()), int((one ^ other).sum()))


@quick
@given(st.integers(1, 3000), st.integers(0, 2**32), st.integers(0, 9), instruction_sets)
def test_selections_agree_with_numpy(count, seed, special, instruction_set) -> None:
    generator = np.random.default_rng(seed)
    values = draw_weights([count], "contiguous", seed, special=special).round(decimals=1).numpy()
    low, high = np.sort(generator.choice(values, 2)) if generator.random() < 0.9 else (-np.inf, np.inf)
    with pytest.MonkeyPatch.context() as patch:
        best = step.load_kernel
        patch.setattr(step, "load_kernel", lambda name: best(name, instruction_set))
        inside, mask = np.full(count, 7, np.float32), np.empty(count, bool)
        found, below = step.collect_between(values, low, high, inside)
        marked = step.mark_above(values, low, mask)
    under = values < high
    np.testing.assert_array_equal(inside[:found], values[under > (values <= low)])
    assert below == np.count_nonzero(under)
    np.testing.assert_array_equal(mask, ~(values <= low))
    assert marked == np.count_nonzero(mask)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_long_tensors_change_nothing(threads: int) -> None:
    weight = torch.randn(1100, 1000)  # written past the cache
    mask = torch.rand(1100, 1000) < 0.3
    calibration = SoftThreshold().calibrate(weight, mask, 0)
    expected = torch.where(mask, weight, 0)
    SoftThreshold().compress(expected, mask, calibration)
    before, out = torch.get_num_threads(), torch.empty_like(weight)
    torch.set_num_threads(threads)
    try:
        assert step.project_rows(weight, mask, out, calibration)
        assert torch.equal(out, expected)
        assert step.mask_values(weight, mask, out)
        assert torch.equal(out, torch.where(mask, weight, 0))
    finally:
        torch.set_num_threads(before)


class Bounded(BoundedFeedback):
    """Something to call `transform_gradient` of."""


def bound_with_torch(gradient: Tensor, weight: Tensor, feedback: float) -> Tensor:
    """Return the gradient that `BoundedFeedback` gives the optimizer."""
    return Bounded(0.5, feedback=feedback).transform_gradient(gradient, weight, torch.ones_like(weight).bool(), 0)


@quick
@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.integers(0, 3),
)
def test_bounded_gradients_have_the_bits_of_torch(rows, columns, seed, feedback, special) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = 10 ** torch.randint(-3, 3, (2, rows, 1), generator=generator).float()
    weight = draw_weights([rows, columns], "contiguous", seed, special=special) * scales[0]
    gradient = draw_weights([rows, columns], "contiguous", seed + 1, special=special) * scales[1]
    out, estimates = torch.empty_like(weight), torch.empty(rows)
    assert step.project_rows(weight, torch.ones_like(weight).bool(), out, norms=estimates)
    norms = torch.linalg.vector_norm(gradient, dim=[1], keepdim=True)
    found = step.bound_factors(norms, estimates, feedback, WEAK)
    if found is None:
        certain = torch.linalg.vector_norm(weight, dim=1)
        limit = WEAK * certain.mean()
        assert not 1e-11 < limit < 1e17 or ((certain - limit).abs() < 2e-3 * limit).any()
        return
    factors, count = found
    assert has_same_bits(gradient * factors, bound_with_torch(gradient, weight, feedback))
    assert count == int((factors != 1).sum())


def test_an_output_at_the_limit_is_left_to_torch() -> None:
    gradient, limit = torch.ones(3, 1), 0.2 / 2.9  # 0.2 / 2.9 is a tenth of the mean of 1, 1 and itself
    assert step.bound_factors(gradient, torch.tensor([1.0, 1.0, limit]), 1.0, 0.1) is None
    assert step.bound_factors(gradient, torch.tensor([1.0, 1.0, 0.99 * limit]), 1.0, 0.1) is not None
    assert step.bound_factors(gradient, torch.tensor([1.0, 1.0, 1.01 * limit]), 1.0, 0.1) is not None


def test_a_weak_output_is_bounded_by_the_median_of_the_others() -> None:
    weights, gradients = torch.tensor([1.0, 1.0, 1.0, 0.01]), torch.tensor([[1.0], [2.0], [30.0], [8.0]])
    factors, count = step.bound_factors(gradients, weights, 1.0, 0.1)
    assert factors.view(-1).tolist() == pytest.approx([1, 1, 20 / 30, 2 / 8])  # the median of 1, 2 and 30 is 2
    assert count == 2


def test_other_tensors_are_left_to_torch() -> None:
    weight, mask = torch.randn(8, 8), torch.ones(8, 8).bool()
    for values, out in [
        (weight[:, ::2], weight[:, ::2]),  # gaps
        (weight.t(), torch.empty(8, 8)),  # another order
        (weight.to(torch.complex64), torch.empty(8, 8, dtype=torch.complex64)),
        (weight, torch.empty(8, 8, dtype=torch.float64)),
        (weight, torch.empty(8, 8, device="meta")),
        (torch.empty(0, 8), torch.empty(0, 8)),
    ]:
        assert not step.mask_values(values, mask[: values.shape[0], : values.shape[1]], out)


def test_tensors_of_inference_mode_are_masked() -> None:
    with torch.inference_mode():
        weight = torch.randn(64, 64)
        mask = weight > 0
        expected = weight.clamp(min=0)
        assert step.mask_values(weight, mask, weight)
        assert torch.equal(weight, expected)
