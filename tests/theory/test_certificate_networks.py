"""Certificates around an example of networks that people have: transformers, recurrent networks, norms."""

import pytest
import torch
from pruned_copies import without_small_weights
from slow_cases import slow_unless
from torch import nn

from pomona.errors import PomonaError
from pomona.theory.certificate.forward import interval_bounds
from pomona.theory.certificate.linear_bounds import linear_bounds
from pomona.theory.certificate.paired_graph import pair_networks
from pomona.theory.certificate.regions import neighbourhoods
from pomona.theory.certificate.steps import DENSE, PRUNED

EAGER = {"attn_implementation": "eager"}


class Logits(nn.Module):
    """A Hugging Face model as a network of one tensor to one tensor."""

    def __init__(self, model, argument):
        super().__init__()
        self.model, self.argument = model, argument

    def forward(self, x):
        return self.model(**{self.argument: x}).logits


class Recurrent(nn.Module):
    """A recurrent layer and a classifier on its last state."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Cell(nn.Module):
    """An LSTM or GRU cell in a loop."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(cell.hidden_size, 3)

    def forward(self, x):
        state = x.new_zeros(len(x), self.cell.hidden_size)
        memory = state
        for t in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                state, memory = self.cell(x[:, t], (state, memory))
            else:
                state = self.cell(x[:, t], state)
        return self.head(state)


class Patches(nn.Module):
    """A vision transformer in small: patches, positions, one encoder layer with GELU, mean and classifier."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, 4)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 4, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, activation="gelu")
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.layer(tokens).mean(1))


class CausalAttention(nn.Module):
    """Self-attention with a causal mask, in one of the ways in which networks give it."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.project = kind, nn.Linear(4, 12)
        self.register_buffer("keep", torch.ones(5, 5, dtype=torch.bool).tril())

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        attend = nn.functional.scaled_dot_product_attention
        shift = torch.zeros(5, 5, dtype=x.dtype).masked_fill(~self.keep, torch.finfo(x.dtype).min)
        scores = q @ k.transpose(1, 2) / 2
        return {
            "causal": lambda: attend(q, k, v, is_causal=True),
            "boolean": lambda: attend(q, k, v, attn_mask=self.keep),
            "float": lambda: attend(q, k, v, attn_mask=shift, scale=0.5),
            "added": lambda: (scores + shift).softmax(-1) @ v,
            "filled": lambda: scores.masked_fill(~self.keep, float("-inf")).softmax(-1) @ v,
        }[self.kind]()


def encoder(**settings):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8, **EAGER,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=8,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=8,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **EAGER,
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, use_cache=False, bos_token_id=0, eos_token_id=0, **EAGER,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


# name: (network, shape of an example, radius of the region, how loose the certificate may be)
NETWORKS = {
    "encoder": (encoder, (4, 8), 1e-3, 1.5),
    "encoder_gelu": (lambda: encoder(norm_first=True, activation="gelu"), (4, 8), 1e-3, 1.5),
    "bert": (lambda: Logits(bert(), "inputs_embeds"), (3, 32), 1e-3, 1.5),
    "gpt2": (lambda: Logits(gpt2(), "inputs_embeds"), (3, 32), 1e-2, 1.5),
    "llama": (lambda: Logits(llama(), "inputs_embeds"), (3, 16), 1e-3, 1.5),
    "patches": (Patches, (1, 8, 8), 1e-3, 1.5),
    "lstm": (lambda: Recurrent(nn.LSTM(3, 5, batch_first=True)), (4, 3), 1e-2, 1.2),
    "gru": (lambda: Recurrent(nn.GRU(3, 5, batch_first=True)), (4, 3), 1e-2, 1.2),
    "lstm_cell": (lambda: Cell(nn.LSTMCell(3, 5)), (3, 3), 1e-2, 1.2),
    "gru_cell": (lambda: Cell(nn.GRUCell(3, 5)), (3, 3), 1e-2, 1.2),
    "group_norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, affine=True),
            nn.Mish(), nn.Flatten(), nn.Linear(16, 3),
        ),
        (1, 6, 6), 1e-3, 2.0,
    ),
    "autoencoder": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.GELU(), nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Sigmoid()),
        (1, 6, 6), 1e-1, 1.5,
    ),
    "sequence": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.Softplus(), nn.ConvTranspose1d(4, 4, 3), nn.RMSNorm(7), nn.GLU(-2)
        ),
        (2, 7), 1e-3, 2.0,
    ),
}  # fmt: skip
QUICK = ("encoder", "lstm_cell", "group_norm", "autoencoder", "sequence")


