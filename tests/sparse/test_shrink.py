"""Physical removal: what goes, what stays and why, in networks small enough to follow by hand."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import kit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.sparse import Change, Shrunk, shrink
from pomona.sparse.shrink import Sides

shrinking = sys.modules["pomona.sparse.shrink"]


def stir(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random norms, statistics and biases in float64, so that whatever leaks shows."""
    torch.manual_seed(seed)
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_(0, 0.5)
            part.running_var.uniform_(0.5, 1.5)
        for parameter in part.parameters(recurse=False):
            if parameter.ndim == 1:
                nn.init.normal_(parameter, 0.3, 0.5)
    return model.double().eval()


def cut(layer: Any, channels: list[int], norm: Any = None) -> None:
    """What filter pruning leaves: zero filters, zero biases and a zero norm behind them."""
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, *((norm.weight, norm.bias) if norm else ())):
            if tensor is not None:
                tensor[channels] = 0


def agree(model: nn.Module, shrunk: Shrunk, shape: tuple[int, ...]) -> None:
    """Equal outputs in float64 on images that shrink has not seen."""
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with torch.no_grad():
        expected, actual = model.eval()(x), shrunk.model.eval()(x)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def chain(norm: bool = True, padding: int = 1, **options: Any) -> nn.Sequential:
    """Two convolutions, eight channels between them."""
    middle = [nn.BatchNorm2d(8, **options)] if norm else []
    last = [nn.ReLU(), nn.Conv2d(8, 3, 3, padding=padding)]
    return stir(nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), *middle, *last))  # type: ignore[return-value]


# ---- one layer


def test_removed_channels_leave_exactly_the_other_rows() -> None:
    model = chain()
    cut(model[0], [1, 4, 5], model[1])
    shrunk = shrink(model, (2, 6, 6))
    left = [0, 2, 3, 6, 7]
    state = shrunk.model.state_dict()
    for name, tensor in model.state_dict().items():
        expected = (
            tensor[:, left] if name == "3.weight" else tensor if tensor.ndim == 0 or name == "3.bias" else tensor[left]
        )
        assert torch.equal(state[name], expected), name
    assert shrunk.removed == {"0": Change(8, 5)}
    assert shrunk.kept == {}
    # 8·2·9 + 8 and 3·8·9 + 3 weights and 16 of the norm; five eighths of all but the last bias are left.
    assert shrunk.params == Change(152 + 16 + 219, 95 + 10 + 138)
    assert shrunk.macs == Change(36 * (144 + 216), 36 * (90 + 135))
    agree(model, shrunk, (2, 6, 6))


def test_a_filter_with_one_weight_left_stays() -> None:
    model = chain()
    cut(model[0], [1, 4], model[1])
    model[0].weight.data[4, 1, 2, 2] = 1e-30
    assert shrink(model, (2, 6, 6)).removed == {"0": Change(8, 7)}


def test_constants_are_carried_by_one_channel() -> None:
    """Filters pruned by others: the norm behind them makes a constant, which zero padding gives an edge."""
    model = chain()
    cut(model[0], [0, 1, 2, 3])
    constants = F.relu(model[1](torch.zeros(1, 8, 1, 1, dtype=torch.float64)))[0, :4].flatten()
    loud = int((constants > 0).sum())
    assert 2 <= loud < 4, "the seed must give both silent and constant channels"
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 8 - 3)}
    assert shrunk.kept == {"0": "1 in place of all that are constant"}
    agree(model, shrunk, (2, 6, 6))


def test_a_single_constant_stays_and_is_reported() -> None:
    model = chain()
    cut(model[0], [0, 5])
    with torch.no_grad():
        model[1].weight[[0, 5]], model[1].bias[0], model[1].bias[5] = 0.0, 2.0, -2.0
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 7)}, "a negative constant dies in the ReLU"
    assert shrunk.kept == {"0": "1 constant, by a batch norm or a bias"}
    agree(model, shrunk, (2, 6, 6))


def test_a_norm_without_weights() -> None:
    """The constant is −mean/σ: zero behind the ReLU where the mean is positive."""
    model = chain(affine=False)
    cut(model[0], [0, 1, 2, 3])
    subnormal = -1e-310  # where a mean that decays gets stuck
    model[1].running_mean[:4] = torch.tensor([0.5, 1.0, subnormal, -0.5], dtype=torch.float64)
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 5)}
    assert shrunk.kept == {"0": "1 constant, by a batch norm or a bias"}
    model[1].running_mean[2] = -0.1
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 5)}
    assert shrunk.kept == {"0": "1 in place of all that are constant"}
    agree(model, shrunk, (2, 6, 6))


