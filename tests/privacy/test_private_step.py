"""Steps by hand: gradients of examples, clipping, masks, noise, the budget, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pomona.models as models
from pomona.errors import PomonaError
from pomona.patterns.selection import select_largest_per_row
from pomona.privacy import Budget, Exponential, PrivateStep, Source, fix, gip, problems, validate
from pomona.privacy import step as stepping
from pomona.privacy.examples import Batchable, Convolution, lstm, per_example, summed, taps
from pomona.privacy.validate import probe

ROWS = 40


def budget(steps: int = 8, share: float = 0.0, index: float = 0.0, sigma: float = 1.0, batch: int = 20) -> Budget:
    """As solved elsewhere: the numbers need not be true here."""
    return Budget(2.0, 1e-5, ROWS, batch, steps, share, sigma, index, ((steps // 2, 1.0), (steps, 2.0)))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 5)
    ).double()


def data(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 2, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (ROWS,), generator=generator)


class Quiet(Source):
    """No noise."""

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape)


def make(seed: int = 0, *, settled: Budget | None = None, quiet: bool = False, lr: float = 1.0, **options):
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    source = (Quiet if quiet else Source)(seed=3)
    return model, PrivateStep(model, optimizer, settled or budget(), source=source, **{"method": "dpsgd", **options})


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def one_by_one(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(rows, d) gradients by a backward pass for each row."""
    rows = []
    for row, target in zip(x, y, strict=True):
        grads = torch.autograd.grad(F.cross_entropy(model(row[None]), target[None]), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


# ---- gradients of examples


def test_gradients_are_those_of_each_row_alone():
    model, (x, y) = network(), data()
    gradients, losses = per_example(model, F.cross_entropy, dict(model.named_parameters()), x, y)
    ours = torch.cat([g.flatten(1) for g in gradients.values()], 1)
    assert torch.allclose(ours, one_by_one(model, x, y), atol=1e-12)
    assert torch.allclose(losses, F.cross_entropy(model(x), y, reduction="none"))
    total = summed(model, F.cross_entropy, dict(model.named_parameters()), x, y)
    assert all(torch.allclose(total[name], gradients[name].sum(0)) for name in total)


def test_views_are_averaged():
    model, (x, y) = network(), data()
    views = torch.stack([x, x.flip(-1), 2 * x], 1)
    parameters = dict(model.named_parameters())
    gradients, _ = per_example(model, F.cross_entropy, parameters, views, y, views=3)
    each = [per_example(model, F.cross_entropy, parameters, view, y)[0] for view in views.unbind(1)]
    total = summed(model, F.cross_entropy, parameters, views, y, views=3)
    for name, ours in gradients.items():
        assert torch.allclose(ours, torch.stack([one[name] for one in each]).mean(0))
        assert torch.allclose(total[name], ours.sum(0))


def test_gradients_equal_those_of_opacus():
    GradSampleModule = pytest.importorskip("opacus").GradSampleModule

    torch.manual_seed(0)
    model = models.build("private_cnn")
    x, y = torch.randn(12, 3, 32, 32), torch.randint(10, (12,))
    ours, _ = per_example(model, F.cross_entropy, dict(model.named_parameters()), x, y)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    F.cross_entropy(wrapped(x.requires_grad_()), y, reduction="sum").backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter.grad_sample, rtol=1e-4, atol=1e-6)


