"""IteRand: the re-draw by hand and against a reference, and the tensors that it must not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_helpers import Net, compute_loss, is_identical, make_sgd, save_and_load, train
from reference_methods import LinearStack, make_linear_loss
from torch import Tensor, nn

import pomona as pm
from pomona.core.fused.random_stream import RandomStream, name_words, philox

TOTAL = 30


def make_model(seed: int = 0) -> Net:
    """Return a network in float64 whose norm has no trained parameters."""
    model = Net(seed)
    model.norm = nn.BatchNorm2d(8, affine=False)
    return model.double()


def attach_iterand(model_seed: int = 0, **options: Any) -> tuple[Net, torch.optim.SGD, pm.Pruner]:
    """Return a model, its optimizer and IteRand attached to both."""
    model = make_model(model_seed)
    optimizer = make_sgd(model)
    return model, optimizer, pm.IteRand(**options).attach(model, optimizer, total_steps=TOTAL)


def copy_weights(pruner: pm.Pruner) -> dict[str, Tensor]:
    """Return copies of the random weights."""
    return {slot.name: slot.weight.clone() for slot in pruner.slots}  # type: ignore[union-attr]


def draw_coins_and_signs(name: str, shape: torch.Size, number: int, rate: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return which weights a re-draw selects, and the signs drawn, one position at a time."""
    coins, signs = [], []
    for position in range(shape.numel()):
        words = philox((position, number, *name_words(name)), (seed, 0))
        coins.append(words[1] / 2**32 < rate)
        signs.append(1.0 if words[0] < 2**31 else -1.0)
    return torch.tensor(coins).view(shape), torch.tensor(signs, dtype=torch.float64).view(shape)


