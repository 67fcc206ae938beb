"""Learning rates against hand-worked numbers, optimizers against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pomona.errors import PomonaError
from pomona.lab.recipes.optimizers import OPTIMIZERS, RATES, SGD, AdamW, Constant, Cosine, Step


def test_step_decay_at_shares_of_training():
    rate = Step(milestones=(0.5, 0.75), gamma=0.1).over(0.2, total_steps=300 * 4, steps_per_epoch=4)
    assert [rate(s) for s in (0, 599)] == [0.2, 0.2]
    assert rate(600) == rate(899) == pytest.approx(0.02)
    assert rate(900) == rate(1199) == pytest.approx(0.002)


def test_step_decay_at_whole_epochs_is_the_wide_resnet_schedule():
    rate = Step(milestones=(60, 120, 160), gamma=0.2).over(0.1, 200 * 391, 391)
    wanted = {0: 0.1, 59: 0.1, 60: 0.02, 119: 0.02, 120: 0.004, 160: 0.0008, 199: 0.0008}
    for epoch, lr in wanted.items():
        assert rate(epoch * 391) == pytest.approx(lr)
    assert rate(60 * 391 - 1) == 0.1


def test_step_decay_is_torchs_multistep():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.2)
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], 0.1)
    ours = Step(milestones=(5, 3), gamma=0.1, per="epoch").over(0.2, 8 * 7, 7)
    for epoch in range(8):
        assert ours(epoch * 7) == ours(epoch * 7 + 6) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_warmup_of_dpf_on_imagenet_rises_from_a_quarter():
    rate = Step(milestones=(30, 60, 80), warmup=5, warmup_start=0.25).over(0.4, 90 * 10, 10)
    assert rate(0) == pytest.approx(0.1 + 0.3 / 50)
    assert rate(24) == pytest.approx(0.25)
    assert rate(49) == rate(50) == rate(299) == pytest.approx(0.4)
    assert rate(300) == pytest.approx(0.04)
    assert rate(800) == pytest.approx(0.0004)


def test_warmup_per_epoch_has_no_epoch_at_zero():
    rate = Cosine(per="epoch", warmup=5).over(1.0, 105 * 3, 3)
    assert [rate(3 * e) for e in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine_by_hand():
    rate = Cosine().over(0.1, 100, 10)
    assert rate(0) == 0.1
    assert rate(50) == pytest.approx(0.05)
    assert rate(25) == pytest.approx(0.1 * (1 + math.sqrt(0.5)) / 2)
    by_epoch = Cosine(per="epoch").over(0.1, 100, 10)
    assert by_epoch(59) == by_epoch(50) == pytest.approx(0.05)


def test_cosine_rests_at_its_final_rate():
    # IteRand on ImageNet: 5 epochs of warm-up, 95 of cosine, 5 at 1e-5.
    rate = Cosine(per="epoch", warmup=5, rest=5, final=1e-4).over(0.1, 105 * 2, 2)
    assert rate(2 * 5) == pytest.approx(0.1)
    assert [rate(2 * e) for e in (100, 102, 104)] == pytest.approx([1e-5] * 3)
    assert rate(2 * 99) > 1e-5


@given(
    st.sampled_from([Constant(warmup=2), Step(warmup=1.5), Cosine(warmup=1, rest=1), Cosine(per="epoch")]),
    st.integers(1, 9),
    st.integers(1, 20),
)
def test_a_rate_stays_within_lr(schedule, epochs, per_epoch):
    rate = schedule.over(0.3, epochs * per_epoch, per_epoch)
    values = [rate(step) for step in range(epochs * per_epoch)]
    assert all(0 <= value <= 0.3 + 1e-12 for value in values)
    warm = math.ceil(schedule.warmup * per_epoch)
    after = values[warm:]
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ("sgd(lr=0.2, weight_decay=0.0005)", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw(lr=0.01)", torch.optim.AdamW),
    ],
)
def test_optimizers_are_torchs(choice, kind):
    record = OPTIMIZERS.resolve(choice)
    optimizer = record.build([torch.nn.Parameter(torch.ones(2))])
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (record.lr, record.weight_decay)
    if kind is torch.optim.SGD:
        assert (group["momentum"], group["nesterov"]) == (0.9, True)
    else:
        assert tuple(group["betas"]) == (0.9, 0.999)


def test_adamw_decays_the_weights_themselves():
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.zeros(1)
    AdamW(lr=0.1, weight_decay=0.5).build([weight]).step()
    assert weight.item() == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SGD(lr=0), "lr must be above 0"),
        (lambda: SGD(lr=math.nan), "lr must be above 0"),
        (lambda: SGD(momentum=1.0), "momentum must be in"),
        (lambda: SGD(momentum=0.0), "set nesterov = false"),
        (lambda: OPTIMIZERS.resolve("sdg"), "did you mean 'sgd'"),
        (lambda: OPTIMIZERS.resolve("adam(momentum=0.9)"), "option of optimizer 'adam'"),
        (lambda: RATES.resolve({"name": "step", "milestones": [1.5]}), "a milestone is"),
        (lambda: RATES.resolve({"name": "step", "milestones": 3}), "takes a list"),
        (lambda: RATES.resolve({"name": "cosin"}), "did you mean 'cosine'"),
        (lambda: Cosine(per="batch"), "'step' or 'epoch'"),
        (lambda: Step(gamma=0.0), "gamma must be"),
        (lambda: Step(warmup=-1), "warmup must be"),
    ],
)
def test_bad_settings_are_refused(make, says):
    with pytest.raises(PomonaError, match=says):
        make()
