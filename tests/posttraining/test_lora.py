"""Low-rank updates of pruned weights: zeros stay exactly zero, and merging changes no output."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pomona as pm
from pomona.errors import PomonaError
from pomona.posttraining import add_lora, merge_lora


def pruned_gpt2(dtype: torch.dtype = torch.float32) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).to(dtype).eval()
    data = [{"input_ids": torch.randint(0, 50, (4, 16))}]
    pm.SparseGPT(pattern="2:4").prune(model, data)
    return model


def train(model: nn.Module, parameters: list[nn.Parameter], steps: int = 5) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        ids = torch.randint(0, 50, (4, 16))
        loss = nn.functional.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_are_kept_exactly_and_outputs_do_not_change(dtype):
    model = pruned_gpt2(dtype)
    dense = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.randint(0, 50, (3, 9))
    with torch.no_grad():
        before = model(input_ids=ids).logits
    factors = add_lora(model, rank=4, alpha=8)
    assert len(factors) == 2 * 8
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in factors}
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)  # b is zero
    train(model, factors)
    with torch.no_grad():
        trained = model(input_ids=ids).logits
    merged = merge_lora(model)
    assert merged is model
    with torch.no_grad():
        assert torch.equal(merged(input_ids=ids).logits, trained)
    assert not torch.equal(trained, before)
    assert set(merged.state_dict()) == set(pruned_gpt2(dtype).state_dict())
    for name, weight in merged.named_parameters():
        assert weight.requires_grad
        if name in ("transformer.h.0.mlp.c_fc.weight", "transformer.h.1.attn.c_attn.weight"):
            assert not torch.equal(weight, dense[name])
        assert bool((weight[dense[name] == 0] == 0).all())
    merged.load_state_dict(pruned_gpt2(dtype).state_dict())  # a plain model


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 3), st.floats(0.1, 4), st.integers(0, 1000))
def test_the_merged_weight_is_the_masked_product(inputs, outputs, rank, alpha, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, outputs), nn.Linear(outputs, 2))
    with torch.no_grad():
        model[0].weight *= torch.rand(outputs, inputs) < 0.5
    weight = model[0].weight.detach().clone()
    a, b = add_lora(model, rank, alpha=alpha, include="0")
    nn.init.normal_(b)
    expected = weight.double() + alpha / rank * (b.double() @ a.double()) * (weight != 0)
    merged = merge_lora(model)[0].weight.detach()
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-5)
    assert bool((merged[weight == 0] == 0).all())


def test_adapters_of_peft_are_merged_without_losing_zeros():
    peft = pytest.importorskip("peft")
    model = pruned_gpt2()
    dense = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(model, config)
    train(adapted, [p for p in adapted.parameters() if p.requires_grad])
    theirs = copy.deepcopy(adapted).merge_and_unload()
    merged = merge_lora(adapted)
    assert [name for name, _ in merged.named_parameters()] == list(dense)
    for (name, ours), other in zip(merged.named_parameters(), theirs.parameters(), strict=True):
        zeros = dense[name] == 0
        assert bool((ours[zeros] == 0).all())
        assert torch.equal(ours[~zeros], other[~zeros])
        if "c_fc.weight" in name:
            assert int((other[zeros] != 0).sum()) > 0.9 * int(zeros.sum())  # what the plain merge makes of them


def test_a_copy_is_merged_while_the_model_goes_on_training():
    model = pruned_gpt2()
    names = [name for name, _ in model.named_parameters()]
    factors = add_lora(model, rank=4)
    train(model, factors)
    ids = torch.randint(0, 50, (3, 9))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        merged = merge_lora(copy.deepcopy(model))
        assert torch.equal(merged(input_ids=ids).logits, expected)
        assert torch.equal(model(input_ids=ids).logits, expected)
    train(model, factors)
    with torch.no_grad():
        trained = model(input_ids=ids).logits
        assert not torch.equal(trained, expected)
        assert torch.equal(merge_lora(model)(input_ids=ids).logits, trained)
    for one in (model, merged):  # an optimizer's state goes by this order
        assert [name for name, _ in one.named_parameters()] == names


def test_a_model_without_updates_is_refused():
    with pytest.raises(PomonaError, match="Linear has no low-rank updates to merge: train it with add_lora"):
        merge_lora(nn.Linear(3, 4))
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(target_modules=["c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True)
    with pytest.raises(PomonaError, match="PeftModel has no low-rank updates to merge"):
        merge_lora(peft.get_peft_model(pruned_gpt2(), config))


def test_what_cannot_work_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(PomonaError, match="rank must be a whole number of 1 or more, got 0"):
        add_lora(model, 0)
    with pytest.raises(PomonaError, match=r"rank must be a whole number of 1 or more, got 1\.5"):
        add_lora(model, 1.5)
    add_lora(model, 2)
    with pytest.raises(PomonaError, match="low-rank updates already"):
        add_lora(model, 2)
    with pytest.raises(PomonaError, match="no linear layer to update"):
        add_lora(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)))
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0"], use_dora=True)
    with pytest.raises(PomonaError, match="merge_lora takes plain LoRA"):
        merge_lora(peft.get_peft_model(nn.Sequential(nn.Linear(3, 4)), config))


def test_a_tied_weight_is_refused_before_anything_changes():
    model = pruned_gpt2()
    with pytest.raises(PomonaError, match=r"transformer\.wte\.weight is also lm_head\.weight.*exclude="):
        add_lora(model, include=["lm_head"])
    assert all(p.requires_grad for p in model.parameters())
    assert add_lora(model, include=["*"], exclude=["transformer.wte*", "transformer.wpe*", "lm_head*"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": True}, "rank must be a whole number of 1 or more, got True"),
        ({"rank": 1.5}, "rank must be a whole number of 1 or more, got 1.5"),
        ({"alpha": "x"}, "alpha must be a finite number or None, got 'x'"),
        ({"alpha": float("nan")}, "alpha must be a finite number or None, got nan"),
    ],
)
def test_options_that_are_no_numbers_are_refused(options, message):
    with pytest.raises(PomonaError, match=message):
        add_lora(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), **options)