@pytest.mark.parametrize("rate", [0.25, 1.0])
@pytest.mark.parametrize("every", [1, 4])
def test_a_redraw_follows_equation_3(rate: float, every: int) -> None:
    """w ← w ⊙ m + (1 − m) ⊙ [(1 − b) ⊙ w + b ⊙ w̃], before the forward of iteration t where (t + 1) mod K_per = 0."""
    model, optimizer, pruner = attach_iterand(every=every, rate=rate, sparsity=0.5, seed=3)
    now = {s.name: RandomStream(3, "sc").weights(s.name, s.target.fan_in, s.parameter.detach()) for s in pruner.slots}
    for step in range(9):
        if (step + 1) % every == 0:
            for slot in pruner.slots:
                coins, signs = draw_coins_and_signs(slot.name, slot.mask.shape, (step + 1) // every, rate, 3)
                fresh = signs * now[slot.name].abs().max()
                now[slot.name] = torch.where(~slot.mask & coins, fresh, now[slot.name])
        assert is_identical(copy_weights(pruner), now), f"before iteration {step}"
        train(model, optimizer, [step])


def test_a_redraw_of_four_weights_by_hand() -> None:
    """With p = 1/2, r = 1, K_per = 2 the first step is followed by a re-draw of both pruned weights and no others."""
    model = LinearStack(a=[[9.0] * 4])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = pm.IteRand(sparsity=0.5, rate=1.0, every=2, distribution="ku", include="a").attach(
        model, optimizer, total_steps=8
    )
    slot = pruner.slots[0]
    slot.latent.copy_(torch.tensor([[4.0, 3.0, 2.0, 1.0]]))  # type: ignore[union-attr]
    first, second = (RandomStream(0, "ku").weights_at("a.weight", 4, torch.arange(4), k).double() for k in (0, 1))
    make_linear_loss(model, a=[[0.0] * 4]).backward()
    optimizer.step()
    assert slot.weight.tolist() == [[first[0], first[1], second[2], second[3]]]  # type: ignore[union-attr]
    assert slot.draw_number.tolist() == [[0, 0, 1, 1]]  # type: ignore[union-attr]
    assert model.a.weight.tolist() == [[first[0], first[1], 0, 0]], "the re-draw changed the model"
    optimizer.step()
    assert slot.draw_number.tolist() == [[0, 0, 1, 1]], "there was another re-draw before two more steps"  # type: ignore[union-attr]


@pytest.mark.parametrize("distribution", ["sc", "ku"])
def test_only_redraws_change_weights(distribution: str) -> None:
    model, optimizer, pruner = attach_iterand(every=4, rate=0.3, distribution=distribution, sparsity=0.6)
    drawn = 0
    for step in range(TOTAL):
        before, masks = copy_weights(pruner), {n: m.clone() for n, m in pruner.masks().items()}
        train(model, optimizer, [step])
        after = copy_weights(pruner)
        due = (step + 2) % 4 == 0 and step + 1 < TOTAL  # before the next forward
        for name, weight in after.items():
            changed = weight != before[name]
            assert due or not changed.any()
            assert not changed[pruner.masks()[name]].any(), "a kept weight was drawn again"
            drawn += int(changed.sum())
        assert masks.keys() == pruner.masks().keys()
    assert drawn > 0


def test_a_redraw_does_not_change_scores_and_momentum() -> None:
    runs = [attach_iterand(every=5, rate=rate, sparsity=0.5) for rate in (0.0, 1.0)]
    for model, optimizer, _ in runs:
        train(model, optimizer, range(4))  # the first re-draw follows the fourth step
    states = [
        [optimizer.state[p]["momentum_buffer"] for p in model.parameters() if p in optimizer.state]
        for model, optimizer, _ in runs
    ]
    assert is_identical(states[0], states[1])
    assert is_identical(runs[0][2].state_dict()["latents"], runs[1][2].state_dict()["latents"])
    assert is_identical(runs[0][0].state_dict(), runs[1][0].state_dict())
    assert not is_identical(copy_weights(runs[0][2]), copy_weights(runs[1][2]))


def test_a_rate_of_zero_is_edge_popup() -> None:
    model, optimizer, pruner = attach_iterand(every=3, rate=0.0, sparsity=0.6)
    other = make_model()
    plain = make_sgd(other)
    popup = pm.EdgePopup(sparsity=0.6, every=3).attach(other, plain, total_steps=TOTAL)
    train(model, optimizer, range(TOTAL))
    train(other, plain, range(TOTAL))
    assert is_identical(model.state_dict(), other.state_dict())
    assert pruner.history == popup.history
    assert all(slot.draw_number is None for slot in pruner.slots), "draw numbers are stored without re-draws"


@pytest.mark.parametrize("stop", [2, 3, 10, 29])
def test_a_resumed_run_of_iterand_is_bit_identical(stop: int) -> None:
    options = {"every": 4, "rate": 0.4, "distribution": "ku", "sparsity": 0.6, "allocation": "global"}
    model, optimizer, pruner = attach_iterand(**options)
    train(model, optimizer, range(stop))
    file = save_and_load({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(stop, TOTAL))
    other, other_optimizer, resumed = attach_iterand(model_seed=5, **options)
    other.load_state_dict(file["model"])
    other_optimizer.load_state_dict(file["optimizer"])
    train(other, other_optimizer, range(stop, TOTAL))
    assert is_identical(other.state_dict(), model.state_dict())
    assert is_identical(copy_weights(resumed), copy_weights(pruner))
    assert is_identical(resumed.state_dict(), pruner.state_dict())


def test_there_is_no_redraw_after_the_last_step() -> None:
    model, optimizer, pruner = attach_iterand(every=TOTAL + 1, rate=1.0)
    before = copy_weights(pruner)
    train(model, optimizer, range(TOTAL))
    compute_loss(model, 0).backward()
    assert is_identical(copy_weights(pruner), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.5}, "got 1.5"),
        ({"every": 0}, r"K_per, between re-draws\) and must be ≥ 1, got 0"),
        ({"every": -3}, "must be ≥ 1, got -3"),
        ({"rate": -0.1}, r"in \[0, 1\], got -0\.1"),
        ({"rate": 1.1}, r"in \[0, 1\], got 1\.1"),
        ({"rate": float("nan")}, r"in \[0, 1\], got nan"),
    ],
)
def test_invalid_options_of_iterand_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        pm.IteRand(**options)
