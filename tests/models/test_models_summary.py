"""Counts of parameters, non-zeros and MACs."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pomona.errors import PomonaError
from pomona.models import Summary, build, info, names, summary


def build_on_meta(name: str, **options) -> nn.Module:
    with torch.device("meta"):
        return build(name, **options)


@pytest.mark.parametrize(
    ("name", "macs", "total"),
    [("wrn28_2", 214.35, 216), ("wrn28_4", 845.60, 848), ("wrn28_8", 3360.08, 3366)],
)
def test_macs_of_wide_resnets(name, macs, total):
    """Lin et al. (2020), Figure 6, whose count includes batch norms and ReLUs."""
    result = summary(build_on_meta(name), (3, 32, 32))
    assert round(result.macs / 1e6, 2) == macs
    assert round((result.macs + result.elementwise) / 1e6) == total


@pytest.mark.parametrize(("sparsity", "nonzero_millions"), [(0.8, 6.79), (0.9, 4.45)])
def test_nonzeros_of_a_pruned_resnet50(sparsity, nonzero_millions):
    """Lin et al. (2020), Table 3: all convolutions are pruned, the classifier and the norms are not."""
    model = build("resnet50")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.bias.fill_(0.1)  # as after training
            elif isinstance(module, nn.Conv2d):
                module.weight.flatten()[: round(sparsity * module.weight.numel())] = 0
    result = summary(model, (3, 32, 32))
    assert round(result.params / 1e6, 2) == 25.56
    assert round(result.nonzeros / 1e6, 2) == nonzero_millions
    convs = [layer for layer in result.layers if layer.kind == "Conv2d"]
    assert sum(layer.params for layer in convs) == 23_454_912
    assert sum(layer.macs_left for layer in convs) == pytest.approx(
        (1 - sparsity) * sum(layer.macs for layer in convs), rel=1e-3
    )


@pytest.mark.parametrize("name", [n for n in names() if "lstm" not in n and "transformer" not in n])
def test_macs_agree_with_the_flop_counter_of_torch(name):
    model, shape = build_on_meta(name).eval(), info(name).input_shape
    with FlopCounterMode(display=False) as flops:
        model(torch.zeros(1, *shape, device="meta"))
    result = summary(model, shape)
    assert 2 * result.macs == flops.get_total_flops()
    assert result.params == sum(p.numel() for p in model.parameters())
    assert result.macs_left == result.macs


def test_convolution_worked_out_by_hand():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(100, 3))
    with torch.no_grad():
        model[0].weight[:, 0] = 0
        model[1].bias.fill_(1)
    result = summary(model, (2, 5, 5))
    first, norm, last = result.layers
    assert (first.name, first.kind, first.shape) == ("0", "Conv2d", (4, 2, 3, 3))
    assert (first.params, first.nonzeros, first.sparsity) == (76, 40, 1 - 40 / 76)
    assert (first.macs, first.macs_left) == (72 * 25, 36 * 25)
    assert (norm.params, norm.macs) == (8, 0)
    assert (last.params, last.macs, last.macs_left) == (303, 300, 300)
    assert (result.params, result.nonzeros, result.macs, result.macs_left) == (387, 351, 2100, 1200)
    assert result.elementwise == 3 * 100
    assert result.sparsity == 1 - 351 / 387


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 3),
    inputs=st.integers(1, 3),
    outputs=st.integers(1, 3),
    size=st.integers(1, 3),
    stride=st.integers(1, 3),
    side=st.integers(3, 7),
    seed=st.integers(0, 1000),
    transposed=st.booleans(),
)
def test_macs_left_are_the_products_with_non_zero_weights(
    groups, inputs, outputs, size, stride, side, seed, transposed
):
    """With weights 0 or 1 and an input of ones, every MAC with a non-zero weight adds one to the output."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(groups * inputs, groups * outputs, size, stride, groups=groups, bias=False, dtype=torch.double)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(0, 2, layer.weight.shape, generator=generator))
        total = layer(torch.ones(1, groups * inputs, side, side, dtype=torch.double)).sum()
        result = summary(layer, (groups * inputs, side, side))
        layer.weight.fill_(1)
        dense = layer(torch.ones(1, groups * inputs, side, side, dtype=torch.double)).sum()
    assert (result.macs_left, result.macs) == (int(total), int(dense))
    assert result.nonzeros <= result.params == layer.weight.numel()


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_count_each_step(kind, gates, batch_first):
    model = kind(5, 7, num_layers=2, bidirectional=True, batch_first=batch_first)
    shape = (3, 11, 5) if batch_first else (11, 3, 5)
    per_step = 2 * gates * 7 * (5 + 7) + 2 * gates * 7 * (14 + 7)
    # A batch comes first for `summary`, which cannot know otherwise: the total over the batch is what counts.
    assert summary(model, torch.zeros(shape)).macs * shape[0] == 33 * per_step
    with torch.no_grad():
        model.weight_hh_l0.zero_()
    left = summary(model, torch.zeros(shape)).macs_left * shape[0]
    assert left == 33 * (per_step - gates * 7 * 7)