def attack(graph, example, radius, steps=12):
    """Return the largest difference of each output in a box around an example, by signed gradients on random signs."""
    generator = torch.Generator().manual_seed(0)
    noise = 2 * torch.rand(24, *example.shape, generator=generator, dtype=torch.float64) - 1
    x = (example + radius * noise).requires_grad_()
    gaps: list[torch.Tensor] = []
    signs = torch.randn(len(x), *graph.steps[-1].shape, generator=generator, dtype=torch.float64)
    for _ in range(steps):
        difference = graph.run(DENSE, x) - graph.run(PRUNED, x)
        gaps.append(difference.detach())
        (gradient,) = torch.autograd.grad((difference * signs).sum(), x)
        x = (x + radius * gradient.sign()).clamp(example - radius, example + radius).detach().requires_grad_()
    return torch.cat(gaps)


def setup(make):
    torch.manual_seed(0)
    model = make().double().eval().requires_grad_(False)
    return model, without_small_weights(model)


@pytest.mark.parametrize("name", slow_unless(QUICK, NETWORKS))
def test_certificate_around_an_example_holds_and_is_close(name):
    make, shape, radius, limit = NETWORKS[name]
    model, pruned = setup(make)
    example = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    graph = pair_networks(model, pruned, example)
    region = neighbourhoods(example, radius)
    found = attack(graph, example[0], radius)
    for bounds in (interval_bounds(graph, region)[-1], linear_bounds(graph, region)[-1]):
        gap = bounds.gap
        assert gap.high.isfinite().all()
        assert (gap.low <= found + 1e-12).all()
        assert (found <= gap.high + 1e-12).all()
    loose = float(gap.magnitude.norm() / found.abs().amax(0).norm())
    assert loose <= limit


@pytest.mark.parametrize("kind", slow_unless(["float", "filled"], ["causal", "boolean", "float", "added", "filled"]))
def test_masks_of_attention_hide_later_values(kind):
    model, pruned = setup(lambda: CausalAttention(kind))
    example = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    graph = pair_networks(model, pruned, example)
    assert "masked_softmax" in [step.op for step in graph.steps]
    found, region = attack(graph, example[0], 0.01), neighbourhoods(example, 0.01)
    gap = linear_bounds(graph, region)[-1].gap
    assert (gap.low <= found + 1e-12).all()
    assert (found <= gap.high + 1e-12).all()
    assert float(gap.magnitude.norm()) <= 1.1 * float(found.abs().amax(0).norm())


def test_row_of_attention_without_a_key_is_refused():
    class Blind(CausalAttention):
        def __init__(self):
            super().__init__("filled")
            self.keep[2] = False

    model, pruned = setup(Blind)
    with pytest.raises(PomonaError, match="no key"):
        pair_networks(model, pruned, torch.randn(1, 5, 4, dtype=torch.float64))


@pytest.mark.slow
def test_gelu_and_norms_by_parts_are_one_step():
    model, pruned = setup(lambda: Logits(gpt2(), "inputs_embeds"))
    graph = pair_networks(model, pruned, torch.randn(1, 3, 32, dtype=torch.float64))
    assert [step.op for step in graph.steps].count("gelu") == 2
    assert not {"tanh", "pow"} & {step.op for step in graph.steps}
    model, pruned = setup(lambda: Logits(llama(), "inputs_embeds"))
    graph = pair_networks(model, pruned, torch.randn(1, 3, 16, dtype=torch.float64))
    assert [step.op for step in graph.steps].count("root_mean_square_norm") == 3
    assert "rsqrt" not in {step.op for step in graph.steps}


def test_tokens_are_a_point():
    model, pruned = setup(lambda: nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 2)))
    tokens = torch.tensor([[1, 7, 3]])
    graph = pair_networks(model, pruned, tokens)
    gap = linear_bounds(graph, neighbourhoods(tokens.double(), 0.0))[-1].gap
    exact = (model(tokens) - pruned(tokens))[None]
    torch.testing.assert_close(gap.low, exact, rtol=0, atol=1e-11)
    torch.testing.assert_close(gap.high, exact, rtol=0, atol=1e-11)


def test_all_tokens_are_a_region():
    model, pruned = setup(lambda: nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)))
    every = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    graph = pair_networks(model, pruned, every[:1])
    gap = linear_bounds(graph, neighbourhoods(torch.full((1, 2), 2.0), 2.0))[-1].gap
    exact = model(every) - pruned(every)
    assert (gap.low[0] <= exact).all()
    assert (exact <= gap.high[0]).all()


def test_comparison_of_values_is_refused_by_name():
    model, pruned = setup(lambda: nn.Sequential(nn.Linear(4, 4), nn.Hardshrink()))
    example = torch.randn(1, 4, dtype=torch.float64)
    graph = pair_networks(model, pruned, example)
    with pytest.raises(PomonaError, match="certify has no bound for the operation 'le'"):
        linear_bounds(graph, neighbourhoods(example, 0.1))
