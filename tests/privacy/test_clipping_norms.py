"""Clipping by layer and norms that change: joint sensitivity, counts with noise, their cost, and how norms follow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_training import (
    NoiselessSource,
    UncheckedBudget,
    assert_close_on_grid,
    flat_parameters,
    gradients_one_by_one,
    make_budget,
    make_data,
    make_network,
    make_step,
    mean_of_clipped,
)
from scipy.stats import norm
from torch import nn

from pomona.errors import PomonaError
from pomona.privacy import Clipping, Ledger, Pair, PrivateStep, Ramp, Source
from pomona.privacy.clipping import MAX_CLIP, MIN_CLIP, UNITS, GradientGrid
from pomona.privacy.clipping_norms import (
    COUNT_UNITS,
    ClippingNorms,
    LayerGrids,
    count_whole,
    gradient_noise,
    group_by_layer,
)

SIZES = {"0.weight": 108, "0.bias": 6, "1.weight": 6, "1.bias": 6, "4.weight": 270, "4.bias": 5}  # of make_network
LAYERS = {"0": 114, "1": 12, "4": 275}
ADAPTIVE = Clipping(layers=True, quantile=0.5)


def norms_of(clipping: Clipping, clip: float = 1.0, steps: int = 8) -> ClippingNorms:
    """Return the norms of a run of `make_network`."""
    return ClippingNorms(clipping, clip, SIZES, make_budget(steps))


# ---- layers


def test_layers_are_modules_in_order():
    network = make_network()
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    assert sizes == SIZES
    assert {name: sum(size) for name, size in group_by_layer(sizes).items()} == LAYERS
    assert group_by_layer({"weight": 3, "a.b.weight": 2, "a.b.bias": 1}) == {"weight": [3], "a.b": [2, 1]}
    with pytest.raises(PomonaError, match="the parameters of 'a' do not follow each other"):
        group_by_layer({"a.weight": 3, "b.weight": 2, "a.bias": 1})


@pytest.mark.parametrize("layers", [True, {"0": 1.0, "1": 2.0, "4": 2.0}])
def test_each_layer_is_clipped_to_its_part_of_the_norm(layers):
    shares = [1.0, 1.0, 1.0] if layers is True else [1.0, 2.0, 2.0]
    norms = [0.3 * share / math.hypot(*shares) for share in shares]
    model, step = make_step(noiseless=True, clip=0.3, clipping=Clipping(layers=layers), micro=7)
    (x, y), before, rows = make_data(), flat_parameters(model), step.draw()
    gradients = gradients_one_by_one(model, x[rows], y[rows]).split(list(LAYERS.values()), 1)
    step(x[rows], y[rows])
    expected = []
    for part, own in zip(gradients, norms, strict=True):
        limit = GradientGrid(0.3, part.shape[1], math.floor(UNITS * own / 0.3)).norm_limit * 0.3 / UNITS
        expected.append((part * (limit / part.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0) / 20)
        assert bool((part.norm(dim=1) > own).any())
    assert_close_on_grid(before - flat_parameters(model), torch.cat(expected), 0.3)


def test_one_layer_is_clipped_as_the_whole():
    x, y = make_data()
    changes = []
    for clipping in (None, Clipping(layers=True)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(72, 5)).double()
        nn.init.ones_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        source = NoiselessSource(seed=1)
        step = PrivateStep(model, optimizer, make_budget(), method="dpsgd", clip=0.1, clipping=clipping, source=source)
        rows = step.draw()
        step(x[rows], y[rows])
        changes.append(flat_parameters(model))
    assert torch.equal(*changes)


@settings(max_examples=60, deadline=None)
@given(
    shares=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6),
    lengths=st.lists(st.floats(0.01, 1e4), min_size=6, max_size=6),
    is_spread=st.booleans(),
    clip=st.floats(1e-3, 1e3),
)
def test_joint_norm_of_the_integers_of_an_example_is_at_most_the_grid(shares, lengths, is_spread, clip):
    """Also where every coordinate is rounded up, and whatever the norms of the layers are."""
    sizes = {f"{k}.weight": 500 + 300 * k for k in range(len(shares))}
    clipping = Clipping(layers={str(k): share for k, share in enumerate(shares)})
    grid = ClippingNorms(clipping, clip, sizes, make_budget()).grid(0)
    generator = torch.Generator().manual_seed(1)
    parts = []
    for size, length in zip(sizes.values(), lengths, strict=False):
        row = torch.randn(1, size, generator=generator) if is_spread else torch.ones(1, size)
        parts.append(length * clip * row / row.norm())
    total = torch.zeros(sum(sizes.values()), dtype=torch.int64)
    grid.add_clipped(parts, total)
    assert 0 < sum(int(value) ** 2 for value in total.tolist()) <= UNITS**2


def test_layers_with_too_large_a_joint_norm_are_refused():
    grids = GradientGrid(1.0, 10, UNITS), GradientGrid(1.0, 10, 1000)
    with pytest.raises(PomonaError, match="a joint norm of 2097152 units"):
        LayerGrids(grids, (1, 1), has_counts=False)
    with pytest.raises(PomonaError, match="the layers of this model are 0, 1, 4; missing or unknown: 1, 4, head"):
        norms_of(Clipping(layers={"0": 1.0, "head": 1.0}))
    with pytest.raises(PomonaError, match="too long for the grid"):
        norms_of(Clipping(layers={"0": 1e9, "1": 1.0, "4": 1.0})).grid(0)


# ---- norms that are fixed in advance


def test_ramps_change_norms_and_noise():
    budget = UncheckedBudget(2.0, 1e-5, 40, 20, 8, 0.0, 3.0, 0.0, ((8, 2.0),), noise_ramp=Ramp(1.0, 2.0, 2))
    _, step = make_step(budget=budget, clip=2.0, clipping={"ramp": (1.0, 0.25)}, lr=0.0)
    x, y = make_data()
    found, draw = [], step.source.discrete_gaussian

    def watch(count, variance):
        found.append((step.grid.clip, math.sqrt(variance) / UNITS))
        return draw(count, variance)

    step.source.discrete_gaussian = watch
    for rows in step:
        step(x[rows], y[rows])
    factors = [Ramp(1.0, 0.25)(t, 8) for t in range(8)]
    assert [clip for clip, _ in found] == pytest.approx([2.0 * factor for factor in factors])
    assert [noise for _, noise in found] == pytest.approx([3.0] * 4 + [6.0] * 4)
    assert found[-1][0] < found[0][0] / 2


def test_clipped_sum_follows_the_ramp():
    x, y = make_data()
    model, step = make_step(noiseless=True, clip=0.4, clipping={"ramp": {"start": 1.0, "end": 0.5, "parts": 2}})
    for t, rows in enumerate(step):
        before, gradients = flat_parameters(model), gradients_one_by_one(model, x[rows], y[rows])
        step(x[rows], y[rows])
        clip = 0.4 if t < 4 else 0.2
        assert_close_on_grid(before - flat_parameters(model), mean_of_clipped(gradients, clip), clip)


# ---- norms that adapt


def test_counts_by_hand():
    squares = torch.tensor([0.0, 0.5, 0.9, 1.0, 1.03125, 2.0, math.inf, math.nan], dtype=torch.float64) ** 2
    for square, share in zip(squares, (1, 1, 1, 0, -0.5, -1, -1, -1), strict=True):
        assert int(count_whole(square[None], 1.0)) == round(share * COUNT_UNITS)
    assert int(count_whole(squares[:3] * 4, 2.0)) == 3 * COUNT_UNITS
    assert int(count_whole(squares[:0], 1.0)) == 0
    assert COUNT_UNITS < UNITS * (1 - 2**-10)


def test_norms_follow_the_counts_by_hand():
    norms = ClippingNorms(Clipping(quantile=0.75, rate=0.5), 2.0, SIZES, make_budget())
    norms.adapt(torch.tensor([10 * COUNT_UNITS]))  # 15 of 20 whole and 5 clipped: the quantile
    assert norms.norms == pytest.approx([2.0])
    norms.adapt(torch.tensor([-20 * COUNT_UNITS]))  # none whole
    assert norms.norms == pytest.approx([2.0 * math.exp(0.5 * 0.75)])
    for _ in range(500):
        norms.adapt(torch.tensor([20 * COUNT_UNITS]))
    assert norms.norms == [MIN_CLIP]
    for _ in range(500):
        norms.adapt(torch.tensor([-20 * COUNT_UNITS]))
    assert norms.norms == [MAX_CLIP]
    layered = norms_of(ADAPTIVE)
    for _ in range(500):  # a layer is not lost where the others grow
        layered.adapt(torch.tensor([20, -20, -20]) * COUNT_UNITS)
        layered.grid(0)
    assert max(layered.norms) <= MAX_CLIP / 3
    assert min(layered.norms) == max(layered.norms) / 64


def test_a_step_releases_the_counts_of_its_sample():
    model, step = make_step(noiseless=True, clip=0.3, clipping=ADAPTIVE, micro=7)
    (x, y), rows = make_data(), step.draw()
    parts = gradients_one_by_one(model, x[rows], y[rows]).split(list(LAYERS.values()), 1)
    step(x[rows], y[rows])
    own = 0.3 / math.sqrt(3)
    for part, (name, found) in zip(parts, step.norms.by_layer().items(), strict=True):
        counts = ((1 - part.norm(dim=1) / own) * 16).clamp(-1, 1).sum()
        share = 0.5 + float(counts) / 2 / 20
        assert found == pytest.approx(own * math.exp(-0.2 * (share - 0.5)), rel=1e-4), name


def test_norm_finds_the_quantile():
    """Gradients of the norms 1, 2, …, 200: the norm that leaves 70 % of them whole is 140."""
    rows = 200
    model = nn.Linear(rows, 1, bias=False)
    nn.init.zeros_(model.weight)
    budget = UncheckedBudget(2.0, 1e-5, rows, 100, 150, 0.0, 1.0, 0.0, ((150, 2.0),))
    step = PrivateStep(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        budget,
        method="dpsgd",
        loss=lambda output, target: output.mean(),
        clip=1.0,
        clipping={"quantile": 0.7, "rate": 0.3},
    )
    features, found = torch.diag(torch.arange(1.0, rows + 1)), []
    for drawn in step:
        step(features[drawn], drawn)
        found.append(step.grid.clip)
    assert found[0] == 1.0
    assert np.mean(found[-60:]) == pytest.approx(140, rel=0.1)


def test_counts_have_noise_of_their_own_in_every_step():
    """Noise of z on each count and of σ′ on the gradient, new in every step."""
    totals, noiseless = [], []
    for kept, source in ((totals, Source(seed=3)), (noiseless, NoiselessSource(seed=3))):
        _, step = make_step(budget=make_budget(steps=100, sigma=1.5), clipping=ADAPTIVE, lr=0.0)
        step.source = step.journal.source = source
        original, (x, y) = step.sum_clipped_gradients, make_data()

        def keep(*arguments, kept=kept, original=original):
            total, losses = original(*arguments)
            kept.append(total.clone())
            return total, losses

        step.sum_clipped_gradients, step.norms.adapt = keep, lambda counts: None
        for rows in step:
            step(x[rows], y[rows])
    noise = (torch.stack(totals) - torch.stack(noiseless)).double() / UNITS
    count_noise = 2 * math.sqrt(3)  # of a 20th of the batch size, √3 for the layers, over ½
    assert float(noise[:, 401:].std()) == pytest.approx(count_noise, rel=0.12)
    expected = gradient_noise(1.5, count_noise, 3)
    assert float(noise[:, :401].std()) == pytest.approx(expected, rel=0.02)
    assert expected > 1.5 * 1.3
    assert float((noise[1:] * noise[:-1]).mean()) < 0.2


@settings(max_examples=30, deadline=None)
@given(sigma=st.floats(0.3, 20.0), ratio=st.floats(1.05, 50.0), counts=st.integers(1, 30))
def test_noise_is_split_so_that_the_joint_cost_is_that_of_sigma(sigma, ratio, counts):
    count_noise = sigma * ratio * math.sqrt(counts)
    own = gradient_noise(sigma, count_noise, counts)
    assert math.sqrt(own**-2 + counts * count_noise**-2) <= 1 / sigma
    assert math.sqrt(own**-2 + counts * count_noise**-2) == pytest.approx(1 / sigma, rel=1e-9)
    assert own >= sigma


@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_gradient_and_count_together_cost_what_the_budget_says(rate):
    """The hockey-stick divergence of both releases, by integration over the plane, is that of one with noise of σ."""
    sigma, count_noise = 1.2, 2.0
    own = gradient_noise(sigma, count_noise, 1)
    axis = np.linspace(-9, 10, 1201)
    cell = (axis[1] - axis[0]) ** 2
    without = np.outer(norm.pdf(axis, 0, own), norm.pdf(axis, 0, count_noise))
    with_row = np.outer(norm.pdf(axis, 1, own), norm.pdf(axis, 1, count_noise))
    pair = Pair(rate, sigma)
    for epsilon in (0.05, 0.5, 1.5):
        removed = (1 - rate) * without + rate * with_row
        found = cell * np.maximum(removed - math.exp(epsilon) * without, 0).sum()
        assert found == pytest.approx(float(pair.delta_if_removed(np.array(epsilon))), abs=2e-5)
        added = (1 - rate) * with_row + rate * without
        found = cell * np.maximum(with_row - math.exp(epsilon) * added, 0).sum()
        assert found == pytest.approx(float(pair.delta_if_added(np.array(epsilon))), abs=2e-5)


def test_resumed_steps_replay_adaptive_norms_bit_for_bit(tmp_path):
    x, y = make_data()

    def make():
        model = make_network()
        optimizer, source = torch.optim.SGD(model.parameters(), 1.0), Source()
        step = PrivateStep(
            model,
            optimizer,
            make_budget(share=0.5, index=20.0),
            method="gip",
            keep=0.3,
            group=50,
            clipping=ADAPTIVE,
            source=source,
            ledger=Ledger(tmp_path, (x, y)),
        )
        return model, step

    model, step = make()
    for rows in step:
        step(x[rows], y[rows], rows)
        if step.steps_taken == 3:
            state, weights = step.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
            norms = list(step.norms.norms)
    assert step.norms.norms != norms
    other, resumed = make()
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert resumed.norms.norms == norms
    for rows in resumed:
        resumed(x[rows], y[rows], rows)
    assert torch.equal(flat_parameters(model), flat_parameters(other))
    assert resumed.norms.norms == step.norms.norms
    # Other norms than the first time would release another sum with the same noise.
    changed, again = make()
    changed.load_state_dict(weights)
    again.load_state_dict(state | {"norms": [2 * norm for norm in norms]})
    rows = again.draw()
    with pytest.raises(PomonaError, match="was taken before with other gradients"):
        again(x[rows], y[rows], rows)


def test_state_of_other_clipping_is_refused():
    plain, adaptive = make_step()[1].state_dict(), make_step(clipping=ADAPTIVE)[1].state_dict()
    old = {**plain, "options": {key: value for key, value in plain["options"].items() if key != "clipping"}}
    del old["norms"]
    make_step()[1].load_state_dict(old)  # of a run before there were such options
    for state, clipping in ((plain, ADAPTIVE), (old, ADAPTIVE), (adaptive, None), (adaptive, {"quantile": 0.5})):
        with pytest.raises(PomonaError, match="began with another budget .clipping"):
            make_step(clipping=clipping)[1].load_state_dict(state)


# ---- options


def test_options_survive_as_plain_values():
    assert Clipping().to_dict() == {}
    for clipping in (ADAPTIVE, Clipping(layers={"0": 1.0}), Clipping(ramp=(2, 1)), Clipping(quantile=0.3, rate=0.1)):
        assert Clipping.of(clipping.to_dict()) == clipping
    assert make_step(clipping=ADAPTIVE)[1].facts()["clipping"] == {"layers": True, "quantile": 0.5}
    assert "clipping" not in make_step()[1].facts()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantile": 1.0}, r"quantile is the share .* in \(0, 1\), got 1.0"),
        ({"quantile": 0.5, "ramp": (1, 2)}, "norms that adapt to a quantile have no ramp"),
        ({"quantile": 0.5, "rate": 0.0}, "rate of adaptive norms must be above 0"),
        ({"quantile": 0.5, "count_noise": 0.0}, "count_noise is for norms that adapt .* above 0, got 0.0"),
        ({"count_noise": 3.0}, "count_noise is for norms that adapt"),
        ({"layers": {"0": -1.0}}, "proportions of layers must be above 0"),
        ({"layer": True}, "clipping has no option 'layer'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(PomonaError, match=message):
        make_step(clipping=options)


def test_counts_that_cost_too_much_and_datalens_are_refused():
    x, y = make_data()
    with pytest.raises(PomonaError, match="set count_noise to more than 1.5 examples"):
        make_step(budget=make_budget(sigma=3.0), clipping={"quantile": 0.5})
    _, step = make_step(budget=make_budget(sigma=3.0), clipping={"quantile": 0.5, "count_noise": 2.0})
    rows = step.draw()
    step(x[rows], y[rows])
    for clipping in ({"quantile": 0.5}, {"layers": True}):
        with pytest.raises(PomonaError, match="datalens have the norm C by construction"):
            make_step(method="datalens", keep=0.3, clipping=clipping)
