"""Certified pruning: the budget holds, weights without effect go first, and every pattern is kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import pomona as pm
from pomona.theory.certificate import prune_by_magnitude
from pomona.theory.certified_pruning import certified
from pomona.theory.certified_pruning.margin_costs import MarginCosts


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Tensor]:
    """Return an MLP that was trained on a part of the digits, and 100 examples."""
    torch.manual_seed(0)
    data = pm.data.load("digits").train
    x, y = data.x[:400].float().flatten(1) / 255, data.y[:400]
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), x[:100]


def largest_by_magnitude(model: nn.Module, x: Tensor, budget: float) -> float:
    """Return the largest sparsity, in steps of 2 %, at which magnitude pruning keeps the predictions, global or not."""
    with torch.no_grad():
        classes = model(x).argmax(1)
        found = [
            sparsity
            for allocation in ("global", "uniform")
            for sparsity in (k / 50 for k in range(50))
            if float(
                (prune_by_magnitude(model, sparsity, allocation=allocation)(x).argmax(1) == classes).float().mean()
            )
            >= budget
        ]
    return max(found)


def test_the_budget_holds_and_more_is_pruned_than_by_magnitude(digits: tuple[nn.Module, Tensor]):
    dense, x = digits
    model = copy.deepcopy(dense)
    report = pm.Certified(0.95).prune(model, x)
    with torch.no_grad():
        same = float((model(x).argmax(1) == dense(x).argmax(1)).float().mean())
    assert report.certified == pytest.approx(same)
    assert report.certified >= 0.95
    assert report.certifiable == 1
    assert report.unchanged == report.certified
    assert report.sparsity > largest_by_magnitude(dense, x, 0.95)
    # The report tells what the model has.
    for name, mask in report.masks.items():
        weight, before = (net.get_parameter(name) for net in (model, dense))
        assert torch.equal(weight, torch.where(mask, before, 0.0))
    zeros = [int((~mask).sum()) for mask in report.masks.values()]
    assert report.sparsity == pytest.approx(sum(zeros) / (64 * 16 + 16 * 16))
    assert [layer.sparsity for layer in report.layers] == pytest.approx([zeros[0] / 1024, zeros[1] / 256])
    assert "proven unchanged" in str(report)


def test_predictions_are_certified_in_regions(digits: tuple[nn.Module, Tensor]):
    dense, x = digits
    model = copy.deepcopy(dense)
    report = pm.Certified(0.9, radius=0.01, low=0, high=1, precision=0.05).prune(model, x[:20])
    found = pm.certify_predictions(dense, model, x[:20], radius=0.01, low=0, high=1)
    assert found.share == report.certified >= 0.9 * report.certifiable
    assert report.sparsity > 0.05


def test_held_out_examples_keep_the_budget_by_themselves(digits: tuple[nn.Module, Tensor]):
    dense, x = digits
    model = copy.deepcopy(dense)
    options = pm.Certified(0.95, holdout=0.4, precision=0.05)
    search = certified.Search(options, dense, x)
    assert [len(x[part]) for part in search.parts] == [100, 40]
    assert search.costs.count == 60
    assert sorted(search.x.sum(1).tolist()) == sorted(x.sum(1).tolist())
    report = options.prune(model, x)
    held_out = search.x[search.parts[1]]
    assert pm.certify_predictions(dense, model, held_out).share >= 0.95
    assert report.certified >= 0.95
    assert not search.is_within_budget(torch.arange(100) < 96)


def test_weights_without_effect_are_pruned_first():
    # The third input is always zero, and the weights that read it are the largest.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].weight.data = model[0].weight.data.abs()  # all units are active
    model[0].weight.data[:, 2] = 9
    model[0].bias.data.fill_(1.0)
    x = torch.cat([torch.rand(40, 2), torch.zeros(40, 1)], 1)
    report = pm.Certified(1.0, step=0.34, precision=0.3).prune(model, x)
    assert not bool(report.masks["0.weight"][:, 2].any())
    assert report.certified == 1


@pytest.mark.parametrize("pattern", ["block(4, 4)", "filter", "balanced(4)", "2:4"])
def test_every_pattern_is_kept(digits: tuple[nn.Module, Tensor], pattern: str):
    dense, x = digits
    model = copy.deepcopy(dense)
    report = pm.Certified(0.9, pattern=pattern, precision=0.02).prune(model, x)
    assert report.certified >= 0.9
    assert 0 < report.sparsity < 1
    for name, mask in report.masks.items():
        if pattern == "filter":
            assert bool((mask.all(1) | ~mask.any(1)).all())
            bias = model.get_parameter(name.replace("weight", "bias"))
            assert not bool(bias[~mask.any(1)].any())
        elif pattern == "block(4, 4)":
            tiles = mask.view(4, 4, -1, 4).movedim(1, 2).flatten(2).float().mean(2)
            assert bool(((tiles == 0) | (tiles == 1)).all())
        else:
            counts = mask.view(-1, 4).sum(1)
            assert counts.unique().numel() == 1
            assert pattern != "2:4" or counts[0] in (2, 4)


def test_drops_of_margins_are_those_of_a_linear_network():
    # The smooth margin of class 0 over class 1 alone is w₀·x − w₁·x, and removing w₀ᵢ lowers it by w₀ᵢ xᵢ.
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[3.0, 1.0], [1.0, 2.0]])
    x = torch.tensor([[1.0, 0.5]])
    targets = certified.OneShot(0.0, include=["weight"]).method.targets(model)
    costs = MarginCosts(targets, pm.Unstructured(), model, x, torch.tensor([0]))
    found = costs.differentiate(model, x)
    assert found.margins.tolist() == pytest.approx([1.5])
    assert found.drops[0].tolist() == pytest.approx([3.0, 0.5, -1.0, -1.0])
    assert costs.own_costs(found).tolist() == pytest.approx([2.0, 0.5 / 9, 2 / 9, 2 / 9])
    # After a drift of 1.5 a weight that lowers the margin costs more, and one that raises it costs less.
    scores = costs.scores(found, costs.own_costs(found), torch.tensor([1.5]))["weight"]
    assert scores.flatten().tolist() == pytest.approx([4.0, 0.5 / 9 + 1 / 3, 2 / 9 - 2 / 3, 2 / 9 - 2 / 3])


def test_units_of_a_pattern_cost_the_sum_of_their_weights():
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    x = torch.rand(5, 4)
    targets = certified.OneShot(0.0, include=["weight"]).method.targets(model)
    classes = torch.tensor([0, 1, 2, 3, 0])
    single = MarginCosts(targets, pm.Unstructured(), model, x, classes)
    rows = MarginCosts(targets, pm.Block((1, 4)), model, x, classes)
    drops = single.differentiate(model, x)
    sums = drops.drops.view(5, 4, 4).sum(2)
    assert rows.own_costs(drops).tolist() == pytest.approx((0.5 * (sums / rows.scale[:, None]) ** 2).sum(0).tolist())
    order = rows.scores(drops, rows.own_costs(drops), torch.zeros(5))["weight"].norm(dim=1).argsort()
    assert order.tolist() == rows.own_costs(drops).argsort().tolist()


def test_batches_of_a_loader_are_read():
    batches = [(torch.ones(3, 2), torch.zeros(3)), (torch.zeros(2, 2), torch.zeros(2))]
    assert certified.read_examples(batches).sum() == 6
    assert len(certified.read_examples(torch.zeros(5000, 2))) == certified.MAX_EXAMPLES
    with pytest.raises(pm.PomonaError, match="no batches"):
        certified.read_examples([])
    with pytest.raises(pm.PomonaError, match="one input"):
        certified.read_examples([{"x": torch.zeros(1)}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": 1.5}, "budget"),
        ({"step": 1}, "step"),
        ({"precision": 0}, "precision"),
        ({"holdout": 1}, "holdout"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str):
    with pytest.raises(pm.PomonaError, match=message):
        pm.Certified(**options)


def test_a_radius_at_which_nothing_is_certified_is_refused(digits: tuple[nn.Module, Tensor]):
    with pytest.raises(pm.PomonaError, match="choose a smaller radius"):
        pm.Certified(radius=5.0).prune(copy.deepcopy(digits[0]), digits[1][:4])
