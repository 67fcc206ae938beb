"""https://github.com/NVIDIA/TensorRT-LLM/issues/1802: no latency reduction, and how sparsity goes with quantization."""

from __future__ import annotations

import torch
from complaint_models import make_llama, make_tokens
from engine_helpers import attach_to_network, obeys_masks, train

import pomona as pm
from pomona.sparse import QuantizedBalancedTensor
from pomona.sparse.layers import PackedLayer


def test_a_model_without_zeros_is_not_called_sparse() -> None:
    """A dense llama-7b built with --weight_sparsity took as long as without, and nothing told the user why."""
    result = pm.compress(make_llama(), make_tokens())
    assert not any(isinstance(module, PackedLayer) for module in result.modules())
    assert len(result.compression.dense) == 15
    assert set(result.compression.dense.values()) == {"0% zeros are too few"}


def test_pruned_weights_are_quantized_and_stay_zero() -> None:
    """The user asked whether sparse weights can be quantized too."""
    pruner = pm.DPF(sparsity=0.5, pattern=pm.NM(2, 4), every=2, compressor=pm.Quantize(4))
    model, optimizer, pruner = attach_to_network(pruner, total=16)
    train(model, optimizer, range(16))
    pruner.finish()
    assert obeys_masks(model, pruner, grown=True)
    for name, mask in pruner.masks().items():
        weight = model.get_parameter(name).detach()
        assert bool((mask.reshape(-1, 4).sum(1) == 2).all())
        levels = weight / weight.abs().max() * 7
        assert torch.allclose(levels, levels.round(), atol=1e-9)  # 15 levels, of which one is zero


def test_pruned_weights_are_packed_as_int8_codes() -> None:
    model = make_llama().eval()
    pm.prune(model, 0.75, pattern=pm.Balanced(block=32))
    packed = pm.compress(model, make_tokens(), bits=8, policy="all", patience=0.0)
    layers = [module for module in packed.modules() if isinstance(module, PackedLayer)]
    assert len(layers) == 14
    assert all(isinstance(layer.packed_weight("weight"), QuantizedBalancedTensor) for layer in layers)
    with torch.no_grad():
        expected, actual = (m(make_tokens()).logits for m in (model, packed))
    assert float((actual - expected).norm() / expected.norm()) < 0.02
