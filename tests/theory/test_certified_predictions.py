"""Certified predictions: networks worked out by hand, random points of a region, and attacks that must not succeed."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pomona as pm
from pomona.theory import certificate
from pomona.theory.certificate import predictions
from pomona.theory.certificate.margin_bounds import class_rows
from pomona.theory.certificate.prediction_attack import AttackResult, attack_predictions, class_margins, project
from pomona.theory.certificate.regions import neighbourhoods


def linear(weight: list[list[float]]) -> nn.Linear:
    """Return a linear layer without bias."""
    layer = nn.Linear(len(weight[0]), len(weight), bias=False)
    layer.weight.data = torch.tensor(weight)
    return layer


# A network with two inputs and two classes: margin x₀ − x₁ before pruning, x₀ after it.
DENSE, PRUNED = linear([[1.0, 0.0], [0.0, 1.0]]), linear([[1.0, 0.0], [0.0, 0.0]])


def random_networks(
    seed: int, widths: tuple[int, ...], sparsity: float, convolution: bool
) -> tuple[nn.Module, nn.Module]:
    """Return a random network with biases and a copy pruned by magnitude."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    if convolution:
        layers += [nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, widths[0])]
    else:
        layers.append(nn.Linear(9, widths[0]))
    for a, b in pairwise(widths):
        layers += [nn.ReLU(), nn.Linear(a, b)]
    dense = nn.Sequential(*layers, nn.ReLU(), nn.Linear(widths[-1], 4))
    return dense, certificate.prune_by_magnitude(dense, sparsity)


def test_a_linear_network_by_hand():
    x = torch.tensor([[3.0, 1.0], [3.0, -1.0], [-1.0, 2.0], [1.0, 2.0]])
    found = pm.certify_predictions(DENSE, PRUNED, x)
    assert found.classes.tolist() == [0, 0, 1, 1]
    # The smaller one of x₀ − x₁ and x₀, with the sign of the class.
    assert found.margin.tolist() == pytest.approx([2, 3, 1, -1])
    assert found.unchanged.tolist() == [True, True, True, False]
    assert found.changed.tolist() == [False, False, False, True]
    assert (found.share, found.largest_share) == (0.75, 0.75)


def test_a_box_and_a_ball_around_an_example_by_hand():
    x = torch.tensor([[3.0, 1.0]])
    # In a box of radius r the margins fall to 2 − 2r and 3 − r, in a ball to 2 − √2 r and 3 − r.
    for radius, norm, margin in ((0.5, "linf", 1.0), (0.5, "l2", 2 - math.sqrt(0.5)), (1.5, "linf", -1.0)):
        found = pm.certify_predictions(DENSE, PRUNED, x, radius=radius, norm=norm)
        assert found.margin.tolist() == pytest.approx([margin])
        assert found.robust.tolist() == [margin > 0]
    assert found.left_class.tolist() == [True]
    # With x₁ cut to at most 1 the margins fall to 2 − r and 3 − r.
    found = pm.certify_predictions(DENSE, PRUNED, x, radius=1.5, low=-9, high=3)
    assert found.margin.tolist() == pytest.approx([-1.0])
    found = pm.certify_predictions(DENSE, PRUNED, x.clamp(max=1), radius=1.5, low=1, high=9)
    assert found.margin.tolist() == pytest.approx([-1.5])


@pytest.mark.parametrize(("norm", "radius"), [("linf", 1.0), ("l2", math.sqrt(2))])
def test_the_largest_radius_by_hand(norm: str, radius: float):
    x = torch.tensor([[3.0, 1.0], [1.0, 2.0], [90.0, 1.0]])
    found = certificate.largest_radius(DENSE, PRUNED, x, norm=norm, limit=4.0, halvings=10)
    assert found[0].item() == pytest.approx(radius, abs=4 / 2**10 + 1e-9)
    assert found[0] <= radius
    assert math.isnan(found[1])
    assert found[2] == 4


def test_one_region_for_all_examples_by_hand():
    # gap = (0, x₁), so gap₀ − gap₁ = −x₁ is at most 0 over the unit cube and gap₁ − gap₀ at most 1.
    gaps = certificate.certify_margins(DENSE, PRUNED, (2,), certificate.Cube())
    assert gaps.bounds.flatten().tolist() == pytest.approx([0, 0, 1, 0], abs=1e-12)
    x = torch.tensor([[0.9, 0.5], [0.2, 0.9], [0.4, 0.6]])
    found = pm.certify_predictions(DENSE, PRUNED, x, region=certificate.Cube())
    assert found.classes.tolist() == [0, 1, 1]
    assert found.unchanged.tolist() == [True, False, False]
    # At 90 %, the dense margin suffices; the pruned one does not, because the dense network might have x₁ = 1.
    assert gaps.unchanged(DENSE(x), of="dense").tolist() == [True, False, False]
    assert gaps.unchanged(PRUNED(x)).tolist() == [False, False, False]


def test_equal_networks_are_unchanged_in_every_region():
    x = torch.tensor([[3.0, 1.0]])
    found = pm.certify_predictions(DENSE, copy.deepcopy(DENSE), x, radius=9)
    assert (found.unchanged.item(), found.robust.item(), found.left_class.item()) == (True, False, True)