def test_biases_of_zero_filters_are_constants_too() -> None:
    model = chain(norm=False)
    with torch.no_grad():
        model[0].weight[:5] = 0
        model[0].bias[:5] = torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0])
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 4)}
    agree(model, shrunk, (2, 6, 6))


class Fork(nn.Module):
    """Two readers, of which one sees the positive values and the other the negative ones."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.first, self.norms = nn.Conv2d(2, 4, 1), nn.Sequential(*norms)
        self.one, self.two = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms(self.first(x))
        return self.one(F.relu(x)) + self.two(F.relu(-x))


@pytest.mark.parametrize("norms", [(), (nn.BatchNorm2d(4),), (nn.BatchNorm2d(4, affine=False),)])
def test_constants_no_channel_can_carry_stay(norms: tuple[nn.Module, ...]) -> None:
    """No value of one channel reaches both readers: nothing is merged, all is put back, the silent one goes."""
    model = stir(Fork(*norms))
    with torch.no_grad():
        model.first.weight[:3] = 0
        model.first.bias[:3] = torch.tensor([1.0, -1.0, 0.0])
        for norm in norms:
            norm.running_mean[:3] = 0
            if norm.affine:
                norm.bias[:3] = 0
    shrunk = shrink(model, (2, 3, 3))
    assert shrunk.removed == {"first": Change(4, 3)}
    assert shrunk.kept == {"first": "2 constant, by a batch norm or a bias"}
    agree(model, shrunk, (2, 3, 3))


def test_constants_that_vary_from_place_to_place_stay() -> None:
    model = stir(
        nn.Sequential(nn.Conv2d(2, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.ZeroPad2d((1, 0, 0, 0)), nn.Conv2d(6, 2, 1))
    )
    cut(model[0], [0, 1, 2])
    with torch.no_grad():
        model[1].weight[:3], model[1].bias[:3] = 0.0, torch.tensor([1.0, 2.0, -1.0])
    shrunk = shrink(model, (2, 4, 4))
    assert shrunk.removed == {"0": Change(6, 5)}
    assert shrunk.kept == {"0": "2 constant, by a batch norm or a bias"}
    agree(model, shrunk, (2, 4, 4))


def test_channels_nobody_reads_go() -> None:
    model = chain()
    with torch.no_grad():
        model[3].weight[:, [2, 6]] = 0
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 6)}
    agree(model, shrunk, (2, 6, 6))


def test_a_layer_keeps_one_channel() -> None:
    model = chain()
    cut(model[0], list(range(8)), model[1])
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 1)}
    assert shrunk.kept == {"0": "1 so that the layer has a channel"}
    agree(model, shrunk, (2, 6, 6))


def test_the_output_keeps_its_zero_rows() -> None:
    model = chain()
    cut(model[0], [3], model[1])
    cut(model[3], [0, 1])
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 7)}
    assert shrunk.kept == {"3": "2 because they are the model's output"}


# ---- several layers


class Residual(nn.Module):
    """stem → + path(stem), the sum read by a flattened linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.inner, self.inner_norm = nn.Conv2d(6, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.outer, self.outer_norm = nn.Conv2d(5, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6 * 9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        path = self.outer_norm(self.outer(F.relu(self.inner_norm(self.inner(x)))))
        return self.head(F.max_pool2d(F.relu(x + path), 2).flatten(1))


def test_of_added_channels_only_the_common_ones_go() -> None:
    model = stir(Residual())
    cut(model.stem, [0, 2, 4], model.norm)
    cut(model.inner, [1], model.inner_norm)
    cut(model.outer, [2, 4, 5], model.outer_norm)
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"stem": Change(6, 4), "inner": Change(5, 4), "outer": Change(6, 4)}
    coupled = "1 coupled with channels that are not zero"
    assert shrunk.kept == {"stem": coupled, "outer": coupled}
    assert shrunk.model.head.in_features == 4 * 9
    agree(model, shrunk, (2, 6, 6))


class Dense(nn.Module):
    """A concatenation that is normalised anew for each of two readers, as in a DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.second, self.norm2 = nn.Conv2d(5, 6, 3, padding=1, bias=False), nn.BatchNorm2d(11)
        self.third = nn.Conv2d(11, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cat((x, self.second(F.relu(self.norm1(x)))), 1)
        return self.third(F.relu(self.norm2(x)))


def test_norms_lend_the_carrier_a_voice() -> None:
    """Each norm silences the channel that the other lets through; one channel can speak for both all the same."""
    model = stir(Dense())
    cut(model.first, [0, 1])
    with torch.no_grad():
        for norm, biases in ((model.norm1, [1.0, -1.0]), (model.norm2, [-2.0, 2.0])):
            norm.weight[:2], norm.bias[:2] = 0.0, torch.tensor(biases)
    shrunk = shrink(model, (2, 5, 5))
    assert shrunk.removed == {"first": Change(5, 4)}
    assert [norm.bias[0].item() for norm in (shrunk.model.norm1, shrunk.model.norm2)] == [1, 1]
    agree(model, shrunk, (2, 5, 5))


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 4)), st.sets(st.integers(0, 5)), st.integers(0, 99))
def test_concatenated_channels(first: set[int], second: set[int], seed: int) -> None:
    model = stir(Dense(), seed)
    cut(model.first, sorted(first))
    cut(model.second, sorted(second))
    try:
        shrunk = shrink(model, (2, 5, 5))
    except pm.PomonaError:
        assert len(first) < 2
        assert len(second) < 2
        return
    agree(model, shrunk, (2, 5, 5))
    for name, zero, width in (("first", first, 5), ("second", second, 6)):
        lost = width - len(getattr(shrunk.model, name).weight)
        assert max(len(zero) - 1, 0) <= lost <= len(zero), "at most one zero channel stays"


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 4)), st.sets(st.integers(0, 5)), st.booleans())
def test_added_channels(stem: set[int], inner: set[int], outer: set[int], norms: bool) -> None:
    """Whatever is zero, the outputs agree; with norms at zero the stream loses what both its makers lack."""
    model = stir(Residual())
    cut(model.stem, sorted(stem), model.norm if norms else None)
    cut(model.inner, sorted(inner), model.inner_norm if norms else None)
    cut(model.outer, sorted(outer), model.outer_norm if norms else None)
    try:
        shrunk = shrink(model, (2, 6, 6))
    except pm.PomonaError:
        assert not norms or not (inner or stem & outer or len(outer) == 6)
        return
    agree(model, shrunk, (2, 6, 6))
    if norms:
        unread = len(outer) == 6  # an empty layer reads nothing
        assert len(shrunk.model.inner.weight) == (1 if unread else max(5 - len(inner), 1))
        assert len(shrunk.model.stem.weight) == max(6 - len(stem & outer), 1)


def test_shortcut_a_loses_the_channels_all_its_stages_lack() -> None:
    """Channel c of the first stage is c+8 of the second and c+24 of the third; new ones go by themselves."""
    model = stir(pm.models.build("resnet20"))
    for width, zero in ((16, [3]), (32, [0, 11, 30]), (64, [1, 16, 27, 46, 63])):
        if width == 16:
            cut(model.stem[0], zero, model.stem[1])
        for block in model.blocks:
            if len(block.conv2.weight) == width:
                cut(block.conv2, zero, block.norm2)
    shrunk = shrink(model, (3, 16, 16))
    widths = [len(shrunk.model.stem[0].weight), *(len(block.conv2.weight) for block in shrunk.model.blocks)]
    assert widths == [15] * 4 + [29] * 3 + [59] * 3
    pads = [part for part in shrunk.model.modules() if isinstance(part, Sides)]
    assert [(pad.left, pad.right) for pad in pads] == [(7, 7), (15, 15)]
    agree(model, shrunk, (3, 16, 16))


# ---- what is refused


def test_unstructured_zeros_are_refused() -> None:
    model = stir(Residual())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[torch.rand_like(parameter) < 0.5] = 0
    with pytest.raises(
        pm.PomonaError, match=r"nothing to remove: Residual has \d\d% zeros but no whole channel is zero"
    ):
        shrink(model, (2, 6, 6))


def test_a_group_norm_is_named() -> None:
    model = pm.models.build("wrn16_4", norm="group")
    cut(model.blocks[0].conv1, [0, 1], model.blocks[0].norm2)
    with pytest.raises(pm.PomonaError, match="blocks.0.conv1 has 2 because GroupNorm mixes them with others"):
        shrink(model, (3, 16, 16))


@pytest.mark.parametrize("groups", [2, 8])
def test_grouped_convolutions_are_left_alone(groups: int) -> None:
    model = stir(nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=groups), nn.Conv2d(8, 2, 1)))
    cut(model[0], [0])
    with pytest.raises(pm.PomonaError, match="because a grouped convolution"):
        shrink(model, (2, 8, 8))


class Odd(nn.Module):
    """A forward pass that treats channels by their number."""

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
        ("slice", "by number"),
        ("view", "does not follow"),
        ("scale", "does not follow"),
        ("gate", "outputs differ by"),
    ],
)
def test_a_forward_pass_that_counts_channels_is_refused(how: str, reason: str) -> None:
    model = stir(Odd(how))
    cut(model.first, [1])
    with pytest.raises(pm.PomonaError, match=reason):
        shrink(model, (2, 3, 3))


def test_a_skip_from_the_input_is_seen() -> None:
    """The graph does not know the input, the observation does, even where the example is all zeros."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 2, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.relu(x + self.first(x)))

    model = stir(Skip())
    cut(model.first, [1])
    with pytest.raises(pm.PomonaError, match="nothing to remove"):
        shrink(model, torch.zeros(2, 4, 3, 3, dtype=torch.float64))


def test_other_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pm.PomonaError, match="nothing to remove"):
        shrink(pm.models.build("lstm", vocabulary=30, hidden=8), (5,))
    with pytest.raises(pm.PomonaError, match="does not run on samples of shape"):
        shrink(chain(), (3, 6, 6))
    with pytest.raises(pm.PomonaError, match="shape of one sample"):
        shrink(chain(), "large")
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(pm.PomonaError, match="pip install torch-pruning"):
        shrink(chain(), (2, 6, 6))