def test_recurrent_cells_packed_sequences_and_language_model():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(5, 7)

        def forward(self, x):
            state = None
            for step in x.unbind(1):
                state = self.cell(step, state)
            return state[0]

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 7, batch_first=True)

        def forward(self, x):
            lengths = torch.tensor([x.shape[1]] * len(x))
            return self.lstm(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0]

    assert summary(Loop(), (6, 5)).macs == 6 * 4 * 7 * 12
    assert summary(Packed(), (6, 5)).macs == 6 * 4 * 7 * 12
    result = summary(build_on_meta("lstm_lm"), (35,))
    assert result.macs == 35 * (2 * 4 * 1500 * 3000 + 1500 * 10_000)
    assert result.params == 2 * 15_000_000 + 10_000 + 2 * (4 * 1500 * 3000 + 8 * 1500)


@pytest.mark.parametrize("own_sizes", [False, True])
def test_attention_counts_its_projections_and_its_products(own_sizes):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"kdim": 6, "vdim": 6} if own_sizes else {}
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)
            self.memory = nn.Parameter(torch.ones(1, 3, 6 if own_sizes else 8))

        def forward(self, x):
            return self.attention(key=self.memory, value=self.memory, query=x)[0]

    model, inner = Attend(), 6 if own_sizes else 8
    result = summary(model, (5, 8))
    products = 2 * 5 * 3 * 8  # of queries with keys, and of their weights with values
    assert result.macs == 5 * 64 + 2 * 3 * 8 * inner + 5 * 64 + products
    rows = {layer.name: layer.macs for layer in result.layers}
    assert rows == {"": 0, "attention": 5 * 64 + 2 * 3 * 8 * inner + products, "attention.out_proj": 5 * 64}
    assert result.params == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        model.attention.out_proj.weight.zero_()
    assert summary(model, (5, 8)).macs_left == result.macs - 5 * 64


def test_transformer_layers_are_counted_despite_the_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    result = summary(layer, (5, 8))
    assert result.macs == 5 * (4 * 64 + 2 * 8 * 16) + 2 * 5 * 5 * 8
    assert sum(row.activation_macs for row in result.layers) == 2 * 5 * 5 * 8
    assert torch.backends.mha.get_fastpath_enabled()


def test_tied_weights_count_once_as_parameters_and_twice_as_macs():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[1].weight
    model[3].weight = model[0].weight
    result = summary(model, (6,))
    assert result.params == 40 + 16 + 4 + 4
    assert [layer.params for layer in result.layers] == [40, 20, 4, 0]
    assert result.macs == 6 * (16 + 16 + 40)
    shared = nn.Linear(4, 4)
    again = summary(nn.Sequential(shared, nn.ReLU(), shared), (4,))
    assert (again.params, again.macs, again.elementwise) == (20, 32, 4)


def test_summary_does_not_change_the_model():
    model = build("digits_cnn")
    model.train()
    model.features[1].eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    summary(model, (1, 8, 8))
    with pytest.raises(PomonaError, match=r"DigitsCNN does not run on samples of shape \(3, 8, 8\): .*channels"):
        summary(model, (3, 8, 8))
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("shape", [3, "abc", (3, 0), (3, 2.5), (True,), None])
def test_invalid_input_shapes_are_refused(shape):
    with pytest.raises(PomonaError, match="input_shape takes the shape of one sample"):
        summary(nn.Linear(3, 3), shape)


def test_empty_example_batches_are_refused():
    for example in (torch.tensor(1.0), torch.zeros(0, 3)):
        with pytest.raises(PomonaError, match="an example needs a batch of samples"):
            summary(nn.Linear(3, 3), example)


def test_count_does_not_depend_on_the_example_or_its_batch_size():
    model = build("digits_cnn")
    expected = summary(model, (1, 8, 8))
    assert summary(model, torch.randn(5, 1, 8, 8)) == expected
    assert summary(model.double(), [1, 8, 8]) == expected
    assert summary(torch.compile(model, backend="eager"), torch.Size((1, 8, 8))) == expected


def test_parameters_of_containers_and_models_without_parameters():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.0, 2.0]))

        def forward(self, x):
            return x * self.scale

    (layer,) = summary(Scaled(), (2,)).layers
    assert (layer.name, layer.params, layer.nonzeros, layer.sparsity) == ("", 2, 1, 0.5)
    empty = summary(nn.ReLU(), (2,))
    assert (empty.params, empty.sparsity, empty.elementwise) == (0, 0.0, 2)


def test_the_table_has_every_layer_and_the_totals():
    model = nn.Sequential(nn.Linear(1000, 20, bias=False), nn.ReLU(), nn.Linear(20, 2))
    with torch.no_grad():
        model[0].weight[:, :900] = 0
    result = summary(model, (1000,))
    text = str(result)
    row = next(line for line in text.splitlines() if "20×1000" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        *("0", "Linear", "20×1000", "20,000", "2,000", "90.00%", "20,000", "2,000")
    ]
    total = next(line for line in text.splitlines() if "total" in line)
    assert "20,042" in total
    assert "2,042" in total
    console = Console(file=io.StringIO(), width=140)
    console.print(result)
    assert "20,042" in console.file.getvalue()  # type: ignore[attr-defined]


def test_summary_is_frozen():
    result = summary(nn.Linear(2, 2), (2,))
    assert isinstance(result, Summary)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.elementwise = 3  # type: ignore[misc]
