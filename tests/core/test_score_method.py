"""Score methods: the optimizer moves a score for each weight, and the random weights are not trained."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from engine_helpers import Net, compute_loss, is_identical, make_adam, make_sgd, obeys_masks, save_and_load, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import pomona as pm

TOTAL = 24


def make_model(seed: int = 0) -> Net:
    """Return a network in float64 whose norm has no trained parameters."""
    model = Net(seed)
    model.norm = nn.BatchNorm2d(8, affine=False)
    return model.double()


def attach_to_model(
    pruner: pm.Pruner, make: Any = make_sgd, model: nn.Module | None = None
) -> tuple[Any, Optimizer, pm.Pruner]:
    """Return a model, its optimizer and the pruner attached to both."""
    model = make_model() if model is None else model
    optimizer = make(model)
    return model, optimizer, pruner.attach(model, optimizer, total_steps=TOTAL)


def copy_scores(pruner: pm.Pruner) -> dict[str, Tensor]:
    """Return copies of the scores."""
    return {name: latent.clone() for name, latent in pruner.state_dict()["latents"].items()}


def copy_weights(pruner: pm.Pruner) -> dict[str, Tensor]:
    """Return copies of the random weights."""
    return {slot.name: slot.weight.clone() for slot in pruner.slots}  # type: ignore[union-attr]


# ---- against autograd: a straight-through estimator that shares no code with the engine


class StraightThroughMask(torch.autograd.Function):
    """Mask of the n − k highest scores, with the identity as its gradient."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, prune: int) -> Tensor:
        mask = torch.ones(score.numel(), dtype=score.dtype)
        mask[score.flatten().argsort(stable=True)[:prune]] = 0
        return mask.view_as(score)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


@pytest.mark.parametrize("make", [make_sgd, make_adam])
@pytest.mark.parametrize("distribution", ["sc", "ku"])
def test_edge_popup_matches_straight_through_training(make: Any, distribution: str) -> None:
    model, optimizer, pruner = attach_to_model(pm.EdgePopup(sparsity=0.6, distribution=distribution), make)
    fixed = copy_weights(pruner)
    reference = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(s) for name, s in copy_scores(pruner).items()})
    reference_optimizer = make(reference)
    other = make_model()
    plain = dict(other.named_parameters()) | dict(other.named_buffers())
    for step in range(TOTAL):
        masks = {
            n: StraightThroughMask.apply(reference[n.replace(".", "_")], round(0.6 * w.numel()))
            for n, w in fixed.items()
        }
        for name, mask in pruner.masks().items():
            assert torch.equal(mask, masks[name].bool()), f"the masks of {name} differ before step {step}"
        x = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        y = torch.arange(6)
        reference_optimizer.zero_grad()
        sparse = {name: mask * fixed[name] for name, mask in masks.items()}
        F.cross_entropy(torch.func.functional_call(other, plain | sparse, (x,)), y).backward()
        reference_optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for name, score in copy_scores(pruner).items():
        assert torch.allclose(score, reference[name.replace(".", "_")], rtol=1e-9, atol=1e-12)
    assert is_identical(copy_weights(pruner), fixed), "a weight was trained"


# ---- biases, gradients and units


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_biases_and_all_gradients_are_not_changed(make: Any) -> None:
    model, optimizer, pruner = attach_to_model(pm.IteRand(sparsity=0.5, every=3), make)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("bias")}
    assert len(before) == 4
    for step in range(TOTAL):
        optimizer.zero_grad()
        compute_loss(model, step).backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        optimizer.step()
        assert all(p.grad is gradients[n] for n, p in model.named_parameters())
        assert obeys_masks(model, pruner)
    assert all(torch.equal(model.get_parameter(n), value) for n, value in before.items())


def test_an_excluded_layer_is_trained_with_its_bias() -> None:
    model, optimizer, _ = attach_to_model(pm.EdgePopup(exclude="head"))
    before = copy.deepcopy(model.head)
    train(model, optimizer, range(3))
    assert not torch.equal(model.head.weight, before.weight)
    assert not torch.equal(model.head.bias, before.bias)


def test_accumulated_gradients_are_summed_before_the_product() -> None:
    one, two = (attach_to_model(pm.EdgePopup(sparsity=0.5), lambda m: make_sgd(m, lr=0.1)) for _ in range(2))
    compute_loss(one[0], 0).backward()
    compute_loss(one[0], 1).backward()
    one[1].step()
    (compute_loss(two[0], 0) + compute_loss(two[0], 1)).backward()
    two[1].step()
    accumulated, summed = copy_scores(one[2]), copy_scores(two[2])
    assert all(torch.allclose(accumulated[n], summed[n], rtol=1e-12) for n in accumulated)


