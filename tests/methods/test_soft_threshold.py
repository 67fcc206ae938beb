"""DPF with soft thresholds, against an independent straight-through reference."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_helpers import Net, attach_to_network, is_identical, make_adam, make_batch, make_sgd, save_and_load, train
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import pomona as pm
from pomona.compressors import SoftThreshold
from pomona.lab import Recipe

STEPS, EVERY = 60, 4


def apply_soft_threshold(weights: Tensor, mask: Tensor, rescale: bool = True, output_dim: int = 0) -> Tensor:
    """Return the weights after masking and soft thresholding."""
    compressor = SoftThreshold(rescale=rescale)
    out = torch.where(mask, weights, 0.0)
    compressor.compress(out, mask, compressor.calibrate(weights, mask, output_dim))
    return out


def test_soft_thresholds_by_hand() -> None:
    weights = torch.tensor([[4.0, -1.0], [-3.0, 2.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False], [True, False]])
    # 2 is the largest weight that is pruned.
    assert apply_soft_threshold(weights, mask, rescale=False).tolist() == [[2, 0], [-1, 0]]
    # The rows keep 4 of 5 and 3 of 5: s = 1.01 / 0.81 and 1.01 / 0.61.
    assert torch.allclose(
        apply_soft_threshold(weights, mask)[:, 0], torch.tensor([2 * 1.01 / 0.81, -1.01 / 0.61]).double(), rtol=1e-5
    )
    # With outputs in the second dimension the columns keep 7 of 7, and 0 of 3.
    assert torch.allclose(apply_soft_threshold(weights, mask, output_dim=1)[:, 0], torch.tensor([2.0, -1.0]).double())


def test_nothing_pruned_leaves_the_bits_of_the_weights() -> None:
    weights = torch.randn(5, 3, 3, 3)
    assert torch.equal(apply_soft_threshold(weights, torch.ones_like(weights, dtype=torch.bool)), weights)


@given(st.integers(0, 999), st.floats(0.1, 0.9), st.booleans(), st.sampled_from([(30,), (6, 5), (4, 3, 3, 3)]))
def test_thresholded_weights_keep_signs_and_zeros(
    seed: int, share: float, rescale: bool, shape: tuple[int, ...]
) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    threshold = weights.abs().quantile(share)
    mask = weights.abs() > threshold
    out = apply_soft_threshold(weights, mask, rescale)
    assert torch.equal(out != 0, mask)  # pruned by magnitude, and no other weight becomes zero
    assert not out[~mask].signbit().any()
    assert (out * weights >= 0).all()
    largest_pruned = weights[~mask].abs().max()
    whole, kept = (x.abs().view(shape[0] if len(shape) > 1 else 1, -1).sum(1) for x in (weights, weights * mask))
    scale = (1.01 / (kept / whole + 0.01)).view(-1, *[1] * (len(shape) - 1)) if rescale else 1.0
    expected = torch.where(mask, weights.sign() * (weights.abs() - largest_pruned) * scale, 0)
    assert torch.allclose(out, expected, rtol=1e-3, atol=1e-6)


def train_straight_through(rescale: bool, settle: float) -> tuple[list[Tensor], Net]:
    """Train by straight-through autograd; return the conv2 weights of each forward, and the model at the end."""
    model = Net().double()
    optimizer = make_sgd(model)
    names = ("conv1.weight", "conv2.weight", "hidden.weight")
    weights = dict(model.named_parameters())
    last_update, is_fixed, seen = (1 - settle) * STEPS, False, []
    masks = {n: torch.ones_like(weights[n]) for n in names}
    thresholds = dict.fromkeys(names, torch.zeros((), dtype=torch.float64))
    scales = {n: torch.ones(len(weights[n]), dtype=torch.float64) for n in names}

    def project_all() -> dict[str, Tensor]:
        return {
            n: w.sign() * (w.abs() - thresholds[n]).clamp(min=0) * scales[n].view(-1, *[1] * (w.ndim - 1)) * masks[n]
            for n, w in weights.items()
            if n in names
        }

    for step in range(STEPS + 1):
        if step % EVERY == 0 and step <= last_update:
            asked = 0.8 * (1 - (1 - min(step / (0.5 * STEPS), 1)) ** 3)
            flat = torch.cat([weights[n].detach().abs().flatten() for n in names])
            pruned = round(asked * flat.numel())
            smallest_kept = flat.sort().values[pruned]
            for n in names:
                magnitude = weights[n].detach().abs()
                masks[n] = (magnitude >= smallest_kept).double()
                thresholds[n] = (magnitude * (1 - masks[n])).max()
                share = ((magnitude * masks[n]).flatten(1).mean(1) + 1e-6) / (magnitude.flatten(1).mean(1) + 1e-6)
                scales[n] = 1.01 / (share + 0.01) if rescale else torch.ones_like(share)
            if step + EVERY > last_update:
                with torch.no_grad():
                    for n, value in project_all().items():
                        weights[n].copy_(torch.where(masks[n] > 0, value, weights[n]))
                        thresholds[n], scales[n] = torch.zeros_like(thresholds[n]), torch.ones_like(scales[n])
                is_fixed = True
        with torch.no_grad():
            sparse = project_all()
        seen.append(sparse["conv2.weight"].clone())
        if step == STEPS:
            break
        through = {n: weights[n] + (sparse[n] - weights[n]).detach() for n in names}
        images, labels = make_batch(step)
        optimizer.zero_grad()
        F.cross_entropy(functional_call(model, {**weights, **through}, (images,)), labels).backward()
        optimizer.step()
    assert is_fixed
    with torch.no_grad():
        for n in names:
            weights[n].copy_(sparse[n])
    return seen, model


def make_soft_dpf(settle: float = 0.3, **options: object) -> pm.Pruner:
    """Return DPF with soft thresholds and no bound on the gradient, which the reference has not."""
    return pm.DPF(
        sparsity=0.8,
        every=EVERY,
        settle=settle,
        schedule="cubic(until=0.5)",
        compressor=SoftThreshold(**options),
        feedback=None,
    )


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("settle", [0.0, 0.3])
def test_dpf_with_soft_thresholds_matches_straight_through_training(rescale: bool, settle: float) -> None:
    seen, reference = train_straight_through(rescale, settle)
    model, optimizer, pruner = attach_to_network(make_soft_dpf(settle, rescale=rescale), total=STEPS)
    for step in range(STEPS):
        assert torch.allclose(model.conv2.weight, seen[step], rtol=1e-9, atol=1e-12), step
        train(model, optimizer, [step])
    pruner.finish()
    for name, value in reference.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-9, atol=1e-12), name
    assert pruner.sparsity() == pytest.approx(0.8, abs=1e-3)
    assert all(not model.get_parameter(n)[~m].any() for n, m in pruner.masks().items())


def test_with_fixed_masks_the_thresholded_weights_are_trained() -> None:
    model, optimizer, pruner = attach_to_network(make_soft_dpf(), total=STEPS)
    train(model, optimizer, range(45))
    assert pruner.at_rest
    other = copy.deepcopy(model)
    second = make_sgd(other)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    finetune = pm.Finetune(include=list(pruner.masks()))
    finetune.attach(other, second, total_steps=STEPS, resume=False)  # a new phase, with this momentum
    train(model, optimizer, range(45, STEPS))
    train(other, second, range(45, STEPS))
    pruner.finish()
    finetune.finish()
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


# The sparsity rises at step 10 and is reached at 30; 40 is the last update, after which masks are fixed.
@pytest.mark.parametrize("at", [10, 30, 39, 40, 41, 50])
def test_a_resumed_run_with_soft_thresholds_is_bit_identical(at: int) -> None:
    model, optimizer, _ = attach_to_network(make_soft_dpf(), total=STEPS)
    train(model, optimizer, range(at))
    state = save_and_load((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(at, STEPS))
    resumed, second_optimizer, _ = attach_to_network(make_soft_dpf(), total=STEPS, seed=1)
    resumed.load_state_dict(state[0])
    second_optimizer.load_state_dict(state[1])
    train(resumed, second_optimizer, range(at, STEPS))
    assert is_identical(resumed.state_dict(), model.state_dict())
    assert is_identical(second_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    "damage", [lambda thresholds: thresholds.pop("conv2.weight"), lambda thresholds: thresholds.clear()]
)
def test_a_state_without_thresholds_is_refused_and_changes_nothing(damage) -> None:
    model, optimizer, pruner = attach_to_network(make_soft_dpf(), total=STEPS)
    train(model, optimizer, range(30))
    before = save_and_load((model.state_dict(), pruner.state_dict()))
    state = save_and_load(pruner.state_dict())
    damage(state["gauges"])
    with pytest.raises(pm.PomonaError, match=r"cannot load: .* is missing"):
        pruner.load_state_dict(state)
    assert is_identical(before, (model.state_dict(), pruner.state_dict()))


@pytest.mark.parametrize("allocation", ["global(floor=0.1)", "uniform", "erk"])
@pytest.mark.parametrize("make", [make_sgd, make_adam])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_allocation_optimizer_and_dtype(allocation: str, make, dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    optimizer = make(model)
    method = pm.DPF(sparsity=0.8, every=EVERY, schedule="linear(until=0.5)", allocation=allocation, compressor="soft")
    method.attach(model, optimizer, total_steps=20)
    for step in range(20):
        train(model, optimizer, [step])
        assert all(not model.get_parameter(n)[~m].any() for n, m in method.masks().items())
    method.finish()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert method.sparsity() == pytest.approx(0.8, abs=5e-3)


def test_apply_masks_a_copy_without_thresholding_it_again() -> None:
    model, optimizer, pruner = attach_to_network(make_soft_dpf(), total=STEPS)
    train(model, optimizer, range(30))
    average = copy.deepcopy(model)
    pruner.apply(average)
    assert is_identical(average.state_dict(), model.state_dict())


def test_edited_weights_are_not_thresholded_again() -> None:
    model, optimizer, pruner = attach_to_network(make_soft_dpf(), total=STEPS)
    train(model, optimizer, range(30))
    with torch.no_grad():
        model.conv2.weight.mul_(2)
    written = model.conv2.weight.detach().clone()
    pruner.refresh()
    assert torch.equal(model.conv2.weight, written)


def test_outputs_in_the_second_dimension() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.Flatten(), nn.Linear(6, 2))
    optimizer = make_sgd(model)
    pm.DPF(sparsity=0.5, compressor="soft", schedule="constant", settle=0.5).attach(model, optimizer, total_steps=40)
    state = optimizer.state_dict()["pomona"]
    latent, mask = state["latents"]["0.weight"], model[0].weight != 0
    assert torch.equal(model[0].weight, apply_soft_threshold(latent, mask, output_dim=1))
    assert state["gauges"]["0.weight"].shape == (2, 1, 6, 1, 1)


def test_patterns_of_groups_and_unknown_options_are_refused() -> None:
    with pytest.raises(pm.PomonaError, match="prunes groups of weights: use pattern='unstructured'"):
        pm.DPF(pattern=pm.Filter(), compressor="soft")
    with pytest.raises(pm.PomonaError, match="did you mean 'rescale'"):
        pm.DPF(compressor="soft(rescal=False)")
    assert pm.DPF(compressor="soft").method == pm.DPF(compressor=pm.Soft(rescale=True)).method


def test_a_recipe_may_finetune_after_soft_thresholds() -> None:
    given = {"data": "digits", "model": "digits_cnn", "finetune": {"epochs": 1}}
    assert Recipe.load({**given, "method": "dpf(compressor='soft')"}).finetune.epochs == 1
    with pytest.raises(pm.PomonaError, match="finetune would undo"):
        Recipe.load({**given, "method": "dpf(compressor='binary')"})


def test_a_diverged_layer_still_obeys_its_mask() -> None:
    """A kept weight of NaN makes the scale of its output NaN; pruned weights are zero all the same."""
    weights, mask = torch.tensor([[torch.nan, 3.0, 0.5, 2.0]]), torch.tensor([[True, True, False, True]])
    compressor = pm.SoftThreshold()
    calibration = compressor.calibrate(weights, mask, 0)
    out = torch.where(mask, weights, 0)
    compressor.compress(out, mask, calibration)
    assert out[0, 2] == 0
