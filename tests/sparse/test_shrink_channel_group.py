"""Channel groups: which channels are removed and which stay, in networks small enough to follow by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shrink_networks import Residual, assert_equal_outputs, randomize_norms, two_convolutions, zero_filters
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.sparse import Change, shrink
from pomona.sparse.shrink.padding_shortcut import UnevenPad

pytest.importorskip("torch_pruning")

# ---- one layer


def test_remaining_rows_are_exactly_the_original_ones() -> None:
    model = two_convolutions()
    zero_filters(model[0], [1, 4, 5], model[1])
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
    assert_equal_outputs(model, shrunk, (2, 6, 6))


def test_a_filter_with_one_weight_left_stays() -> None:
    model = two_convolutions()
    zero_filters(model[0], [1, 4], model[1])
    model[0].weight.data[4, 1, 2, 2] = 1e-30
    assert shrink(model, (2, 6, 6)).removed == {"0": Change(8, 7)}


def test_one_channel_represents_all_constant_channels() -> None:
    """A norm behind zero filters gives a constant, and zero padding makes it differ at the border."""
    model = two_convolutions()
    zero_filters(model[0], [0, 1, 2, 3])
    constants = F.relu(model[1](torch.zeros(1, 8, 1, 1, dtype=torch.float64)))[0, :4].flatten()
    positive = int((constants > 0).sum())
    assert 2 <= positive < 4, "the seed must give both zero and constant channels"
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 8 - 3)}
    assert shrunk.kept == {"0": "1 in place of all constant channels"}
    assert_equal_outputs(model, shrunk, (2, 6, 6))


def test_a_single_constant_stays_and_is_reported() -> None:
    model = two_convolutions()
    zero_filters(model[0], [0, 5])
    with torch.no_grad():
        model[1].weight[[0, 5]], model[1].bias[0], model[1].bias[5] = 0.0, 2.0, -2.0
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 7)}, "the ReLU turns a negative constant into zero"
    assert shrunk.kept == {"0": "1 constant because of a batch norm or a bias"}
    assert_equal_outputs(model, shrunk, (2, 6, 6))


def test_norm_without_weights_gives_constants() -> None:
    """The constant is −mean/σ, which the ReLU turns into zero where the mean is positive."""
    model = two_convolutions(affine=False)
    zero_filters(model[0], [0, 1, 2, 3])
    subnormal = -1e-310  # where a decaying running mean stops
    model[1].running_mean[:4] = torch.tensor([0.5, 1.0, subnormal, -0.5], dtype=torch.float64)
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 5)}
    assert shrunk.kept == {"0": "1 constant because of a batch norm or a bias"}
    model[1].running_mean[2] = -0.1
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 5)}
    assert shrunk.kept == {"0": "1 in place of all constant channels"}
    assert_equal_outputs(model, shrunk, (2, 6, 6))


def test_biases_of_zero_filters_are_constants() -> None:
    model = two_convolutions(norm=False)
    with torch.no_grad():
        model[0].weight[:5] = 0
        model[0].bias[:5] = torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0])
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 4)}
    assert_equal_outputs(model, shrunk, (2, 6, 6))


class TwoReaders(nn.Module):
    """Two layers that read the same channels: one their positive values, the other their negative ones."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.first, self.norms = nn.Conv2d(2, 4, 1), nn.Sequential(*norms)
        self.one, self.two = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms(self.first(x))
        return self.one(F.relu(x)) + self.two(F.relu(-x))


@pytest.mark.parametrize("norms", [(), (nn.BatchNorm2d(4),), (nn.BatchNorm2d(4, affine=False),)])
def test_constants_without_a_possible_representative_stay(norms: tuple[nn.Module, ...]) -> None:
    """No constant reaches both readers: nothing is merged, the norms are restored, only the zero channel is removed."""
    model = randomize_norms(TwoReaders(*norms))
    with torch.no_grad():
        model.first.weight[:3] = 0
        model.first.bias[:3] = torch.tensor([1.0, -1.0, 0.0])
        for norm in norms:
            norm.running_mean[:3] = 0
            if norm.affine:
                norm.bias[:3] = 0
    shrunk = shrink(model, (2, 3, 3))
    assert shrunk.removed == {"first": Change(4, 3)}
    assert shrunk.kept == {"first": "2 constant because of a batch norm or a bias"}
    assert_equal_outputs(model, shrunk, (2, 3, 3))


def test_constants_that_vary_by_position_stay() -> None:
    model = randomize_norms(
        nn.Sequential(nn.Conv2d(2, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.ZeroPad2d((1, 0, 0, 0)), nn.Conv2d(6, 2, 1))
    )
    zero_filters(model[0], [0, 1, 2])
    with torch.no_grad():
        model[1].weight[:3], model[1].bias[:3] = 0.0, torch.tensor([1.0, 2.0, -1.0])
    shrunk = shrink(model, (2, 4, 4))
    assert shrunk.removed == {"0": Change(6, 5)}
    assert shrunk.kept == {"0": "2 constant because of a batch norm or a bias"}
    assert_equal_outputs(model, shrunk, (2, 4, 4))


def test_channels_without_a_reader_are_removed() -> None:
    model = two_convolutions()
    with torch.no_grad():
        model[3].weight[:, [2, 6]] = 0
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 6)}
    assert_equal_outputs(model, shrunk, (2, 6, 6))