@pytest.mark.parametrize("pattern", [pm.Filter(), pm.Balanced(block=4), pm.Kernel(), pm.NM(2, 4)])
@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_patterns_keep_the_units_of_the_highest_scores(pattern: Any, allocation: str) -> None:
    sparsity = None if isinstance(pattern, pm.NM) else 0.5
    model, optimizer, pruner = attach_to_model(pm.EdgePopup(sparsity=sparsity, pattern=pattern, allocation=allocation))
    biases = model.conv1.bias.detach().clone()
    train(model, optimizer, range(TOTAL))
    pruner.finish()
    assert obeys_masks(model, pruner)
    mask = pruner.masks()["conv1.weight"]
    if isinstance(pattern, pm.Filter):
        kept = mask.flatten(1).all(1)
        assert torch.equal(model.conv1.bias, biases.masked_fill(~kept, 0)), (
            "the bias of a removed filter is not removed"
        )
        assert "head.weight" not in pruner.masks()


def test_units_are_ranked_by_their_signed_mean_score() -> None:
    _, _, pruner = attach_to_model(pm.EdgePopup(sparsity=0.5, pattern=pm.Filter(norm=1)))
    for slot in pruner.slots:
        slot.latent.copy_(-1 - torch.arange(slot.latent.numel()).view(slot.latent.shape))  # type: ignore[union-attr]
    pruner.update_from_scores()
    assert pruner.masks()["conv1.weight"].flatten(1).all(1).tolist() == [True] * 4 + [False] * 4


# ---- a schedule, and the exact count at every step


@settings(deadline=None, max_examples=25)
@given(
    st.floats(0.05, 0.95),
    st.sampled_from(["uniform", "global", "erk"]),
    st.sampled_from([pm.Constant(), pm.Linear(until=0.5), pm.Cubic(start=0.2, until=0.8)]),
    st.sampled_from([None, 5]),
)
def test_counts_are_exact_after_every_step(sparsity: float, allocation: str, schedule: Any, epoch: int | None) -> None:
    model = make_model()
    optimizer = make_sgd(model)
    pruner = pm.IteRand(sparsity=sparsity, allocation=allocation, schedule=schedule, every=3)
    pruner.attach(model, optimizer, total_steps=TOTAL, steps_per_epoch=epoch)
    for step in range(TOTAL):
        asked = sparsity * schedule(step, TOTAL, epoch)
        masks = pruner.masks()
        if allocation == "uniform":
            assert all(int((~m).sum()) == round(asked * m.numel()) for m in masks.values())
        pruned, size = sum(int((~m).sum()) for m in masks.values()), sum(m.numel() for m in masks.values())
        assert abs(pruned - asked * size) <= (0.5 if allocation == "global" else len(masks) / 2)
        train(model, optimizer, [step])
    pruner.finish()
    assert pruner.sparsity() == pytest.approx(sparsity, abs=1e-2)


def test_finish_before_the_schedule_ends_prunes_the_rest_with_a_warning() -> None:
    model, optimizer, pruner = attach_to_model(pm.EdgePopup(sparsity=0.5, schedule="linear"))
    train(model, optimizer, range(6))
    with pytest.warns(UserWarning, match="was pruned at once"):
        pruner.finish()
    assert all(int((~m).sum()) == round(0.5 * m.numel()) for m in pruner.masks().values())


# ---- edits, errors, states


def test_an_edited_weight_is_refused_and_refresh_restores_it() -> None:
    model, optimizer, pruner = attach_to_model(pm.EdgePopup())
    train(model, optimizer, range(2))
    before = model.conv1.weight.detach().clone()
    with torch.no_grad():
        model.conv1.weight.add_(1)
    compute_loss(model, 2).backward()
    with pytest.raises(pm.PomonaError, match=r"conv1\.weight was changed between two steps.*pruner\.refresh\(\)"):
        optimizer.step()
    pruner.refresh()
    assert torch.equal(model.conv1.weight, before)
    optimizer.step()


def test_a_step_that_fails_is_undone() -> None:
    model, optimizer, pruner = attach_to_model(pm.IteRand(every=2))
    train(model, optimizer, range(2))
    kept, before = copy_scores(pruner), copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    compute_loss(model, 2).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimizer.param_groups[0]["lr"] = "broken"
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        optimizer.step()
    pruner.refresh()
    assert is_identical(copy_scores(pruner), kept)
    assert all(torch.equal(p.grad, gradients[n]) for n, p in model.named_parameters())
    now = model.state_dict()
    assert all(torch.equal(now[n], before[n]) for n in pruner.masks())


def test_a_closure_counts_as_one_step() -> None:
    one, two = attach_to_model(pm.IteRand(every=2)), attach_to_model(pm.IteRand(every=2))
    for step in range(5):
        train(*one[:2], [step])

        def closure(step: int = step) -> Tensor:
            two[1].zero_grad()
            loss = compute_loss(two[0], step)
            loss.backward()
            return loss

        two[1].step(closure)
    assert is_identical(one[2].state_dict(), two[2].state_dict())
    assert is_identical(one[0].state_dict(), two[0].state_dict())