def test_a_state_dict_stands_for_the_pruned_network():
    x = torch.tensor([[3.0, 1.0], [1.0, 2.0]])
    assert pm.certify_predictions(DENSE, PRUNED.state_dict(), x).unchanged.tolist() == [True, False]


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    widths=st.lists(st.integers(2, 8), min_size=1, max_size=3).map(tuple),
    sparsity=st.sampled_from([0.1, 0.3, 0.6]),
    radius=st.sampled_from([0.0, 0.02, 0.2]),
    norm=st.sampled_from(["linf", "l2"]),
    convolution=st.booleans(),
)
def test_no_sample_of_a_proven_region_changes_its_class(
    seed: int, widths: tuple[int, ...], sparsity: float, radius: float, norm: str, convolution: bool
):
    dense, pruned = random_networks(seed, widths, sparsity, convolution)
    x = torch.rand(6, 9)
    found = pm.certify_predictions(dense, pruned, x, radius=radius, norm=norm, low=0, high=1, steps=10)
    inputs = neighbourhoods(x, radius, norm=norm, low=0, high=1)
    noise = torch.randn(300, 6, 9, dtype=torch.float64) * radius
    points = project(inputs.centre[:, 0] + noise, inputs)
    with torch.no_grad():
        outputs = [net.double()(points.flatten(0, 1)).view(300, 6, 4) for net in (dense, pruned)]
    margins = [class_margins(output, found.classes) for output in outputs]
    assert bool((torch.minimum(*margins) >= found.margin - 1e-12).all())
    same = (outputs[0].argmax(2) == outputs[1].argmax(2)).all(0)
    assert bool(same[found.unchanged].all())
    assert not bool((found.unchanged & found.changed).any())


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6), sparsity=st.sampled_from([0.2, 0.5]))
def test_no_sample_of_a_region_has_a_larger_gap_of_margins(seed: int, sparsity: float):
    dense, pruned = random_networks(seed, (6, 5), sparsity, False)
    gaps = certificate.certify_margins(dense, pruned, (9,), certificate.Cube())
    x = torch.rand(500, 9, dtype=torch.float64)
    with torch.no_grad():
        gap = dense.double()(x) - pruned.double()(x)
        outputs = pruned(x)
    assert bool((gap[:, :, None] - gap[:, None] <= gaps.bounds + 1e-12).all())
    proven = gaps.unchanged(outputs)
    assert bool((dense(x).argmax(1) == outputs.argmax(1))[proven].all())


def test_the_attack_finds_a_change_that_random_points_miss():
    # Only in a corner of the box the pruned network leaves the class.
    torch.manual_seed(0)
    dense, pruned = linear([[1.0] * 20, [0.0] * 20]), linear([[1.0] * 19 + [0.0], [0.0] * 20])
    x = torch.full((1, 20), 1.0)
    inputs = neighbourhoods(x, 1.02)
    found = attack_predictions(dense.double(), pruned.double(), inputs, torch.tensor([0]), steps=40)
    assert found.left_class.item()
    assert found.changed.item()
    near = attack_predictions(dense, pruned, neighbourhoods(x, 0.9), torch.tensor([0]), steps=40)
    assert not near.left_class.item()


def test_a_proof_that_an_attack_refutes_is_never_returned(monkeypatch: pytest.MonkeyPatch):
    def always(*args: object, **options: object) -> AttackResult:
        return AttackResult(torch.tensor([True]), torch.tensor([True]))

    monkeypatch.setattr(predictions, "attack_predictions", always)
    with pytest.raises(pm.PomonaError, match="please report"):
        pm.certify_predictions(DENSE, PRUNED, torch.tensor([[3.0, 1.0]]))


def test_rows_of_a_class_are_its_margins_over_the_others():
    rows = class_rows(torch.tensor([1]), 3)
    assert rows.tolist() == [[[-1, 1, 0], [0, 1, -1]]]


def test_the_result_is_shown_class_by_class():
    x = torch.tensor([[3.0, 1.0], [3.0, -1.0], [1.0, 2.0]])
    text = str(pm.certify_predictions(DENSE, PRUNED, x))
    assert "66.7% of 3 predictions proven unchanged" in text
    assert "undecided" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": -1.0}, "radius must be"),
        ({"norm": "l1"}, "norm must be"),
        ({"radius": 0.1, "region": certificate.Cube()}, "give one of them"),
        ({"region": certificate.Ball(0.1)}, "outside of"),
        ({"high": 1.0}, "outside of low"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], message: str):
    with pytest.raises(pm.PomonaError, match=message):
        pm.certify_predictions(DENSE, PRUNED, torch.tensor([[3.0, 1.0]]), **options)


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (DENSE, torch.zeros(0, 2), "no examples"),
        (nn.Conv1d(1, 2, 1), torch.zeros(1, 1, 5), "one output for each class"),
    ],
)
def test_what_has_no_prediction_is_refused(model: nn.Module, x: Tensor, message: str):
    with pytest.raises(pm.PomonaError, match=message):
        pm.certify_predictions(model, model, x)
