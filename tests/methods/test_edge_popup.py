"""Edge-popup: steps by hand, the layers that it draws, and its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_methods import LinearStack, get_mask_rows, get_weight_rows, keep_largest, make_linear_loss
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.core.fused.random_stream import RandomStream


def copy_scores(pruner: pm.Pruner) -> dict[str, Tensor]:
    """Return copies of the scores."""
    return {name: latent.clone() for name, latent in pruner.state_dict()["latents"].items()}


# ---- by hand: two layers of three weights, p = 2/3 keeps one of each


class GivenStream(RandomStream):
    """A stream with given weights and scores."""

    def weights(
        self, name: str, fan_in: int, like: Tensor, redraw: Tensor | None = None, at: Tensor | None = None
    ) -> Tensor:
        return torch.tensor([[1.0, -2.0, 4.0]]).to(like)

    def scores(self, name: str, fan_in: int, like: Tensor, at: Tensor | None = None) -> Tensor:
        return torch.tensor([[0.5, 0.2, 0.1]]).to(like)


@pytest.fixture
def given_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the random stream of edge-popup by given values."""
    spec = pm.EdgePopup().method
    monkeypatch.setattr(type(spec), "stream", property(lambda self: GivenStream(0, "sc")))


@pytest.mark.usefixtures("given_stream")
def test_edge_popup_step_by_hand() -> None:
    """ŵ = m(s) ⊙ w; s ← s − η (g ⊙ w) with g at ŵ, for pruned weights too; then the mask is updated."""
    model = LinearStack(a=[[9.0, 9.0, 9.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pm.EdgePopup(sparsity=2 / 3, include="a").attach(model, optimizer, total_steps=9)
    assert model.a.weight.tolist() == [[1.0, 0.0, 0.0]]

    make_linear_loss(model, a=[[1.0, 1.0, -1.0]]).backward()  # g ⊙ w = 1, −2, −4
    gradient = model.a.weight.grad
    optimizer.step()
    assert copy_scores(pruner)["a.weight"].tolist() == [pytest.approx([0.4, 0.4, 0.5])]
    assert model.a.weight.tolist() == [[0.0, 0.0, 4.0]]
    assert model.a.weight.grad is gradient
    assert gradient.tolist() == [[1.0, 1.0, -1.0]]


@pytest.mark.usefixtures("given_stream")
def test_scores_are_ranked_with_their_sign_and_decay() -> None:
    """A score of −3 is lower than one of 0.1; weight decay and momentum act on scores, not on weights."""
    model = LinearStack(a=[[9.0, 9.0, 9.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=1.0)
    pruner = pm.EdgePopup(sparsity=2 / 3, include="a").attach(model, optimizer, total_steps=9)
    make_linear_loss(model, a=[[35.5, 0.0, 0.0]]).backward()
    optimizer.step()  # buffer 36, 0.2, 0.1
    assert copy_scores(pruner)["a.weight"].tolist() == [pytest.approx([-3.1, 0.18, 0.09])]
    assert model.a.weight.tolist() == [[0.0, -2.0, 0.0]]
    optimizer.zero_grad()
    make_linear_loss(model, a=[[0.0, 0.0, 0.0]]).backward()
    optimizer.step()  # buffer 18 − 3.1, 0.1 + 0.18, 0.05 + 0.09
    assert copy_scores(pruner)["a.weight"].tolist() == [pytest.approx([-4.59, 0.152, 0.076])]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=30), st.floats(0.01, 0.99))
def test_selection_keeps_the_highest_signed_scores_and_the_first_of_equal_ones(
    given: list[int], sparsity: float
) -> None:
    model = LinearStack(a=[[1.0] * len(given)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sparsity = min(sparsity, 1 - 1 / len(given))  # one weight is left
    pruner = pm.EdgePopup(sparsity=sparsity, include="a").attach(model, optimizer, total_steps=2)
    slot = pruner.slots[0]
    slot.latent.copy_(torch.tensor([given]))  # type: ignore[union-attr]
    make_linear_loss(model, a=[[0.0] * len(given)]).backward()
    optimizer.step()
    expected = keep_largest(np.array([given], dtype=float), len(given) - round(sparsity * len(given)))
    assert get_mask_rows(pruner) == expected.astype(int).tolist()
    assert get_weight_rows(model)[0] == [
        float(w) if m else 0.0 for w, m in zip(slot.weight[0], expected[0], strict=True)
    ]  # type: ignore[index]


# ---- which layers, which weights


def test_all_layers_are_drawn_including_first_last_and_shortcuts() -> None:
    model = pm.models.build("resnet18", rho=0.0625, affine=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pm.EdgePopup(sparsity=0.6).attach(model, optimizer, total_steps=5)
    drawn = {name for name, p in model.named_parameters() if p.ndim > 1}
    assert set(pruner.masks()) == drawn
    assert any("shortcut" in name for name in drawn)
    for name, mask in pruner.masks().items():
        magnitudes = model.get_parameter(name)[mask].abs().unique().tolist()
        assert magnitudes == [pytest.approx((2 / mask[0].numel()) ** 0.5, rel=1e-6)]
        assert int((~mask).sum()) == round(0.6 * mask.numel())


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("distribution", ["sc", "ku"])
def test_an_lstm_learns_by_training_only_scores(bidirectional: bool, distribution: str) -> None:
    """The task is whether a 1 stands before the middle; a subnetwork of the random weights solves it."""
    name = "bilstm" if bidirectional else "lstm"
    torch.manual_seed(0)
    model = pm.models.build(name, vocabulary=5, embedding=8, hidden=24, dropout=0.0, frozen=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=5.0, momentum=0.9)
    pruner = pm.IteRand(sparsity=0.5, every=5, rate=0.3, distribution=distribution)
    pruner.attach(model, optimizer, total_steps=60)
    sides = 2 if bidirectional else 1
    assert len(pruner.masks()) == 2 * sides + 1
    before = {n: p.detach().clone() for n, p in model.named_parameters() if n not in pruner.masks()}
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 5, (64, 8), generator=generator)
    tokens[torch.arange(64), torch.randint(0, 8, (64,), generator=generator)] = 1
    labels = (tokens.eq(1).int().argmax(1) < 4).long()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    pruner.finish()
    assert all(torch.equal(model.get_parameter(n), value) for n, value in before.items())
    bound = {"sc": 2, "ku": 6}[distribution]
    for n, mask in pruner.masks().items():
        weight = model.get_parameter(n).detach()
        assert not weight[~mask].any()
        assert float(weight.abs().max()) <= (bound / weight.shape[1]) ** 0.5 * (1 + 1e-6)


def test_a_model_with_random_weights_learns_by_scores() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    pm.EdgePopup(sparsity=0.5).attach(model, optimizer, total_steps=40)
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(2))
    y = torch.argmax(torch.cat([x, -x], 1)[:, :6], 1)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 0.0}, r"in \(0, 1\), got 0"),
        ({"sparsity": 1.0}, r"got 1"),
        ({"sparsity": -0.5}, r"got -0\.5"),
        ({"every": 0}, "must be ≥ 1, got 0"),
        ({"distribution": "sk"}, "unknown distribution 'sk': did you mean 'sc'"),
        ({"seed": -1}, "seed must be in"),
        ({"schedule": "cubics"}, "did you mean 'cubic'"),
        ({"rate": 0.1}, "unknown option of method 'edge_popup' 'rate'"),
    ],
)
def test_invalid_options_of_edge_popup_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        pm.EdgePopup(**options)


def test_the_seed_determines_the_weights() -> None:
    def weight(seed: int) -> Tensor:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        pm.EdgePopup(seed=seed).attach(model, torch.optim.SGD(model.parameters(), 0.1), total_steps=3)
        return model[0].weight.detach().clone()

    assert torch.equal(weight(3), weight(3)), "the weights depend on the model's initialization"
    assert not torch.equal(weight(3), weight(4))
