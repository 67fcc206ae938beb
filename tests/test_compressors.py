"""Compressors: quantized and binary weights, alone and in DPF."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import attach_to_network, train
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pomona as pm
from pomona.compressors import COMPRESSORS, Compressor

EXAMPLES: list[Compressor] = [pm.Quantize(bits=2), pm.Quantize(bits=4), pm.Quantize(bits=8), pm.Binary()]


def compress_kept(compressor: Compressor, weights: Tensor, mask: Tensor) -> Tensor:
    """Return the masked weights after compression."""
    out = torch.where(mask, weights, 0.0)
    compressor.compress(out, mask)
    return out


def test_quantize_by_hand() -> None:
    weights = torch.tensor([3.0, -1.4, 0.6, -0.4, 9.0])
    mask = torch.tensor([True, True, True, True, False])
    # Three bits: 7 levels −3 … 3 in units of the largest kept weight over 3, here 1.
    assert compress_kept(pm.Quantize(bits=3), weights, mask).tolist() == [3, -1, 1, 0, 0]
    # Two bits: −3, 0, 3.
    assert compress_kept(pm.Quantize(bits=2), weights, mask).tolist() == [3, 0, 0, 0, 0]


def test_binary_by_hand() -> None:
    weights = torch.tensor([0.2, -0.1, 0.0, -7.0])
    assert compress_kept(pm.Binary(), weights, torch.tensor([True, True, True, False])).tolist() == [1, -1, 1, 0]
    latent = torch.tensor([2.0, -0.5, -3.0])
    pm.Binary().clip_latent(latent)
    assert latent.tolist() == [1, -0.5, -1]


@given(st.sampled_from(EXAMPLES), st.integers(0, 999), st.sampled_from([1e-38, 1.0, 1e30]))
def test_compressed_weights_have_few_levels_and_keep_signs_and_zeros(
    compressor: Compressor, seed: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(7, 9, generator=generator) * scale
    mask = torch.rand(7, 9, generator=generator) < 0.5
    out = compress_kept(compressor, weights, mask)
    assert out.isfinite().all()
    assert not out[~mask].any()
    assert not out[out == 0].signbit().any()
    assert (out * weights.sign() >= 0).all()
    if isinstance(compressor, pm.Quantize):
        largest = torch.where(mask, weights, 0).abs().max()
        assert out.unique().numel() <= 2**compressor.bits - 1
        assert torch.allclose(out.abs().max(), largest)
        step = largest / (2 ** (compressor.bits - 1) - 1)
        assert ((out - torch.where(mask, weights, 0)).abs() <= step / 2 * 1.001).all()
    else:
        assert set(out.unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_zeros_stay_zeros() -> None:
    mask = torch.ones(4, dtype=torch.bool)
    assert compress_kept(pm.Quantize(bits=4), torch.zeros(4), mask).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("compressor", EXAMPLES, ids=str)
def test_dpf_runs_on_compressed_weights_and_trains_dense_ones(compressor: Compressor) -> None:
    model, optimizer, pruner = attach_to_network(pm.DPF(sparsity=0.5, every=4, compressor=compressor), total=16)
    for step in range(16):
        for name, mask in pruner.masks().items():
            weights, latent = model.get_parameter(name).detach(), pruner.state_dict()["latents"][name]
            assert torch.equal(weights, compress_kept(compressor, latent, mask))
            assert latent.unique().numel() > mask.numel() / 2
            if isinstance(compressor, pm.Binary):
                assert latent.abs().max() <= 1
        train(model, optimizer, [step])
    pruner.finish()
    assert pruner.sparsity() == 0.5


def test_delta_is_measured_and_not_clipped() -> None:
    """Binary weights are far from small dense ones: δ = ‖w − C(w)‖² / ‖w‖² is above 1 and is not clipped."""
    model, _, pruner = attach_to_network(pm.DPF(sparsity=0.5, compressor=pm.Binary(), schedule="constant"))
    latents = pruner.state_dict()["latents"]
    error = sum(float((w - model.get_parameter(n).detach()).square().sum()) for n, w in latents.items())
    total = sum(float(w.square().sum()) for w in latents.values())
    assert pruner.history[0]["delta"] == pytest.approx(error / total)
    assert pruner.history[0]["delta"] > 1


def test_delta_without_a_compressor_is_the_pruned_share() -> None:
    _, _, pruner = attach_to_network(pm.DPF(sparsity=0.5, schedule="constant", compressor="none"))
    latents = pruner.state_dict()["latents"]
    pruned = sum(float(w[~pruner.masks()[n]].square().sum()) for n, w in latents.items())
    assert pruner.history[0]["delta"] == pytest.approx(pruned / sum(float(w.square().sum()) for w in latents.values()))
    assert 0 < pruner.history[0]["delta"] < 1


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("quantize", "bits"),
        ("quantize(bits=1)", r"2 to 16 bits, got 1; use Binary\(\) for one bit"),
        ("quantize(bits=17)", "got 17"),
        ("quantise(bits=4)", "did you mean 'quantize'"),
        ("quantize(bits=4.5)", "bits takes int, got 4.5"),
    ],
)
def test_invalid_compressors_are_refused(spelling: str, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        COMPRESSORS.resolve(spelling)
    with pytest.raises(pm.PomonaError, match=message):
        pm.DPF(compressor=spelling)


def test_a_compressor_may_be_given_as_a_string() -> None:
    assert pm.DPF(compressor="quantize(bits=4)").method == pm.DPF(compressor=pm.Quantize(bits=4)).method