def test_a_layer_keeps_one_channel() -> None:
    model = randomize_norms(Residual())
    zero_filters(model.inner, list(range(5)), model.inner_norm)
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"inner": Change(5, 1)}
    assert shrunk.kept == {"inner": "1 so that the layer has a channel"}
    assert_equal_outputs(model, shrunk, (2, 6, 6))


def test_zero_rows_of_the_output_stay() -> None:
    model = two_convolutions()
    zero_filters(model[0], [3], model[1])
    zero_filters(model[3], [0, 1])
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"0": Change(8, 7)}
    assert shrunk.kept == {"3": "2 because they are the model's output"}


# ---- several layers


def test_added_channels_are_removed_where_all_summands_are_zero() -> None:
    model = randomize_norms(Residual())
    zero_filters(model.stem, [0, 2, 4], model.norm)
    zero_filters(model.inner, [1], model.inner_norm)
    zero_filters(model.outer, [2, 4, 5], model.outer_norm)
    shrunk = shrink(model, (2, 6, 6))
    assert shrunk.removed == {"stem": Change(6, 4), "inner": Change(5, 4), "outer": Change(6, 4)}
    coupled = "1 coupled with channels that are not zero"
    assert shrunk.kept == {"stem": coupled, "outer": coupled}
    assert shrunk.model.head.in_features == 4 * 9
    assert_equal_outputs(model, shrunk, (2, 6, 6))


class Concatenation(nn.Module):
    """A concatenation with a separate norm for each of its two readers, as in a DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.second, self.norm2 = nn.Conv2d(5, 6, 3, padding=1, bias=False), nn.BatchNorm2d(11)
        self.third = nn.Conv2d(11, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cat((x, self.second(F.relu(self.norm1(x)))), 1)
        return self.third(F.relu(self.norm2(x)))


def test_norms_give_the_representative_a_constant() -> None:
    """Each norm makes zero of the channel that the other lets through, and one channel still represents both."""
    model = randomize_norms(Concatenation())
    zero_filters(model.first, [0, 1])
    with torch.no_grad():
        for norm, biases in ((model.norm1, [1.0, -1.0]), (model.norm2, [-2.0, 2.0])):
            norm.weight[:2], norm.bias[:2] = 0.0, torch.tensor(biases)
    shrunk = shrink(model, (2, 5, 5))
    assert shrunk.removed == {"first": Change(5, 4)}
    assert [norm.bias[0].item() for norm in (shrunk.model.norm1, shrunk.model.norm2)] == [1, 1]
    assert_equal_outputs(model, shrunk, (2, 5, 5))


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 4)), st.sets(st.integers(0, 5)), st.integers(0, 99))
def test_concatenated_channels(first: set[int], second: set[int], seed: int) -> None:
    model = randomize_norms(Concatenation(), seed)
    zero_filters(model.first, sorted(first))
    zero_filters(model.second, sorted(second))
    try:
        shrunk = shrink(model, (2, 5, 5))
    except pm.PomonaError:
        assert (len(first) < 2 and len(second) < 2) or len(first) == 5, "or it is cut in two"
        return
    assert_equal_outputs(model, shrunk, (2, 5, 5))
    for name, zero, width in (("first", first, 5), ("second", second, 6)):
        lost = width - len(getattr(shrunk.model, name).weight)
        assert max(len(zero) - 1, 0) <= lost <= len(zero), "at most one zero channel stays"


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 4)), st.sets(st.integers(0, 5)), st.booleans())
@example({0, 1, 2, 3, 4}, {0, 1, 2, 3}, {0, 1, 2, 3}, True)
def test_added_channels(stem: set[int], inner: set[int], outer: set[int], norms: bool) -> None:
    """Outputs agree for any zero filters; with zero norms the residual sum loses the channels zero in both layers."""
    model = randomize_norms(Residual())
    zero_filters(model.stem, sorted(stem), model.norm if norms else None)
    zero_filters(model.inner, sorted(inner), model.inner_norm if norms else None)
    zero_filters(model.outer, sorted(outer), model.outer_norm if norms else None)
    try:
        shrunk = shrink(model, (2, 6, 6))
    except pm.PomonaError:
        assert not norms or not (inner or stem & outer or len(outer) == 6) or len(stem) == 6, "or it is cut in two"
        return
    assert_equal_outputs(model, shrunk, (2, 6, 6))
    if norms:
        unread = len(outer) == 6  # a layer of zeros reads nothing
        assert len(shrunk.model.inner.weight) == (1 if unread else max(5 - len(inner), 1))
        assert len(shrunk.model.stem.weight) == max(6 - len(stem & outer), 1)


def test_padding_shortcut_loses_channels_that_are_zero_in_all_stages() -> None:
    """Channel c of the first stage is c+8 of the second and c+24 of the third; new channels are independent."""
    model = randomize_norms(pm.models.build("resnet20"))
    for width, zero in ((16, [3]), (32, [0, 11, 30]), (64, [1, 16, 27, 46, 63])):
        if width == 16:
            zero_filters(model.stem[0], zero, model.stem[1])
        for block in model.blocks:
            if len(block.conv2.weight) == width:
                zero_filters(block.conv2, zero, block.norm2)
    shrunk = shrink(model, (3, 16, 16))
    widths = [len(shrunk.model.stem[0].weight), *(len(block.conv2.weight) for block in shrunk.model.blocks)]
    assert widths == [15] * 4 + [29] * 3 + [59] * 3
    pads = [part for part in shrunk.model.modules() if isinstance(part, UnevenPad)]
    assert [(pad.left, pad.right) for pad in pads] == [(7, 7), (15, 15)]
    assert_equal_outputs(model, shrunk, (3, 16, 16))
