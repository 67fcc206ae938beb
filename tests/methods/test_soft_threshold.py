"""DPF on soft-thresholded weights, against a reference that shares no code with it."""

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
from pomona.compressors import Soft
from pomona.lab import Recipe

STEPS, EVERY = 60, 4


def soft(weights: Tensor, mask: Tensor, rescale: bool = True, rows: int = 0) -> Tensor:
    compressor = Soft(rescale=rescale)
    out = torch.where(mask, weights, 0.0)
    compressor.compress(out, mask, compressor.calibrate(weights, mask, rows))
    return out


def test_by_hand() -> None:
    weights = torch.tensor([[4.0, -1.0], [-3.0, 2.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False], [True, False]])
    assert soft(weights, mask, rescale=False).tolist() == [[2, 0], [-1, 0]]  # 2 is the largest that was cut
    # The rows keep 4 of 5 and 3 of 5: s = 1.01 / 0.81 and 1.01 / 0.61.
    assert torch.allclose(soft(weights, mask)[:, 0], torch.tensor([2 * 1.01 / 0.81, -1.01 / 0.61]).double(), rtol=1e-5)
    # A layer that stores its outputs second: the columns keep 7 of 7, and 0 of 3.
    assert torch.allclose(soft(weights, mask, rows=1)[:, 0], torch.tensor([2.0, -1.0]).double())


def test_with_nothing_pruned_it_is_the_weights_to_the_last_bit() -> None:
    weights = torch.randn(5, 3, 3, 3)
    assert torch.equal(soft(weights, torch.ones_like(weights, dtype=torch.bool)), weights)


@given(st.integers(0, 999), st.floats(0.1, 0.9), st.booleans(), st.sampled_from([(30,), (6, 5), (4, 3, 3, 3)]))
def test_signs_zeros_and_order(seed: int, share: float, rescale: bool, shape: tuple[int, ...]) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    threshold = weights.abs().quantile(share)
    mask = weights.abs() > threshold
    out = soft(weights, mask, rescale)
    assert torch.equal(out != 0, mask)  # cut where magnitudes say so, nothing more becomes zero
    assert not out[~mask].signbit().any()
    assert (out * weights >= 0).all()
    cut = weights[~mask].abs().max()
    whole, kept = (x.abs().view(shape[0] if len(shape) > 1 else 1, -1).sum(1) for x in (weights, weights * mask))
    scale = (1.01 / (kept / whole + 0.01)).view(-1, *[1] * (len(shape) - 1)) if rescale else 1.0
    expected = torch.where(mask, weights.sign() * (weights.abs() - cut) * scale, 0)
    assert torch.allclose(out, expected, rtol=1e-3, atol=1e-6)


def reference(rescale: bool, settle: float) -> tuple[list[Tensor], Net]:
    """What each forward runs on (of conv2), by straight-through autograd, and the model at the end."""
    model = Net().double()
    optimizer = make_sgd(model)
    names = ("conv1.weight", "conv2.weight", "hidden.weight")
    weights = dict(model.named_parameters())
    rest, resting, seen = (1 - settle) * STEPS, False, []
    masks = {n: torch.ones_like(weights[n]) for n in names}
    cuts = dict.fromkeys(names, torch.zeros((), dtype=torch.float64))
    scales = {n: torch.ones(len(weights[n]), dtype=torch.float64) for n in names}

    def run_on() -> dict[str, Tensor]:
        return {
            n: w.sign() * (w.abs() - cuts[n]).clamp(min=0) * scales[n].view(-1, *[1] * (w.ndim - 1)) * masks[n]
            for n, w in weights.items()
            if n in names
        }

    for step in range(STEPS + 1):
        if step % EVERY == 0 and step <= rest:
            asked = 0.8 * (1 - (1 - min(step / (0.5 * STEPS), 1)) ** 3)
            flat = torch.cat([weights[n].detach().abs().flatten() for n in names])
            pruned = round(asked * flat.numel())
            least = flat.sort().values[pruned]
            for n in names:
                magnitude = weights[n].detach().abs()
                masks[n] = (magnitude >= least).double()
                cuts[n] = (magnitude * (1 - masks[n])).max()
                share = ((magnitude * masks[n]).flatten(1).mean(1) + 1e-6) / (magnitude.flatten(1).mean(1) + 1e-6)
                scales[n] = 1.01 / (share + 0.01) if rescale else torch.ones_like(share)
            if step + EVERY > rest:
                with torch.no_grad():
                    for n, value in run_on().items():
                        weights[n].copy_(torch.where(masks[n] > 0, value, weights[n]))
                        cuts[n], scales[n] = torch.zeros_like(cuts[n]), torch.ones_like(scales[n])
                resting = True
        with torch.no_grad():
            sparse = run_on()
        seen.append(sparse["conv2.weight"].clone())
        if step == STEPS:
            break
        through = {n: weights[n] + (sparse[n] - weights[n]).detach() for n in names}
        images, labels = make_batch(step)
        optimizer.zero_grad()
        F.cross_entropy(functional_call(model, {**weights, **through}, (images,)), labels).backward()
        optimizer.step()
    assert resting
    with torch.no_grad():
        for n in names:
            weights[n].copy_(sparse[n])
    return seen, model


