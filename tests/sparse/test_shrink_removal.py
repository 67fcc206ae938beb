"""`shrink`: the models it refuses, and the model and report it returns."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch
from engine_helpers import count_hooks, is_identical, save_and_load
from shrink_networks import Residual, randomize_norms, two_convolutions, zero_filters
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.sparse import shrink
from pomona.sparse.shrink import latency

pytest.importorskip("torch_pruning")

# ---- refused models


def test_unstructured_zeros_are_refused() -> None:
    model = randomize_norms(Residual())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[torch.rand_like(parameter) < 0.5] = 0
    with pytest.raises(
        pm.PomonaError, match=r"nothing to remove: Residual has \d\d% zeros but no whole channel is zero"
    ):
        shrink(model, (2, 6, 6))


@pytest.mark.parametrize("how", ["empty layer", "nothing read"])
def test_a_network_that_is_cut_in_two_is_refused(how: str) -> None:
    model = randomize_norms(
        nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1))
    )
    model = nn.Sequential(*model, nn.Flatten(), nn.Linear(6 * 36, 4)).double()
    assert shrink_after_zeroing(model, range(7)), "one filter of eight is a path"
    if how == "empty layer":
        zero_filters(model[0], list(range(8)))
    else:
        with torch.no_grad():
            model[3].weight[:, 7] = 0  # the only channel of the first layer that is left
    reason = "0 has no weight left" if how == "empty layer" else "5 reads constants only"
    with pytest.raises(pm.PomonaError, match=f"same output for every input, because {reason}: .* lower sparsity"):
        shrink(model, (2, 6, 6))


def shrink_after_zeroing(model: nn.Module, channels: range) -> bool:
    """Remove filters of the first layer and return whether the model can be shrunk."""
    zero_filters(model[0], list(channels), model[1])
    return shrink(model, (2, 6, 6)).params.ratio > 1


def test_group_norm_is_named_as_obstacle() -> None:
    model = pm.models.build("wrn16_4", norm="group")
    zero_filters(model.blocks[0].conv1, [0, 1], model.blocks[0].norm2)
    with pytest.raises(pm.PomonaError, match="blocks.0.conv1 has 2 because GroupNorm mixes them with other channels"):
        shrink(model, (3, 16, 16))


@pytest.mark.parametrize("groups", [2, 8])
def test_grouped_convolutions_are_left_alone(groups: int) -> None:
    model = randomize_norms(
        nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=groups), nn.Conv2d(8, 2, 1))
    )
    zero_filters(model[0], [0])
    with pytest.raises(pm.PomonaError, match="because a grouped convolution"):
        shrink(model, (2, 8, 8))


class IndexedChannels(nn.Module):
    """A forward pass that depends on the index of a channel."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second = how, nn.Conv2d(2, 4, 1), nn.Conv2d(8 if how == "pad" else 4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "pad":
            x = F.pad(x, (0, 0, 0, 0, 2, 2))
        elif self.how == "slice":
            x = torch.cat((x[:, 1:], x[:, :1]), 1)
        elif self.how == "view":
            x = x.view(-1, 4, 9).view(-1, 4, 3, 3)
        elif self.how == "scale":
            x = x * torch.arange(4.0, dtype=x.dtype).view(4, 1, 1)
        elif self.how == "gate":
            x = x * x.mean(1, keepdim=True)
        return self.second(x)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("pad", "adds channels of zeros"),
        ("slice", "selects some by index"),
        ("view", "depends on the number of channels"),
        ("scale", "depends on the number of channels"),
        ("gate", "outputs differ by"),
    ],
)
def test_forward_pass_that_depends_on_channel_indices_is_refused(how: str, reason: str) -> None:
    model = randomize_norms(IndexedChannels(how))
    zero_filters(model.first, [1])
    with pytest.raises(pm.PomonaError, match=reason):
        shrink(model, (2, 3, 3))


def test_skip_connection_from_the_input_is_detected() -> None:
    """The dependency graph does not contain the input, but the measured values do, even for an all-zero example."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 2, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.relu(x + self.first(x)))

    model = randomize_norms(Skip())
    zero_filters(model.first, [1])
    with pytest.raises(pm.PomonaError, match="nothing to remove"):
        shrink(model, torch.zeros(2, 4, 3, 3, dtype=torch.float64))


def test_bad_arguments_and_missing_dependency_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pm.PomonaError, match="nothing to remove"):
        shrink(pm.models.build("lstm", vocabulary=30, hidden=8), (5,))
    with pytest.raises(pm.PomonaError, match="does not run on samples of shape"):
        shrink(two_convolutions(), (3, 6, 6))
    with pytest.raises(pm.PomonaError, match="shape of one sample"):
        shrink(two_convolutions(), "large")
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(pm.PomonaError, match="pip install torch-pruning"):
        shrink(two_convolutions(), (2, 6, 6))


# ---- the returned model and report


def test_original_model_is_not_changed() -> None:
    model = pm.models.build("resnet20")
    zero_filters(model.blocks[0].conv1, [0, 1], model.blocks[0].norm1)
    model.train()
    model.stem[1].eval()
    model.stem[0].weight.requires_grad_(False)
    state = copy.deepcopy(model.state_dict())
    hooks = count_hooks(model, torch.optim.SGD(model.parameters(), 0.1))
    small = shrink(model, torch.zeros(2, 3, 8, 8)).model
    assert is_identical(dict(model.state_dict()), dict(state))
    assert count_hooks(model, torch.optim.SGD(model.parameters(), 0.1)) == hooks
    for one, other in zip(model.modules(), small.modules(), strict=True):
        assert one.training == other.training
    for one, other in zip(model.parameters(), small.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad
        assert one.grad is other.grad is None


def test_shrunk_model_trains_saves_and_loads() -> None:
    model = pm.models.build("resnet20", shortcut="B")
    zero_filters(model.blocks[4].conv1, list(range(12)), model.blocks[4].norm1)
    small = shrink(model, (3, 8, 8)).model.train()
    optimizer = torch.optim.SGD(small.parameters(), lr=0.05)
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(small(x), y)
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
        optimizer.step()
    assert losses[-1] < losses[0]
    reloaded = copy.deepcopy(small)
    for parameter in reloaded.parameters():
        nn.init.ones_(parameter)
    reloaded.load_state_dict(save_and_load(small.state_dict()))
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(x), small.eval()(x))


def test_report_has_the_counts_and_the_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "measure_median_seconds", lambda models, batch: [0.006, 0.004])
    model = two_convolutions()
    zero_filters(model[0], [1, 4, 5, 6], model[1])
    shrunk = shrink(nn.DataParallel(model), (2, 6, 6), latency=True)
    assert shrunk.latency == pytest.approx((6, 4))
    assert shrunk.params.ratio == pytest.approx((152 + 16 + 219) / (76 + 8 + 111))
    facts = json.loads(json.dumps(shrunk.facts()))
    assert facts["removed"] == {"0": {"before": 8, "after": 4}}
    assert facts["latency_ms"] == pytest.approx({"before": 6, "after": 4})
    text = str(shrunk)
    assert all(word in text for word in ("parameters", "387", "195", "1.98×", "milliseconds", "6.00", "1.50×"))
    assert shrink(model, (2, 6, 6)).facts()["latency_ms"] is None