def test_the_convolution_for_gpus_has_the_same_gradients(monkeypatch):
    model, (x, y) = network(), data()
    model.insert(1, nn.Conv2d(6, 6, 3, padding=2, dilation=2).double())
    parameters = dict(model.named_parameters())
    expected, _ = per_example(model, F.cross_entropy, parameters, x, y)
    used = []

    class Always(Batchable):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") == "conv2d":
                used.append(1)
                inputs, weight, bias, *shape, _ = args
                return Convolution.apply(inputs, weight, *shape) + bias[:, None, None]
            return super().__torch_function__(func, types, args, kwargs)

    monkeypatch.setattr("pomona.privacy.examples.Batchable", Always)
    ours, _ = per_example(model, F.cross_entropy, parameters, x, y)
    assert len(used) == 2
    assert all(torch.allclose(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("shape", [(1, 0, 1), ((2,), (1,), (2,)), ((3, 2), (0, 2), (1, 3)), ((2, 3), (2, 1), (2, 1))])
def test_taps_are_unfolded_patches(kernel, shape):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, 9, 8).double(), torch.randn(4, 2, *kernel).double().requires_grad_()
    out = F.conv2d(x, weight, None, *shape)
    patches = taps(x, kernel, out.shape[2:], *shape).flatten(3).flatten(1, 2)
    stride, padding, dilation = (value if isinstance(value, int) else (value * 2)[:2] for value in shape)
    assert torch.equal(patches, F.unfold(x, kernel, dilation, padding, stride))
    one, other = (torch.autograd.grad(y.square().sum(), weight)[0] for y in (Convolution.apply(x, weight, *shape), out))
    assert torch.allclose(one, other)


@pytest.mark.parametrize(
    ("layers", "both", "bias", "first"), [(1, False, True, True), (2, True, True, False), (2, False, False, True)]
)
def test_the_lstm_is_torchs(layers, both, bias, first):
    torch.manual_seed(0)
    theirs = nn.LSTM(3, 4, layers, bias=bias, batch_first=first, bidirectional=both).double()
    x, state = torch.randn(5, 6, 3).double(), torch.randn(2, layers * (1 + both), 5 if first else 6, 4).double()
    out, (h, c) = theirs(x, tuple(state))
    ours = lstm(x, tuple(state), list(theirs._flat_weights), bias, layers, 0.0, True, both, first)
    for one, other in zip(ours, (out, h, c), strict=True):
        assert torch.allclose(one, other)


def test_an_lstm_has_gradients_of_each_row():
    torch.manual_seed(0)
    model = models.build("bilstm", vocabulary=11, embedding=4, hidden=3, dropout=0.0).double()
    x, y = torch.randint(0, 11, (6, 7)), torch.randint(2, (6,))
    ours, _ = per_example(model, F.cross_entropy, dict(model.named_parameters()), x, y)
    expected = one_by_one(model, x, y)
    assert torch.allclose(torch.cat([g.flatten(1) for g in ours.values()], 1), expected)


# ---- a step


def test_a_step_clips_each_example_and_divides_by_the_expected_size():
    model, step = make(quiet=True, clip=0.5)
    (x, y), before = data(), flat(model)
    rows = step.draw()
    gradients = one_by_one(model, x[rows], y[rows])
    norms = gradients.norm(dim=1, keepdim=True)
    assert bool((norms > 0.5).any())
    expected = (gradients * (0.5 / norms).clamp(max=1)).sum(0) / 20
    loss = step(x[rows], y[rows])
    assert torch.allclose(before - flat(model), expected)
    with torch.no_grad():
        assert float(loss) == pytest.approx(float(F.cross_entropy(network()(x[rows]), y[rows])))
    assert len(rows) != 20  # a Poisson sample has no fixed size


@pytest.mark.parametrize("method", ["dpsgd", "random", "gip"])
def test_micro_batches_change_nothing(method):
    (x, y), ends = data(), []
    settled = budget(share=0.5, index=30.0) if method == "gip" else budget()
    for micro in (256, 7):
        model, step = make(settled=settled, method=method, keep=0.3, micro=micro, schedule="constant", group=50)
        for rows in step:
            step(x[rows], y[rows])
        ends.append(flat(model))
    assert torch.allclose(*ends, atol=1e-9)


def test_noise_has_its_size_and_falls_on_what_is_kept_alone():
    settled = budget(steps=60, sigma=3.0)
    model, step = make(settled=settled, method="random", keep=0.25, schedule="constant", clip=2.0, group=None)
    x, changes = data()[0] * 0, []
    for rows in step:
        before = flat(model)
        step(x[rows], torch.zeros(len(rows), dtype=torch.int64))
        changes.append(flat(model) - before)
    moved = torch.stack(changes) != 0
    assert (moved.sum(1) == round(0.25 * step.size)).all()
    # Most of what moved is noise of σ C / B = 3·2/20; the biases move a little by themselves.
    weights = torch.stack(changes)[:, :108]
    assert float(weights[weights != 0].std()) == pytest.approx(0.3, rel=0.1)


def test_gip_keeps_the_top_of_the_mean_gradient_where_theta_is_large():
    settled = budget(share=0.5, index=1e6)
    (x, y) = data()
    model, step = make(settled=settled, method="gip", keep=0.2, schedule="constant", group=50, quiet=True)
    rows, before = step.draw(), flat(model)
    gradients = one_by_one(model, x[rows], y[rows])
    total = gradients.sum(0)
    whole = len(total) // 50 * 50
    top = torch.cat(
        [
            select_largest_per_row(total[:whole].abs().view(-1, 50), 10).flatten(),
            select_largest_per_row(total[whole:].abs()[None], round(0.2 * (len(total) - whole)))[0],
        ]
    )
    masked = gradients * top  # the mask comes first, the norm is of what is left
    expected = (masked * (1.0 / masked.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0) / 20
    step(x[rows], y[rows])
    assert torch.allclose(before - flat(model), expected)


def test_public_data_chooses_the_indices_for_nothing():
    x, y = data()
    public = data(seed=9)
    model, step = make(method="public", public=public, keep=0.1, schedule="constant", group=None, quiet=True)
    grads = torch.autograd.grad(F.cross_entropy(model(public[0]), public[1]), list(model.parameters()))
    scores = torch.cat([g.flatten() for g in grads]).abs()
    top = scores >= scores.sort(descending=True).values[round(0.1 * len(scores)) - 1]
    rows, before = step.draw(), flat(model)
    step(x[rows], y[rows])
    assert not bool(((flat(model) != before) & ~top).any())
    assert step.lost() is None


def test_an_example_without_a_finite_gradient_counts_as_none():
    model, step = make(quiet=True)
    x, y = data()
    rows, before = step.draw(), flat(model)
    gradients = one_by_one(model, x[rows], y[rows])[1:]
    expected = (gradients * (1 / gradients.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0) / 20
    x[rows[0]] = math.nan
    step.done = 1  # the probe of the first step is for models, not for data
    step(x[rows], y[rows])
    assert torch.allclose(before - flat(model), expected)


def test_an_empty_sample_is_a_step_of_noise():
    model, step = make(settled=budget(batch=1))
    x, y = data()
    step.source.poisson = lambda rows, rate: torch.zeros(0, dtype=torch.int64)  # type: ignore[method-assign]
    before, rows = flat(model), step.draw()
    assert float(step(x[rows], y[rows])) == 0
    assert bool((flat(model) != before).all())
    settled = budget(share=0.5, index=1.0, batch=1)
    model, step = make(settled=settled, method="gip", keep=0.5, schedule="constant")
    step.source.poisson = lambda rows, rate: torch.zeros(0, dtype=torch.int64)  # type: ignore[method-assign]
    before, rows = flat(model), step.draw()
    step(x[rows], y[rows])
    assert int((flat(model) != before).sum()) == sum(step.mechanism(0).groups(step.size)[1])


def test_the_schedule_keeps_ever_fewer():
    settled = budget(steps=100, share=0.5, index=1.0)
    linear = make(settled=settled, method="gip", keep=0.1)[1]
    assert [linear.kept(t) for t in (0, 50, 100)] == pytest.approx([1.0, 0.55, 0.1])
    slow = make(settled=settled, method="gip", keep=0.1, schedule=Exponential())[1]
    # The authors' 99.9 − exp(log(99.9 − 10)·t/T) per cent.
    for t in (0, 30, 60, 99):
        assert 100 * slow.kept(t) == pytest.approx(99.9 - math.exp(math.log(89.9) * t / 100), abs=0.2)
    assert make(settled=settled, method="gip", keep=0.1, schedule="constant")[1].kept(0) == pytest.approx(0.1)
    assert make()[1].kept() == 1.0
    facts = linear.facts()
    assert facts["lost"]["end"] <= facts["random_loses"]["end"]
    assert facts["random_loses"]["end"] == pytest.approx(1 - linear.kept(99), abs=0.01)


def test_momentum_and_adam_take_the_private_gradient():
    x, y = data()
    model = network()
    step = PrivateStep(
        model, torch.optim.Adam(model.parameters(), 0.05), budget(), method="dpsgd", source=Quiet(seed=1), clip=10.0
    )
    first = F.cross_entropy(model(x), y)
    for rows in step:
        step(x[rows], y[rows])
    assert bool(F.cross_entropy(model(x), y) < first)
    assert step.done == 8
    assert all(p.grad is None for p in model.parameters())


# ---- the budget


def test_steps_end_with_the_budget():
    _, step = make()
    x, y = data()
    seen = []
    for rows in step:
        step(x[rows], y[rows])
        seen.append(step.spent)
    assert seen == [1.0] * 4 + [2.0] * 4
    with pytest.raises(PomonaError, match="the budget of ε=2 is spent after 8 steps"):
        step.draw()


def test_batches_that_were_not_drawn_are_refused():
    _, step = make()
    x, y = data()
    with pytest.raises(PomonaError, match="a step got 20 rows where none were drawn"):
        step(x[:20], y[:20])
    rows = step.draw()
    with pytest.raises(PomonaError, match="no Poisson sample"):
        step(x[rows][:-1], y[rows][:-1])
    step(x[rows], y[rows])
    with pytest.raises(PomonaError, match="once each"):
        step(x[rows], y[rows])  # accumulation, or the same sample twice
    assert step.done == 1


def test_resumed_steps_are_those_that_were_not_stopped():
    x, y = data()
    settled = budget(share=0.5, index=20.0)
    options = {"settled": settled, "method": "gip", "keep": 0.3, "group": 50}
    model, step = make(**options)
    state = weights = None
    for rows in step:
        step(x[rows], y[rows])
        if step.done == 3:
            state, weights = step.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    other, again = make(**options)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    assert again.spent == 1.0
    for rows in again:
        again(x[rows], y[rows])
    assert torch.equal(flat(model), flat(other))


def test_another_budget_cannot_take_over():
    state = make()[1].state_dict()
    for other in (budget(sigma=0.5), dataclasses.replace(budget(), epsilon=3.0), budget(steps=9)):
        with pytest.raises(PomonaError, match="began with another budget"):
            make(settled=other)[1].load_state_dict(state)
    with pytest.raises(PomonaError, match="method: random, not dpsgd"):
        make(method="random", keep=0.5)[1].load_state_dict(state)


def test_gip_solves_its_budget_first():
    pytest.importorskip("dp_accounting")
    model = network()
    step = gip(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        rows=ROWS,
        batch_size=20,
        epsilon=4,
        delta=1e-5,
        steps=3,
        share=0.05,
        keep=0.2,
        seed=1,
    )
    assert step.budget.epsilon == 4
    assert step.budget.index > 0
    assert step.mechanism(2).cost(step.size) == pytest.approx(step.budget.index)
    plain = gip(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        rows=ROWS,
        batch_size=20,
        epsilon=4,
        delta=1e-5,
        steps=3,
        method="dpsgd",
        secure=True,
    )
    assert plain.budget.index == 0.0
    assert plain.budget.sigma < step.budget.sigma
    assert plain.source.secure
    assert "generator" not in str(plain.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gap"}, "unknown private method 'gap': did you mean 'gip'"),
        ({"keep": 0.0}, "keep is the share"),
        ({"keep": 0.001}, "leaves none of a group of 256"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"clip": math.inf}, "no privacy"),
        ({"micro": 0}, "micro and views"),
        ({"method": "gip"}, "needs one"),
        ({"settled": budget(share=0.1, index=1.0)}, "makes none that cost"),
        ({"method": "public"}, "public data goes with"),
    ],
)
def test_bad_steps_are_refused(options, message):
    with pytest.raises(PomonaError, match=message):
        make(**options)


def test_an_optimizer_of_other_parameters_is_refused():
    optimizer = torch.optim.SGD(network().parameters(), 0.1)
    with pytest.raises(PomonaError, match="of which 0 are the model's"):
        PrivateStep(network(), optimizer, budget(), method="dpsgd")


# ---- models


def test_batch_norm_is_named_and_can_be_replaced():
    torch.manual_seed(0)
    model = models.build("wrn16_4")
    assert len(problems(model)) == 13
    with pytest.raises(PomonaError, match=r"'blocks.0.norm1' is a BatchNorm2d.* group norm.*\(12 more"):
        validate(model)
    with pytest.raises(PomonaError, match="BatchNorm2d"):
        PrivateStep(model, torch.optim.SGD(model.parameters(), 0.1), budget(), method="dpsgd")
    fixed = fix(model)
    assert fixed is model
    assert problems(model) == []
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert {norm.num_groups for norm in norms} == {16}
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_norms_keep_their_weights_and_statistics_end():
    model = nn.Sequential(
        nn.BatchNorm1d(6), nn.InstanceNorm2d(4, track_running_stats=True), nn.BatchNorm2d(24, affine=False)
    )
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    fix(model.eval())
    assert model[0].num_groups == 1
    assert model[0].weight.tolist() == [3.0] * 6
    assert model[2].num_groups == 8
    assert model[2].weight is None
    assert not list(model.buffers())
    assert not model[2].training
    model[1](torch.randn(2, 4, 3, 3))


class Counting(nn.Module):
    """Keeps the mean of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.add_(x.mean(0))
        return self.linear(x)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x - x.mean(0))


def test_buffers_and_outputs_in_which_examples_meet_are_refused():
    x = torch.randn(ROWS, 3)
    with pytest.raises(PomonaError, match="the buffer 'mean' takes something"):
        probe(Counting(), x)
    with pytest.raises(PomonaError, match="depends on the others"):
        probe(Mixing(), x)
    probe(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LayerNorm(4)), x)
    model = Mixing()
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), 0.1), budget(), method="dpsgd", source=Source(seed=0))
    rows = step.draw()
    with pytest.raises(PomonaError, match="depends on the others"):
        step(x[rows], torch.zeros(len(rows), dtype=torch.int64))
    assert step.done == 0


def test_the_small_network_is_small_and_private():
    model = models.build("private_cnn")
    assert sum(p.numel() for p in model.parameters()) == 66_410
    validate(model)
    probe(model, torch.randn(3, 3, 32, 32))
    assert models.build("private_cnn", in_channels=1, rho=0.5)(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(PomonaError, match="base must be above 1"):
        Exponential(base=1.0)


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(PomonaError, match="no parameter to train"):
        validate(nn.ReLU())


def test_dropout_differs_between_examples():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 2)).double()
    x = torch.ones(30, 50, dtype=torch.float64)
    gradients, _ = per_example(
        model, F.cross_entropy, dict(model.named_parameters()), x, torch.zeros(30, dtype=torch.int64)
    )
    assert len({tuple((row != 0).any(0).tolist()) for row in gradients["1.weight"]}) > 20


def test_frozen_parameters_stay():
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), 0.1), budget(), method="dpsgd", source=Source(seed=0))
    x, y = data()
    rows = step.draw()
    step(x[rows], y[rows])
    assert step.size == 12 + 54 * 5 + 5
    assert torch.equal(model[0].weight, before)


def test_nothing_of_the_gradient_is_kept(caplog):
    _, step = make(settled=budget(share=0.5, index=1.0), method="gip", keep=0.5)
    x, y = data()
    rows = step.draw()
    step(x[rows], y[rows])
    tensors = [value for value in vars(step).values() if isinstance(value, torch.Tensor)]
    assert tensors == []
    assert caplog.text == ""
    assert stepping.METHODS == ("dpsgd", "random", "public", "gip")


@pytest.mark.gpu
def test_a_step_on_the_gpu_is_the_step_on_the_cpu():
    (x, y), ends = data(), []
    for device in ("cpu", "cuda"):
        model = network().to(device)
        step = PrivateStep(
            model, torch.optim.SGD(model.parameters(), 1.0), budget(), method="dpsgd", source=Quiet(device, seed=0)
        )
        step.source.normal = lambda *shape, device=device: torch.zeros(shape, device=device)
        step.drawn = 20
        step(x[:20].to(device), y[:20].to(device))
        ends.append(flat(model).cpu())
    assert torch.allclose(*ends, atol=1e-9)
