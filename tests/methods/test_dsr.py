"""DSR: weights below one threshold for all layers are dropped, and as many grow at random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import Net, make_adam, make_sgd, train
from reference_methods import (
    LinearStack,
    ReferenceTraining,
    draw_random_masks,
    draw_random_scores,
    get_mask_rows,
    get_weight_rows,
    keep_largest,
    make_zero_lr_sgd,
    step_with_gradients,
    train_beside_reference,
)

import pomona as pm

TARGETS = ("conv2.weight", "hidden.weight")  # the first layer and the classifier are dense
ZERO = [[0.0] * 4] * 2


def test_dsr_by_hand() -> None:
    # Start, the draws of seed 0, half of each layer:
    #   a  .50 .77 .09 .13   1 1 0 0        b  .46 .63 .35 .40   1 1 0 1
    #      .31 .63 .49 .90   0 1 0 1           .02 .17 .29 .52   0 0 0 1
    # N_p = 0.5 · 16 = 8, so that the threshold doubles where fewer than 0.9·8 = 7.2 are dropped.
    model = LinearStack(
        a=[[3.0, 0.5, 9.0, 9.0], [9.0, -0.2, 9.0, 4.0]], b=[[5.0, -6.0, 9.0, 2.0], [9.0, 9.0, 9.0, 0.9]]
    )
    optimizer = make_zero_lr_sgd(model)
    pruner = pm.DSR(sparsity=0.5, every=1, churn=0.5, threshold=1.0, include=["a", "b"])
    pruner.attach(model, optimizer, total_steps=100)
    assert get_mask_rows(pruner, "a") == [[1, 1, 0, 0], [0, 1, 0, 1]]
    assert get_mask_rows(pruner, "b") == [[1, 1, 0, 1], [0, 0, 0, 1]]

    # Update 1, H = 1: 0.5 and −0.2 of a are dropped, 0.9 of b. 2 and 3 remain, so of the three a grows 3·2/5 = 1.2
    # and b 1.8: whole parts 1 and 1, the last to b. Draws of seed 0 + 1 + 1 at what was free before:
    #   a (0,2) (0,3) (1,0) (1,2): .64 .47 .71 .44      b (0,2) (1,0) (1,1) (1,2): .57 .39 .91 .53
    step_with_gradients(model, optimizer, a=ZERO, b=ZERO)
    assert get_mask_rows(pruner, "a") == [[1, 0, 0, 0], [1, 0, 0, 1]]
    assert get_mask_rows(pruner, "b") == [[1, 1, 1, 1], [0, 1, 0, 0]]
    assert get_weight_rows(model, "a") == [[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]]

    # Update 2, H = 2: the zeros that grew are dropped; 2 is not below 2. 2 and 3 remain again: 1 and 2 grow.
    # Draws of seed 3:
    #   a (0,1) (0,2) (0,3) (1,1) (1,2): .11 .29 .03 .06 .77      b (1,0) (1,2) (1,3): .15 .05 .46
    step_with_gradients(model, optimizer, a=ZERO, b=ZERO)
    assert get_mask_rows(pruner, "a") == [[1, 0, 0, 0], [0, 0, 1, 1]]
    assert get_mask_rows(pruner, "b") == [[1, 1, 0, 1], [1, 0, 0, 1]]

    # Update 3, H = 4: of a 3 and a zero are dropped, of b 2 and two zeros. 1 and 2 remain; of the five a grows
    # 5/3 = 1.67, b 3.33: 1 and 3, the last to a. Draws of seed 4:
    #   a (0,1) (0,2) (0,3) (1,0) (1,1): .56 .09 .21 .01 .04      b (0,2) (1,1) (1,2): there are no more than three
    step_with_gradients(model, optimizer, a=ZERO, b=ZERO)
    assert get_mask_rows(pruner, "a") == [[0, 1, 0, 1], [0, 0, 0, 1]]
    assert get_mask_rows(pruner, "b") == [[1, 1, 1, 0], [0, 1, 1, 0]]

    # Update 4, H = 8: all are below it, and a layer keeps its largest, 4 and −6. Three grow in each. Draws of seed 5:
    #   a (0,0) (0,2) (1,0) (1,1) (1,2): .83 .91 .92 .12 .16      b (0,3) (1,0) (1,3): all three
    step_with_gradients(model, optimizer, a=ZERO, b=ZERO)
    assert get_mask_rows(pruner, "a") == [[1, 0, 1, 0], [1, 0, 0, 1]]
    assert get_mask_rows(pruner, "b") == [[0, 1, 0, 1], [1, 0, 0, 1]]
    assert get_weight_rows(model, "b") == [[0.0, -6.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert pruner.state_dict()["memory"]["threshold"] == 16.0


@pytest.mark.parametrize(
    ("churn", "threshold"),
    [  # Three are dropped at the first update of the test above. The bounds are 1.1 and 0.9 of N_p = 16 · churn.
        (2 / 16, 0.5),  # 3 > 2.2
        (2.8 / 16, 1.0),  # 2.52 ≤ 3 ≤ 3.08
        (3.3 / 16, 1.0),  # 2.97 ≤ 3
        (3.4 / 16, 2.0),  # 3 < 3.06
    ],
)
def test_the_threshold_adapts_by_hand(churn: float, threshold: float) -> None:
    model = LinearStack(
        a=[[3.0, 0.5, 9.0, 9.0], [9.0, -0.2, 9.0, 4.0]], b=[[5.0, -6.0, 9.0, 2.0], [9.0, 9.0, 9.0, 0.9]]
    )
    optimizer = make_zero_lr_sgd(model)
    pruner = pm.DSR(sparsity=0.5, every=1, churn=churn, threshold=1.0, include=["a", "b"])
    pruner.attach(model, optimizer, total_steps=100)
    step_with_gradients(model, optimizer, a=ZERO, b=ZERO)
    assert pruner.state_dict()["memory"]["threshold"] == threshold


CHURN, TOTAL = 0.05, 160


def is_due(t: int) -> bool:
    """Return whether an update is due: the authors' periods in 200 epochs are 1, 2, 4, 8 from epochs 0, 25, 80, 140."""
    epoch = 200 * t / TOTAL
    period = 1 if epoch < 25 else 2 if epoch < 80 else 4 if epoch < 140 else 8
    return t > 0 and t % period == 0 and epoch < 190