# ---- what comes back


def test_the_model_is_left_as_it_was() -> None:
    model = pm.models.build("resnet20")
    cut(model.blocks[0].conv1, [0, 1], model.blocks[0].norm1)
    model.train()
    model.stem[1].eval()
    model.stem[0].weight.requires_grad_(False)
    state, hooks = copy.deepcopy(model.state_dict()), kit.hooks(model, torch.optim.SGD(model.parameters(), 0.1))
    small = shrink(model, torch.zeros(2, 3, 8, 8)).model
    assert kit.same(dict(model.state_dict()), dict(state))
    assert kit.hooks(model, torch.optim.SGD(model.parameters(), 0.1)) == hooks
    for one, other in zip(model.modules(), small.modules(), strict=True):
        assert one.training == other.training
    for one, other in zip(model.parameters(), small.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad
        assert one.grad is other.grad is None


def test_it_trains_saves_and_loads() -> None:
    model = pm.models.build("resnet20", shortcut="B")
    cut(model.blocks[4].conv1, list(range(12)), model.blocks[4].norm1)
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
    twin = copy.deepcopy(small)
    for parameter in twin.parameters():
        nn.init.ones_(parameter)
    twin.load_state_dict(kit.saved(small.state_dict()))
    with torch.no_grad():
        assert torch.equal(twin.eval()(x), small.eval()(x))


def test_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinking, "seconds", lambda models, batch: [0.006, 0.004])
    model = chain()
    cut(model[0], [1, 4, 5, 6], model[1])
    shrunk = shrink(nn.DataParallel(model), (2, 6, 6), latency=True)
    assert shrunk.latency == pytest.approx((6, 4))
    assert shrunk.params.ratio == pytest.approx((152 + 16 + 219) / (76 + 8 + 111))
    facts = json.loads(json.dumps(shrunk.facts()))
    assert facts["removed"] == {"0": {"before": 8, "after": 4}}
    assert facts["latency_ms"] == pytest.approx({"before": 6, "after": 4})
    text = str(shrunk)
    assert all(word in text for word in ("parameters", "387", "195", "1.98×", "milliseconds", "6.00", "1.50×"))
    assert shrink(model, (2, 6, 6)).facts()["latency_ms"] is None