def pruner(settle: float = 0.3, **options: object) -> pm.Pruner:
    return pm.DPF(sparsity=0.8, every=EVERY, settle=settle, schedule="cubic(until=0.5)", compressor=Soft(**options))


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("settle", [0.0, 0.3])
def test_dpf_with_soft_is_straight_through_training(rescale: bool, settle: float) -> None:
    seen, theirs = reference(rescale, settle)
    ours, optimizer, mine = attach_to_network(pruner(settle, rescale=rescale), total=STEPS)
    for step in range(STEPS):
        assert torch.allclose(ours.conv2.weight, seen[step], rtol=1e-9, atol=1e-12), step
        train(ours, optimizer, [step])
    mine.finish()
    for name, value in theirs.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, rtol=1e-9, atol=1e-12), name
    assert mine.sparsity() == pytest.approx(0.8, abs=1e-3)
    assert all(not ours.get_parameter(n)[~m].any() for n, m in mine.masks().items())


def test_at_rest_it_is_plain_training_of_what_the_model_ran_on() -> None:
    model, optimizer, mine = attach_to_network(pruner(), total=STEPS)
    train(model, optimizer, range(45))
    assert mine.at_rest
    other = copy.deepcopy(model)
    momentum = copy.deepcopy(optimizer.state_dict())
    momentum.pop("pomona")
    second = make_sgd(other)
    second.load_state_dict(momentum)
    held = pm.Finetune(include=list(mine.masks())).attach(other, second, total_steps=STEPS)
    train(model, optimizer, range(45, STEPS))
    train(other, second, range(45, STEPS))
    mine.finish()
    held.finish()
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("at", [10, 30, 39, 40, 41, 50])  # it rises; is reached; around the last mask; at rest
def test_resumed_to_the_last_bit(at: int) -> None:
    model, optimizer, _ = attach_to_network(pruner(), total=STEPS)
    train(model, optimizer, range(at))
    state = save_and_load((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(at, STEPS))
    twin, second, _ = attach_to_network(pruner(), total=STEPS, seed=1)
    twin.load_state_dict(state[0])
    second.load_state_dict(state[1])
    train(twin, second, range(at, STEPS))
    assert is_identical(twin.state_dict(), model.state_dict())
    assert is_identical(second.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("damage", [lambda gauges: gauges.pop("conv2.weight"), lambda gauges: gauges.clear()])
def test_a_damaged_state_changes_nothing(damage) -> None:
    model, optimizer, mine = attach_to_network(pruner(), total=STEPS)
    train(model, optimizer, range(30))
    before = save_and_load((model.state_dict(), mine.state_dict()))
    state = save_and_load(mine.state_dict())
    damage(state["gauges"])
    with pytest.raises(pm.PomonaError, match=r"cannot load: .* is missing"):
        mine.load_state_dict(state)
    assert is_identical(before, (model.state_dict(), mine.state_dict()))


@pytest.mark.parametrize("allocation", ["global(floor=0.1)", "uniform", "erk"])
@pytest.mark.parametrize("make", [make_sgd, make_adam])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_allocation_optimizer_and_type(allocation: str, make, dtype: torch.dtype) -> None:
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


def test_an_average_is_masked_and_not_shrunk_again() -> None:
    model, optimizer, mine = attach_to_network(pruner(), total=STEPS)
    train(model, optimizer, range(30))
    average = copy.deepcopy(model)
    mine.apply(average)
    assert is_identical(average.state_dict(), model.state_dict())


def test_what_a_user_writes_is_taken_as_it_is() -> None:
    model, optimizer, mine = attach_to_network(pruner(), total=STEPS)
    train(model, optimizer, range(30))
    with torch.no_grad():
        model.conv2.weight.mul_(2)
    written = model.conv2.weight.detach().clone()
    mine.refresh()
    assert torch.equal(model.conv2.weight, written)


def test_outputs_that_are_stored_second() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.Flatten(), nn.Linear(6, 2))
    optimizer = make_sgd(model)
    pm.DPF(sparsity=0.5, compressor="soft", schedule="constant", settle=0.5).attach(model, optimizer, total_steps=40)
    state = optimizer.state_dict()["pomona"]
    latent, mask = state["latents"]["0.weight"], model[0].weight != 0
    assert torch.equal(model[0].weight, soft(latent, mask, rows=1))
    assert state["gauges"]["0.weight"].shape == (2, 1, 6, 1, 1)


def test_refused() -> None:
    with pytest.raises(pm.PomonaError, match="prunes groups of weights: use pattern='unstructured'"):
        pm.DPF(pattern=pm.Filter(), compressor="soft")
    with pytest.raises(pm.PomonaError, match="did you mean 'rescale'"):
        pm.DPF(compressor="soft(rescal=False)")
    assert pm.DPF(compressor="soft").method == pm.DPF(compressor=pm.Soft(rescale=True)).method


def test_a_fine_tuning_may_follow() -> None:
    given = {"data": "digits", "model": "digits_cnn", "finetune": {"epochs": 1}}
    assert Recipe.load({**given, "method": "dpf(compressor='soft')"}).finetune.epochs == 1
    with pytest.raises(pm.PomonaError, match="finetune would undo"):
        Recipe.load({**given, "method": "dpf(compressor='binary')"})
