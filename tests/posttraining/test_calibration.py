"""Wanda, the inputs that calibration observes, and the order in which a model is pruned."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pomona as pm
from pomona.errors import PomonaError
from pomona.posttraining.blocks import BlockChain, Calibration, find_block_lists
from pomona.posttraining.layers import unfold_input


class Residual(nn.Module):
    """A block of a small network, with settings that its model passes by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, scale=1.0):
        return (x + scale * self.down(torch.relu(self.up(x))),)


class Stack(nn.Module):
    """Blocks of which each one reads the output of the one before; with `skips`, also the first input."""

    def __init__(self, skips: bool = False, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.inner, self.skips = nn.Linear(5, width), skips
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        start = x = self.inner(x)
        for index, block in enumerate(self.blocks):
            (x,) = block(x + start if self.skips and index else x, scale=0.5)
        return self.head(x)


def draw_batches(count: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(16, 5) for _ in range(count)]


def test_wanda_by_hand():
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2))
    model[0].weight.data = torch.tensor([[1.0, -2.0, 3.0, 0.5], [4.0, 1.0, 0.1, 1.0]])
    x = torch.tensor([[3.0, 0.0, 1.0, 0.0], [4.0, 1.0, 0.0, 6.0]])  # norms 5, 1, 1, 6
    report = pm.Wanda(0.5, include="0").prune(model, [x[:1], x[1:]])
    # Scores: 5, 2, 3, 3 and 20, 1, 0.1, 6; of the equal ones the first is kept.
    expected = torch.tensor([[1.0, 0.0, 3.0, 0.0], [4.0, 0.0, 0.0, 1.0]])
    assert torch.equal(model[0].weight, expected)
    assert torch.equal(report.masks["0.weight"], expected != 0)
    assert report.sparsity == 0.5


def naive_wanda(weight: np.ndarray, inputs: np.ndarray, sparsity: float) -> np.ndarray:
    """Prune the lowest |w| · ‖x‖ of each output, one output after the other."""
    pruned, norms = weight.copy(), np.linalg.norm(inputs, axis=0)
    for row in pruned:
        lowest = np.argsort(np.abs(row) * norms)[: round(sparsity * len(row))]
        row[lowest] = 0
    return pruned


@pytest.mark.parametrize("seed", range(20))
def test_errors_are_those_of_a_naive_wanda(seed):
    """20 matrices on correlated inputs: the error of the outputs is no larger than that of the reference."""
    torch.manual_seed(seed)
    rows, columns, sparsity = 8 + seed % 9, 16 + 4 * (seed % 7), (0.5, 0.75, 0.25)[seed % 3]
    layer = nn.Linear(columns, rows, bias=False).double()
    x = torch.randn(60, columns, dtype=torch.float64) @ torch.randn(columns, columns, dtype=torch.float64)
    dense = layer.weight.detach().clone()
    pm.Wanda(sparsity, include="0").prune(nn.Sequential(layer, nn.Linear(rows, 2).double()), [*x.split(25)])
    reference = torch.as_tensor(naive_wanda(dense.numpy(), x.numpy(), sparsity))
    torch.testing.assert_close(layer.weight.detach(), reference, rtol=0, atol=0)
    error, expected = ((x @ (weight - dense).T).norm() for weight in (layer.weight.detach(), reference))
    assert error <= expected * (1 + 1e-12)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("method", [pm.Wanda, pm.SparseGPT])
