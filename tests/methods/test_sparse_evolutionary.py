"""SET: random sparse layers; at every epoch the smallest weights are dropped and as many grow at random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import Net, compute_loss, make_adam, make_sgd, train
from reference_methods import (
    LinearStack,
    Masks,
    ReferenceTraining,
    draw_random_scores,
    get_mask_rows,
    get_weight_rows,
    keep_largest,
    make_zero_lr_sgd,
    step_with_gradients,
    train_beside_reference,
)

import pomona as pm

TARGETS = ("conv1.weight", "conv2.weight", "hidden.weight")
ZERO = [[0.0] * 4] * 2


def test_set_by_hand() -> None:
    # Start, the draws of seed 0:  .50 .77 .09 .13    two of eight are pruned, .09 and .13:  1 1 0 0
    #                              .31 .63 .49 .90                                           1 1 1 1
    model = LinearStack(a=[[3.0, 1.0, 9.0, 9.0], [-2.0, -1.0, 2.0, -4.0]])
    optimizer = make_zero_lr_sgd(model)
    pruner = pm.SET(sparsity=0.25, share=0.4, every=1, allocation="uniform", include=["a"])
    pruner.attach(model, optimizer, total_steps=4)
    assert get_mask_rows(pruner) == [[1, 1, 0, 0], [1, 1, 1, 1]]

    # Update 1: of the positives 3, 1, 2 the smallest ⌊0.4·3⌋ = 1 is dropped: 1. Of the negatives −2, −1, −4 the
    # largest one: −1. Draws of seed 0 + 1000003·1 where free, (0,1) (0,2) (0,3) (1,1): .51 .75 .56 .35;
    # two grow, (0,2) and (0,3), at zero.
    step_with_gradients(model, optimizer, a=ZERO)
    assert get_mask_rows(pruner) == [[1, 0, 1, 1], [1, 0, 1, 1]]
    assert get_weight_rows(model) == [[3.0, 0.0, 0.0, 0.0], [-2.0, 0.0, 2.0, -4.0]]

    # Update 2: nothing was learned, so the two that grew are still zero and are dropped; ⌊0.4·2⌋ = 0 of 3, 2 and of
    # −2, −4. Draws of 2000006 where free, (0,1) (0,2) (0,3) (1,1): .34 .38 .32 .88: (0,2), drawn again, and (1,1).
    step_with_gradients(model, optimizer, a=ZERO)
    assert get_mask_rows(pruner) == [[1, 0, 1, 0], [1, 1, 1, 1]]

    # Update 3: (0,2) and (1,1) are dropped. Draws of 3000009 at (0,1) (0,2) (0,3) (1,1): .84 .32 .43 .51.
    step_with_gradients(model, optimizer, a=ZERO)
    assert get_mask_rows(pruner) == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert get_weight_rows(model) == [[3.0, 0.0, 0.0, 0.0], [-2.0, 0.0, 2.0, -4.0]]

    # The masks are fixed after the last step.
    step_with_gradients(model, optimizer, a=ZERO)
    assert get_mask_rows(pruner) == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_weights_dropped_and_grown_again_start_from_zero() -> None:
    # Seven of eight are kept (.09 is not), and ⌊0.9·7⌋ = 6 of the positives are dropped: only 8 remains.
    # Seven are free, six grow; .09 of seed 1000003 at (1,0) is the lowest draw and stays pruned.
    model = LinearStack(a=[[1.0, 2.0, 9.0, 3.0], [4.0, 5.0, 6.0, 8.0]])
    optimizer = make_zero_lr_sgd(model)
    pruner = pm.SET(sparsity=0.125, share=0.9, every=1, allocation="uniform", include=["a"])
    pruner.attach(model, optimizer, total_steps=4)
    assert get_mask_rows(pruner) == [[1, 1, 0, 1], [1, 1, 1, 1]]
    step_with_gradients(model, optimizer, a=[[1.0] * 4] * 2)
    assert get_mask_rows(pruner) == [[1, 1, 1, 1], [0, 1, 1, 1]]
    assert get_weight_rows(model) == [[0.0] * 4, [0.0, 0.0, 0.0, 8.0]]
    # Momentum was 1 everywhere on the mask; only 8 keeps it.
    assert optimizer.state[model.a.weight]["momentum_buffer"].tolist() == [[0.0] * 4, [0.0, 0.0, 0.0, 1.0]]


SHARE, TOTAL, EVERY = 0.3, 153, 3


def erdos_renyi_densities(shapes: dict[str, tuple[int, ...]], sparsity: float) -> dict[str, float]:
    """Return the density of each layer, ∝ Σ dims / Π dims; none is above 1 here, so that one factor is enough."""
    raw = {name: sum(shape) / np.prod(shape) for name, shape in shapes.items()}
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    factor = (1 - sparsity) * sum(sizes.values()) / sum(raw[n] * sizes[n] for n in shapes)
    densities = {name: factor * r for name, r in raw.items()}
    assert max(densities.values()) <= 1
    return densities


def rewire_at_random(reference: ReferenceTraining, t: int) -> None:
    """Drop the share ζ of positive and of negative weights nearest to zero; grow as many (Mocanu et al., 2018)."""
    for index, name in enumerate(TARGETS):
        weight, mask = reference.weight(name), reference.masks[name]
        positive, negative = np.sort(weight[mask & (weight > 0)]), np.sort(weight[mask & (weight < 0)])[::-1]
        kept = np.zeros_like(mask)
        kept[np.isin(weight, positive[int(SHARE * len(positive)) :])] = True
        kept[np.isin(weight, negative[int(SHARE * len(negative)) :])] = True
        kept &= mask
        chance = draw_random_scores({name: weight}, 1_000_003 * t + index)[name]
        grown = keep_largest(np.where(kept, -1, chance), int(mask.sum()) - int(kept.sum()))
        for state in (weight, *reference.optimizer_state(name)):
            state[grown] = 0
        reference.masks[name] = kept | grown


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_fifty_updates_match_the_set_reference(make: Any) -> None:
    reference = ReferenceTraining(make)
    weights = {name: reference.weight(name) for name in TARGETS}
    densities = erdos_renyi_densities({n: w.shape for n, w in weights.items()}, 0.7)
    drawn = draw_random_scores(weights, 0)
    reference.masks = {n: keep_largest(s, s.size - round((1 - densities[n]) * s.size)) for n, s in drawn.items()}
    steps = reference.run(TOTAL, rewire_at_random, due=lambda t: t % EVERY == 0 and t < TOTAL)

    model = Net().double()
    pruner = pm.SET(sparsity=0.7, every=EVERY).attach(model, make(model), total_steps=TOTAL)
    assert train_beside_reference(pruner, reference, steps) == 50


def test_set_keeps_the_count_of_every_layer() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SET(sparsity=0.8, share=0.6, every=2).attach(model, optimizer, total_steps=60)
    counts = {name: int(mask.sum()) for name, mask in pruner.masks().items()}
    for t in range(60):
        train(model, optimizer, [t])
        assert {name: int(mask.sum()) for name, mask in pruner.masks().items()} == counts
    assert all(entry["flips"] > 0 for entry in pruner.history)


@pytest.mark.parametrize(
    "make", [make_sgd, lambda m: make_sgd(m, nesterov=False), make_adam, lambda m: make_adam(m, amsgrad=True)]
)
def test_new_weights_start_from_zero_without_optimizer_state(make: Any) -> None:
    model = Net().double()
    optimizer = make(model)
    pruner = pm.SET(sparsity=0.3, share=0.9, every=5).attach(model, optimizer, total_steps=40)
    regrown = 0
    for t in range(20):
        before = {name: mask.clone() for name, mask in pruner.masks().items()}
        train(model, optimizer, [t])
        for name, mask in pruner.masks().items():
            parameter = model.get_parameter(name)
            fresh = mask & (parameter == 0)
            regrown += int((fresh & before[name]).sum())
            for key, state in optimizer.state[parameter].items():
                if state is not None and state.shape == parameter.shape:
                    assert not state[fresh].any(), f"{key} of a new weight is not zero"
                    assert not state[~mask].any(), f"{key} of a pruned weight is not zero"
    assert regrown > 0, "no weight was dropped and grown again: the case is not tested"


def test_the_classifier_is_dense_and_layers_are_erdos_renyi() -> None:
    model = Net()
    pruner = pm.SET(sparsity=0.7).attach(model, make_sgd(model), total_steps=10, steps_per_epoch=5)
    assert tuple(pruner.masks()) == TARGETS
    densities = erdos_renyi_densities({name: tuple(m.shape) for name, m in pruner.masks().items()}, 0.7)
    for name, mask in pruner.masks().items():
        assert int(mask.sum()) == mask.numel() - round((1 - densities[name]) * mask.numel())


def test_updates_come_once_an_epoch() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SET(sparsity=0.7).attach(model, optimizer, total_steps=20, steps_per_epoch=5)
    train(model, optimizer, range(20))
    assert [entry["step"] for entry in pruner.history] == [0, 5, 10, 15]


def test_masks_depend_on_the_seed_only() -> None:
    def train_with(seed: int) -> Masks:
        model = Net().double()
        optimizer = make_sgd(model)
        pruner = pm.SET(sparsity=0.7, seed=seed, every=2).attach(model, optimizer, total_steps=10)
        train(model, optimizer, range(10))
        return {name: mask.numpy() for name, mask in pruner.masks().items()}

    one, repeated, other = train_with(0), train_with(0), train_with(1)
    assert all(np.array_equal(one[n], repeated[n]) for n in one)
    assert not any(np.array_equal(one[n], other[n]) for n in one)


def test_set_without_epochs_is_refused_at_attach() -> None:
    model = Net()
    before = model.conv1.weight.clone()
    with pytest.raises(pm.PomonaError, match="steps_per_epoch=…\\), or every="):
        pm.SET(sparsity=0.7).attach(model, make_sgd(model), total_steps=20)
    assert torch.equal(model.conv1.weight, before), "attach changed a weight before it raised"


@pytest.mark.parametrize("options", [{"share": 0.0}, {"share": 1.0}, {"every": 0}, {"every": -1}])
def test_invalid_options_of_set_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(pm.PomonaError, match=f"got {next(iter(options.values()))}"):
        pm.SET(**options)


def test_gradients_of_pruned_weights_are_zero() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.SET(sparsity=0.7, every=100).attach(model, optimizer, total_steps=200)
    compute_loss(model, 0).backward()
    assert not any(model.get_parameter(n).grad[~m].any() for n, m in pruner.masks().items())