def test_a_step_skipped_by_a_scaler_changes_nothing() -> None:
    model, optimizer, pruner = attach_to_model(pm.EdgePopup(schedule="linear"), lambda m: make_sgd(m, fused=True))
    train(model, optimizer, range(4))
    before = copy.deepcopy((pruner.state_dict(), model.conv1.weight.detach()))
    optimizer.zero_grad()
    compute_loss(model, 4).backward()
    optimizer.found_inf = torch.ones(1)  # GradScaler sets it on a fused optimizer when gradients overflow
    optimizer.step()
    assert is_identical((pruner.state_dict(), model.conv1.weight.detach()), before)
    optimizer.found_inf = torch.zeros(1)
    optimizer.step()
    assert pruner.step == 5
    assert not is_identical(copy_scores(pruner), before[0]["latents"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: setattr(m, "norm", nn.BatchNorm2d(8).double()),
            r"norm is a BatchNorm2d with a gain .* affine=False",
        ),
        (lambda m: m.conv2.weight.requires_grad_(False), r"conv2\.weight is frozen and edge_popup needs its gradient"),
    ],
)
def test_trained_norms_and_frozen_weights_are_refused(change: Any, message: str) -> None:
    model = make_model()
    change(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(pm.PomonaError, match=message):
        attach_to_model(pm.EdgePopup(), model=model)
    assert is_identical(model.state_dict(), before)


def test_vectors_are_refused() -> None:
    with pytest.raises(pm.PomonaError, match=r"conv1\.bias is a vector, which edge_popup cannot draw"):
        attach_to_model(pm.EdgePopup(include=["*.bias"]))


def test_a_frozen_norm_is_accepted() -> None:
    model = Net().double()
    model.norm.requires_grad_(False)
    attach_to_model(pm.EdgePopup(), model=model)


def test_the_state_holds_no_weights_and_restores_them() -> None:
    model, optimizer, pruner = attach_to_model(pm.IteRand(sparsity=0.5, every=3, rate=0.5, distribution="ku"))
    train(model, optimizer, range(14))
    state = save_and_load(pruner.state_dict())
    size = sum(mask.numel() for mask in pruner.masks().values())
    parts = [part for key, part in state.items() if isinstance(part, dict) and key != "history"]
    stored = [t for part in parts for t in part.values() if isinstance(t, Tensor)]
    assert sum(t.numel() * t.element_size() for t in stored) < size * (8 + 4 + 2 / 8) + 64
    other, _, restored = attach_to_model(
        pm.IteRand(sparsity=0.5, every=3, rate=0.5, distribution="ku"), model=make_model(seed=3)
    )
    assert not is_identical(copy_weights(restored), copy_weights(pruner))
    restored.load_state_dict(state)
    assert is_identical(copy_weights(restored), copy_weights(pruner))
    assert is_identical(restored.masks(), pruner.masks())
    assert obeys_masks(other, restored)
    with pytest.raises(pm.PomonaError, match="seed = 0, this pruner has 1"):
        attach_to_model(pm.IteRand(sparsity=0.5, every=3, rate=0.5, distribution="ku", seed=1))[2].load_state_dict(
            state
        )


def test_another_memory_format_during_training() -> None:
    model, optimizer, pruner = attach_to_model(pm.IteRand(every=2), model=make_model().float())
    reference = attach_to_model(pm.IteRand(every=2), model=make_model().float())
    train(model, optimizer, range(4))
    train(*reference[:2], range(4))
    model.to(memory_format=torch.channels_last)
    for step in range(4, 10):
        assert obeys_masks(model, pruner)
        train(model, optimizer, [step])
        train(*reference[:2], [step])
    agree = [(mask == reference[2].masks()[name]).float().mean() for name, mask in pruner.masks().items()]
    assert min(agree) > 0.95
    for slot, other in zip(pruner.slots, reference[2].slots, strict=True):
        never_redrawn = (slot.draw_number == 0) & (other.draw_number == 0)  # type: ignore[operator]
        assert torch.equal(slot.weight[never_redrawn], other.weight[never_redrawn]), "draws depend on the memory format"  # type: ignore[index]


def test_a_whole_training_gives_no_warning() -> None:
    model, optimizer, pruner = attach_to_model(pm.IteRand(every=4, allocation="global", schedule="cubic"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(TOTAL))
        pruner.finish()
    assert [entry["step"] for entry in pruner.history] == [0, 3, 7, 11, 15, 19, 23]


def test_a_captured_graph_that_cannot_follow_the_schedule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"sparsity": 0.5, "pattern": pm.Balanced(block=4)}
    _, _, rising = attach_to_model(pm.EdgePopup(**options, schedule="linear"))
    _, _, constant = attach_to_model(pm.EdgePopup(**options))
    monkeypatch.setattr("pomona.core.guards.is_capturing", lambda mask: True)
    with pytest.raises(pm.PomonaError, match=r"still rise to 50\.00%: step eagerly"):
        rising.update_from_scores()
    constant.update_from_scores()