def test_each_block_is_pruned_with_the_inputs_it_has_after_the_pruning_of_those_before(skips, method):
    torch.manual_seed(0)
    model, batches = Stack(skips).double(), [batch.double() for batch in draw_batches()]
    whole = copy.deepcopy(model)
    report = method(0.5).prune(model, batches)
    # The same, one block at a time, by running the whole network on all data at once.
    for index in range(3):
        method(0.5, include=f"blocks.{index}.*").prune(whole, [torch.cat(batches)])
    method(0.5, include="inner").prune(whole, [torch.cat(batches)])
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    in_blocks = [f"blocks.{index}.{leaf}.weight" for index in range(3) for leaf in ("up", "down")]
    assert list(report.masks) == ["inner.weight", *in_blocks]


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_the_decoder_is_pruned_block_by_block_after_the_encoder(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    layers = {"encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    if kind == "t5":
        config = transformers.T5Config(**sizes, d_kv=8, d_ff=24, num_layers=3, num_decoder_layers=2, num_heads=2)
        model = transformers.T5ForConditionalGeneration(config).double().eval()
        blocks = [*(f"encoder.block.{i}" for i in range(3)), *(f"decoder.block.{i}" for i in range(2))]
    else:
        config = transformers.BartConfig(**sizes, **layers, **heads, forced_eos_token_id=None)
        model = transformers.BartForConditionalGeneration(config).double().eval()
        blocks = [*(f"model.encoder.layers.{i}" for i in range(3)), *(f"model.decoder.layers.{i}" for i in range(2))]
    data = [{"input_ids": torch.randint(2, 50, (2, 9)), "decoder_input_ids": torch.randint(2, 50, (2, 5))}] * 2
    whole = copy.deepcopy(model)
    report = pm.SparseGPT(0.6).prune(model, data)
    whole.config.use_cache = False
    for block in blocks:  # a block alone is not in a list of blocks, so that the whole model runs
        inside = [name.removesuffix(".weight") for name in report.masks if name.startswith(f"{block}.")]
        pm.SparseGPT(0.6, include=inside).prune(whole, data)
    assert all(name.startswith(tuple(blocks)) for name in report.masks)
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


@pytest.mark.parametrize("skips", [False, True])
def test_blocks_that_are_not_chained_are_recognised(skips):
    model = Stack(skips)
    (blocks,) = find_block_lists(model, [m for m in model.modules() if isinstance(m, nn.Linear)])
    assert blocks == list(model.blocks)
    chain = BlockChain(blocks)
    with chain.observed():
        Calibration(model, draw_batches(), None).run(0)
    assert chain.is_chained is not skips


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.sampled_from(["same", 0, 1, (2, 1)]),
    st.sampled_from(["zeros", "reflect", "circular", "replicate"]), st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_rows_times_the_matrix_are_a_convolution(kernel, channels, stride, dilation, padding, mode, flat):
    if padding == "same" and stride > 1:
        stride = 1
    if flat and isinstance(padding, tuple):
        padding = padding[0]
    kind, image = (nn.Conv1d, (9,)) if flat else (nn.Conv2d, (9, 8))
    conv = kind(channels, 4, kernel, stride, padding, dilation, bias=False, padding_mode=mode).double()
    x = torch.randn(2, channels, *image, dtype=torch.float64)
    rows = unfold_input(conv, x)
    expected = conv(x).flatten(2).transpose(1, 2).reshape(-1, 4)
    torch.testing.assert_close(rows @ conv.weight.flatten(1).T, expected)


def test_batches_may_be_tuples_and_dictionaries_and_modes_are_kept():
    batches = draw_batches()
    results = []
    for data in (batches, [(x, torch.zeros(16)) for x in batches], [{"x": x, "unused": 1} for x in batches]):
        torch.manual_seed(0)
        model = Stack().train()
        model.head.eval()
        pm.Wanda(0.5).prune(model, data)
        assert model.training
        assert not model.head.training
        results.append(model.state_dict())
    for state in results[1:]:
        assert all(torch.equal(state[name], tensor) for name, tensor in results[0].items())


def test_the_longest_of_overlapping_lists_of_blocks_is_taken():
    stages = nn.ModuleList(nn.Sequential(*(Residual(8) for _ in range(depth))) for depth in (1, 4, 2))
    model = nn.ModuleDict({"first": nn.ModuleList([Residual(8), Residual(8)]), "stages": stages})
    found = find_block_lists(model, [m for m in model.modules() if isinstance(m, nn.Linear)])
    assert found == [list(model["first"]), list(stages[1]), list(stages[2])]


def test_only_some_batches_are_read():
    def endless():
        while True:
            yield torch.randn(4, 5)

    model = Stack()
    assert pm.Wanda(0.5).prune(model, endless(), max_batches=2).sparsity == pytest.approx(0.5, abs=0.01)


def test_half_precision_and_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    dense = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).eval()
    data = [{"input_ids": torch.randint(0, 50, (4, 16))} for _ in range(4)]
    expected = dense(**data[0]).logits.float().detach()
    errors = {}
    for method in (pm.Wanda(0.7), pm.SparseGPT(0.7)):
        model = copy.deepcopy(dense)
        report = method.prune(model, data)
        assert model.transformer.h[0].mlp.c_fc.weight.dtype == torch.bfloat16
        assert all("lm_head" not in name and "wte" not in name for name in report.masks)
        errors[type(method).__name__] = float((model(**data[0]).logits.float().detach() - expected).norm())
    assert errors["SparseGPT"] < errors["Wanda"]


def test_layers_without_observed_inputs_are_left_dense_with_a_warning():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2))
    with pytest.warns(UserWarning, match="is left dense") as warned:
        report = pm.Wanda(0.5).prune(model, [torch.randn(4, 3, 8)])
    assert [str(one.message).split(":")[0] for one in warned] == [
        "0.self_attn.in_proj_weight is left dense",
        "0.self_attn.out_proj.weight is left dense",
    ]
    assert set(report.masks) == {"0.linear1.weight", "0.linear2.weight"}


