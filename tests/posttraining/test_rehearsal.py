"""Mistakes are found before any layer is pruned: one sentence, and the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pomona as pm
from pomona.errors import PomonaError

transformers = pytest.importorskip("transformers")

METHODS = [pm.Wanda, pm.SparseGPT, pm.posttraining.Magnitude]


def build_llama(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=50
    )
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).eval()


def draw_ids(batch: int = 2, start: int = 0) -> torch.Tensor:
    return torch.randint(start, start + 50, (batch, 9), generator=torch.Generator().manual_seed(1))


def assert_refused(model: nn.Module, prune: Callable[[nn.Module], Any], match: str) -> None:
    """Check that an error is raised, and that neither weights, modes, hooks nor the configuration have changed."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PomonaError, match=match):
        prune(model)
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta or torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config.use_cache


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("data", "match"),
    [
        (["To be, or not to be"], "LlamaForCausalLM does not run on batch 0 of the calibration data"),
        ([{"input_idz": draw_ids()}], "does not run on batch 0 of the calibration data: You must specify"),
        ([draw_ids(), {"input_idz": draw_ids()}], "does not run on batch 1 of the calibration data"),
        ([draw_ids(), draw_ids(start=60)], "does not run on batch 1 of the calibration data: index out of range"),
        ([draw_ids(0)], "does not run on batch 0 of the calibration data"),
    ],
)
def test_batches_that_the_model_does_not_take(method, data, match):
    assert_refused(build_llama(), lambda model: method(0.5).prune(model, data), match)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_numbers_of_batches(count):
    message = f"max_batches counts batches and must be ≥ 1, got {count}"
    assert_refused(build_llama(), lambda model: pm.Wanda(0.5).prune(model, [draw_ids()], max_batches=count), message)


@pytest.mark.parametrize("method", METHODS)
def test_weights_without_values(method):
    message = r"layers\.0\.self_attn\.q_proj\.weight is on the meta device, where it has no values: reload"
    assert_refused(build_llama("meta"), lambda model: method(0.5).prune(model, [draw_ids()]), message)


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_not_finite(method):
    model = build_llama()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    message = r"layers\.1\.mlp\.up_proj\.weight holds NaN or inf: reload the weights"
    assert_refused(model, lambda model: method(0.5).prune(model, [draw_ids()]), message)


@pytest.mark.parametrize("method", METHODS)
def test_inputs_that_are_not_finite(method):
    """A layer that is not pruned overflows, as those of a model in float16 may."""
    model = build_llama()
    model.model.layers[1].input_layernorm.weight.data.fill_(torch.inf)
    message = r"layers\.1\.self_attn\.q_proj\.weight has infinite or NaN inputs in these data"
    assert_refused(model, lambda model: method(0.5).prune(model, [draw_ids()]), message)


def test_a_layer_without_inputs():
    model = build_llama()
    model.model.layers[1].mlp.unused = nn.Linear(4, 4)
    message = r"layers\.1\.mlp\.unused\.weight has no input in these data: leave it out by exclude"
    inside = "model.layers.*"
    assert_refused(model, lambda model: pm.Wanda(0.5, include=inside).prune(model, [draw_ids()]), message)
    report = pm.Wanda(0.5, include=inside, exclude="*.unused").prune(model, [draw_ids()])
    assert len(report.masks) == 14


def test_a_layer_that_only_some_batches_reach():
    class Routed(nn.Module):
        """One of two layers, chosen by the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.experts, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.experts[int(x[0, 0] > 0)](x))

    data = [-torch.ones(3, 4), -torch.ones(2, 4), torch.ones(5, 4)]
    assert set(pm.Wanda(0.5).prune(Routed(), data).masks) == {"experts.0.weight", "experts.1.weight"}
    with pytest.raises(PomonaError, match=r"experts\.1\.weight has no input in these data"):
        pm.Wanda(0.5).prune(Routed(), data[:2])


def test_blocks_whose_arguments_differ_in_long_batches_only():
    """Every second block of Gemma 2 sees a few tokens back, which makes no difference in a short first batch."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        intermediate_size=24, vocab_size=50, sliding_window=4,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).double().eval()
    data = [draw_ids()[:, :3], draw_ids(), draw_ids(start=0).flip(1)]
    whole = copy.deepcopy(model)
    pm.SparseGPT(0.6).prune(model, data)
    whole.config.use_cache = False
    for index in range(3):  # a block alone is not in a list of blocks, so that the whole model runs
        pm.SparseGPT(0.6, include=f"model.layers.{index}.*").prune(whole, data)
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