class ReferenceReallocation:
    """The update of Mostafa & Wang (2019), with counts rounded by largest remainder."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.thresholds = [threshold]

    def __call__(self, reference: ReferenceTraining, t: int) -> None:
        old, kept = reference.masks, {}
        for name in TARGETS:
            size = np.abs(reference.weight(name))
            kept[name] = old[name] & (size >= self.threshold)
            if not kept[name].any():
                kept[name] = keep_largest(np.where(old[name], size, -1), 1)
        pruned = sum(int(old[n].sum()) - int(kept[n].sum()) for n in TARGETS)
        left = {name: int(kept[name].sum()) for name in TARGETS}
        exact = {name: pruned * left[name] / sum(left.values()) for name in TARGETS}
        growth = {name: int(value) for name, value in exact.items()}
        for name in sorted(TARGETS, key=lambda n: growth[n] - exact[n])[: pruned - sum(growth.values())]:
            growth[name] += 1
        chance = draw_random_scores({name: reference.weight(name) for name in TARGETS}, 1 + t)
        for name in TARGETS:
            assert growth[name] <= (~old[name]).sum(), "a layer is full: choose another setting"
            reference.masks[name] = kept[name] | keep_largest(np.where(old[name], -1, chance[name]), growth[name])
        wanted = CHURN * sum(mask.size for mask in old.values())
        if pruned > 1.1 * wanted:
            self.threshold /= 2
        elif pruned < 0.9 * wanted:
            self.threshold *= 2
        self.thresholds.append(self.threshold)


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_fifty_updates_match_the_dsr_reference(make: Any) -> None:
    reference = ReferenceTraining(make)
    reference.masks = draw_random_masks(reference.model, TARGETS, seed=0, sparsity=0.7)
    reallocate = ReferenceReallocation(0.05)
    steps = reference.run(TOTAL, reallocate, is_due)

    model = Net().double()
    pruner = pm.DSR(sparsity=0.7, every=1, churn=CHURN, threshold=0.05).attach(model, make(model), total_steps=TOTAL)
    assert train_beside_reference(pruner, reference, steps) >= 50
    assert pruner.state_dict()["memory"]["threshold"] == reallocate.threshold
    assert len(set(reallocate.thresholds)) > 2, "the threshold hardly changed"


def test_dsr_keeps_the_total_and_moves_weights_between_layers() -> None:
    model = Net().double()
    optimizer = make_adam(model)
    pruner = pm.DSR(sparsity=0.8, every=2, threshold=0.05, churn=0.1).attach(model, optimizer, total_steps=80)
    total = sum(int(mask.sum()) for mask in pruner.masks().values())
    layers = set()
    for t in range(80):
        train(model, optimizer, [t])
        layers.add(tuple(int(mask.sum()) for mask in pruner.masks().values()))
        assert sum(int(mask.sum()) for mask in pruner.masks().values()) == total
        for name, mask in pruner.masks().items():
            parameter = model.get_parameter(name)
            assert not parameter[~mask].any()
            for value in optimizer.state[parameter].values():
                assert value.shape != mask.shape or not value[~mask].any(), (
                    "optimizer state of a pruned weight is not zero"
                )
    assert len(layers) > 3


def test_dsr_grows_weights_from_zero_at_other_positions_than_it_drops() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.DSR(sparsity=0.5, every=3, threshold=0.05, churn=0.1).attach(model, optimizer, total_steps=300)
    train(model, optimizer, range(2))
    old = {name: mask.clone() for name, mask in pruner.masks().items()}
    train(model, optimizer, [2])
    grown = {name: mask & ~old[name] for name, mask in pruner.masks().items()}
    assert sum(int(new.sum()) for new in grown.values()) > 10
    for name, new in grown.items():
        parameter = model.get_parameter(name)
        assert not parameter[new].any()
        assert not optimizer.state[parameter]["momentum_buffer"][new].any()
        assert (parameter[old[name] & pruner.masks()[name]].abs() >= 0.05).all(), "a weight below the threshold is kept"


def test_dsr_keeps_the_total_where_there_is_little_room() -> None:
    """At a sparsity of 10 % there is room for few weights, and most weights are below the threshold."""
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.DSR(sparsity=0.1, every=2, threshold=0.1, churn=0.3).attach(model, optimizer, total_steps=40)
    total = sum(int(mask.sum()) for mask in pruner.masks().values())
    for t in range(40):
        train(model, optimizer, [t])
        assert sum(int(mask.sum()) for mask in pruner.masks().values()) == total


def test_a_layer_that_would_start_empty_is_refused() -> None:
    model = Net()
    before = model.hidden.weight.clone()
    with pytest.raises(
        pm.PomonaError, match=r"at a sparsity of 99.90% \w+.weight \(\d+ weights\) would start with none"
    ):
        pm.DSR(sparsity=0.999, allocation="global(floor=0)").attach(model, make_sgd(model), total_steps=10)
    assert torch.equal(model.hidden.weight, before)


def test_dsr_refuses_patterns_that_fix_the_sparsity() -> None:
    with pytest.raises(pm.PomonaError, match="fixes every layer's sparsity, and dsr moves weights"):
        pm.DSR(pattern=pm.NM(2, 4))


@pytest.mark.parametrize("options", [{"every": 0}, {"churn": 0.0}, {"churn": 1.0}, {"threshold": 0.0}])
def test_invalid_options_of_dsr_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(pm.PomonaError, match=f"got {next(iter(options.values()))}"):
        pm.DSR(**options)


def test_update_periods_double_and_end() -> None:
    model = Net().double()
    optimizer = make_sgd(model)
    pruner = pm.DSR(sparsity=0.7, every=2).attach(model, optimizer, total_steps=80)
    train(model, optimizer, range(80))
    # 2 until 10 (1/8), 4 until 32 (2/5), 8 until 56 (7/10), 16 until 76 (0.95).
    assert [entry["step"] for entry in pruner.history] == [0, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64]


def test_the_first_layer_and_the_classifier_are_dense() -> None:
    model = Net()
    assert tuple(pm.DSR(sparsity=0.7).attach(model, make_sgd(model), total_steps=10).masks()) == TARGETS