def test_what_cannot_work_is_refused():
    model = Stack()
    with pytest.raises(PomonaError, match="data has no batches"):
        pm.Wanda(0.5).prune(model, [])
    with pytest.raises(PomonaError, match="put a single batch in a list"):
        pm.Wanda(0.5).prune(model, torch.randn(2, 5))
    with pytest.raises(PomonaError, match=r"sparsity is the pruned fraction and must lie in \[0, 1\), got 1.5"):
        pm.Wanda(1.5)
    with (
        pytest.warns(UserWarning, match="is left dense"),
        pytest.raises(PomonaError, match="no layer whose inputs can be observed"),
    ):
        pm.Wanda(0.5).prune(nn.LSTM(4, 4), [torch.randn(2, 3, 4)])
    unused = nn.ModuleDict({"a": nn.Linear(2, 2)})
    unused.forward = lambda x: x
    with pytest.raises(PomonaError, match=r"a\.weight has no input in these data: leave it out"):
        pm.Wanda(0.5, include="a").prune(unused, [torch.randn(2, 2)])


def build_decoder(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(config).double().eval()
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=50,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("padded", [False, True])
def test_decoders_read_no_keys_of_blocks_before_their_pruning(kind, padded):
    """Hugging Face's decoders keep the keys and values of each block by default, and would read them again."""
    model = build_decoder(kind)
    generator = torch.Generator().manual_seed(2)
    data = [{"input_ids": torch.randint(0, 50, (2, 9), generator=generator)} for _ in range(3)]
    if padded:
        for batch in data:
            batch["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
            batch["attention_mask"][0, :3] = 0
    whole = copy.deepcopy(model)
    pm.SparseGPT(0.6).prune(model, data)
    assert model.config.use_cache
    whole.config.use_cache = False
    blocks = "transformer.h" if kind == "gpt2" else "model.layers"
    for index in range(3):  # a block alone is not in a list of blocks, so that the whole model runs
        pm.SparseGPT(0.6, include=f"{blocks}.{index}.*").prune(whole, data)
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_blocks_may_change_their_input_in_place():
    class InPlace(Residual):
        def forward(self, x, scale=1.0):
            x += scale * self.down(torch.relu(self.up(x)))
            return (x,)

    torch.manual_seed(0)
    model, batches = Stack().double(), [batch.double() for batch in draw_batches()]
    expected = copy.deepcopy(model)
    for block in model.blocks:
        block.__class__ = InPlace
    for one in (model, expected):
        pm.SparseGPT(0.5).prune(one, batches)
    for (name, one), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(one, other[1], msg=name)


def test_a_tied_weight_is_pruned_with_the_inputs_of_all_layers_that_have_it():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]).expand(4, 4))
    model = nn.Sequential(first, nn.Linear(4, 4), second, nn.Linear(4, 2))
    inputs = []
    second.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    x = torch.randn(32, 4) * torch.tensor([1.0, 0.1, 0.01, 0.001])
    model(x)
    norms = torch.cat([x, inputs[0]]).norm(dim=0)
    report = pm.Wanda(0.5, include="0").prune(model, [x])
    kept = (norms * torch.tensor([1.0, 2.0, 3.0, 4.0])).topk(2).indices
    assert report.masks["0.weight"][0].nonzero().flatten().tolist() == sorted(kept.tolist())
    assert (x.norm(dim=0) * torch.tensor([1.0, 2.0, 3.0, 4.0])).topk(2).indices.tolist() != kept.tolist()


def test_frozen_models_are_pruned():
    model = Stack().requires_grad_(False)
    assert len(pm.Wanda(0.5).prune(model, draw_batches()).masks) == 7


class Experts(nn.Module):
    """A layer whose weights are no layer's that is known, like the experts of a mixture in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.einsum("bi,eio->bo", self.gate(x), self.experts))


def test_layers_of_unknown_kind_are_named_where_they_are_much_of_a_model():
    with pytest.warns(UserWarning, match=r"74% of Experts's weights are in layers of unknown kind, such as experts"):
        report = pm.Wanda(0.5).prune(Experts(), [torch.randn(4, 8)])
    assert set(report.masks) == {"gate.weight"}


@pytest.mark.parametrize("device", ["cuda:77", "foo"])
def test_a_device_that_is_not_there_is_refused_before_the_model_runs(device):
    with pytest.raises(PomonaError, match=f"there is no device '{device}' here"):
        pm.Wanda(0.5).prune(Experts(), [torch.randn(4, 8)], device=device)


@pytest.mark.parametrize("options", [{"block": 1.5}, {"block": 0}, {"damping": "x"}, {"damping": float("inf")}])
def test_options_of_sparsegpt_that_are_no_numbers_are_refused(options):
    with pytest.raises(PomonaError, match="must be a"):
        pm.SparseGPT(0.5, **options)
