"""`compress` on models as users have them: hooks, several inputs, fast paths, other layers, odd dtypes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import prune_balanced
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize

import pomona as pm
from pomona.sparse import BalancedTensor, compress, decompress
from pomona.sparse.layers import PackedConv1D, PackedConv2d, PackedLinear, PackedLSTM
from pomona.sparse.ops import product


def dense_reasons(model: nn.Module) -> dict[str, str]:
    return model.compression.dense  # type: ignore[union-attr, return-value]


def make_linear(columns: int = 64, rows: int = 32) -> nn.Linear:
    torch.manual_seed(0)
    return prune_balanced(nn.Linear(columns, rows), 32, 3)  # type: ignore[return-value]


class TestHooks:
    def test_the_hooks_of_a_layer_are_called_once_with_what_they_saw_before(self) -> None:
        model = nn.Sequential(make_linear(), nn.Tanh())
        model[0].register_forward_pre_hook(lambda _, given: (2 * given[0],))
        model[0].register_forward_hook(lambda _, given, output: output + 1)
        x = torch.randn(3, 64)
        compressed = compress(model, x, policy="all")
        assert isinstance(compressed[0], PackedLinear)
        torch.testing.assert_close(compressed(x), model(x))
        torch.testing.assert_close(decompress(compressed)(x), model(x))
        torch.testing.assert_close(copy.deepcopy(compressed)(x), model(x))

    @pytest.mark.parametrize("place", [0, 1])
    def test_a_relu_is_not_part_of_a_layer_where_a_hook_sees_what_is_between_them(self, place: int) -> None:
        model = nn.Sequential(make_linear(), nn.ReLU())
        seen: list[Tensor] = []
        if place == 0:
            model[0].register_forward_hook(lambda _, given, output: seen.append(output))
        else:
            model[1].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        x = torch.randn(3, 64)
        compressed = compress(model, x, policy="all")
        seen.clear()
        expected, y = model(x), compressed(x)
        torch.testing.assert_close(y, expected)
        assert len(seen) == 2
        torch.testing.assert_close(*seen)
        assert seen[0].min() < 0

    def test_backward_hooks(self) -> None:
        layer = make_linear()
        seen: list[Tensor] = []
        layer.register_full_backward_hook(lambda _, grad_in, grad_out: seen.append(grad_in[0]))
        x = torch.randn(3, 64, requires_grad=True)
        for model in (layer, compress(layer, policy="all")):
            model(x).sum().backward()
        torch.testing.assert_close(*seen)

    def test_an_lstm_calls_its_hooks_once_for_an_input_that_needs_a_gradient(self) -> None:
        lstm = compress(prune_balanced(nn.LSTM(64, 32), 32, 3), policy="all")
        calls: list[int] = []
        lstm.register_forward_hook(lambda *_: calls.append(1))
        lstm(torch.randn(2, 1, 64, requires_grad=True))
        assert calls == [1]


class TestAutograd:
    @pytest.mark.parametrize("relu", [False, True])
    def test_forward_mode(self, relu: bool) -> None:
        model = nn.Sequential(make_linear(), *[nn.ReLU()] * relu)
        compressed = compress(model, policy="all")
        x, tangent = torch.randn(3, 64), torch.randn(3, 64)
        expected = torch.func.jvp(model, (x,), (tangent,))
        torch.testing.assert_close(torch.func.jvp(compressed, (x,), (tangent,)), expected)
        with forward_ad.dual_level():
            y, dy = forward_ad.unpack_dual(compressed(forward_ad.make_dual(x, tangent)))
            torch.testing.assert_close((y, dy), expected)

    def test_forward_mode_of_a_convolution(self) -> None:
        layer = prune_balanced(nn.Conv2d(64, 8, 3), 32, 3)
        x, tangent = torch.randn(2, 64, 5, 5), torch.randn(2, 64, 5, 5)
        expected = torch.func.jvp(layer, (x,), (tangent,))
        torch.testing.assert_close(torch.func.jvp(compress(layer, policy="all"), (x,), (tangent,)), expected)

    def test_forward_mode_of_an_lstm_is_refused_as_that_of_a_dense_one(self) -> None:
        lstm = prune_balanced(nn.LSTM(64, 32), 32, 3)
        x = torch.randn(3, 2, 64)
        for model in (lstm, compress(lstm, policy="all")):
            with pytest.raises(NotImplementedError, match="forward AD"):
                torch.func.jvp(lambda x, model=model: model(x)[0], (x,), (x,))

    @pytest.mark.parametrize("relu", [False, True])
    def test_the_product_is_differentiable(self, relu: bool) -> None:
        weight = make_linear().weight.detach()
        packed = BalancedTensor.from_dense(weight, 32)
        x, bias = torch.randn(5, 64, requires_grad=True), torch.randn(32, requires_grad=True)
        upstream = torch.randn(5, 32)
        dense = nn.functional.linear(x, weight, bias)
        expected = torch.autograd.grad(dense.relu() if relu else dense, (x, bias), upstream)
        found = torch.autograd.grad(packed.linear(x, bias, relu), (x, bias), upstream)
        torch.testing.assert_close(found, expected)

    def test_packed_values_have_no_gradient(self) -> None:
        packed = BalancedTensor.from_dense(make_linear().weight.detach(), 32)
        packed.values.requires_grad_()
        with pytest.raises(pm.PomonaError, match="packed values have no gradient"):
            packed.linear(torch.randn(2, 64)).sum().backward()


class TestExamples:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make_linear(), make_linear()

        def forward(self, left: Tensor, *, right: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            return {"sum": self.first(left) + scale * self.second(input=right)}

    def test_a_dictionary_of_arguments(self) -> None:
        model, example = self.TwoInputs(), {"left": torch.randn(4, 64), "right": torch.randn(4, 64), "scale": 0.5}
        compressed = compress(model, example, policy="all")
        torch.testing.assert_close(compressed(**example), model(**example))
        assert compressed.compression.batch == 4
        assert compressed.compression.seconds["dense"] > 0

    def test_a_tuple_of_arguments(self) -> None:
        model = nn.Bilinear(4, 4, 64)

        class Net(nn.Sequential):
            def forward(self, a: Tensor, b: Tensor) -> Tensor:
                return self[1](self[0](a, b))

        net = Net(model, make_linear())
        example = torch.randn(2, 4), torch.randn(2, 4)
        compressed = compress(net, example, policy="all")
        torch.testing.assert_close(compressed(*example), net(*example))

    def test_a_packed_sequence(self) -> None:
        lstm = prune_balanced(nn.LSTM(64, 32), 32, 3)
        example = nn.utils.rnn.pack_sequence([torch.randn(5, 64), torch.randn(3, 64)])
        compressed = compress(lstm, example, policy="all")
        assert isinstance(compressed, PackedLSTM)
        torch.testing.assert_close(compressed(example)[0].data, lstm(example)[0].data)

    def test_an_example_that_the_model_does_not_take_is_refused(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
        for example in ({"inputs": torch.randn(2, 8)}, torch.randn(2, 7)):
            with pytest.raises(pm.PomonaError, match=r"Sequential does not run on samples of shape \([78],\): "):
                compress(model, example)
        assert not any(layer._forward_pre_hooks for layer in model)

    def test_an_example_without_a_tensor_is_refused(self) -> None:
        with pytest.raises(pm.PomonaError, match="an example needs a tensor"):
            compress(make_linear(), {"x": 3})

    def test_summary_takes_the_same_examples(self) -> None:
        model = self.TwoInputs()
        example = {"left": torch.randn(4, 64), "right": torch.randn(4, 64)}
        assert pm.summary(model, example).macs == 2 * 64 * 32


def test_convolutions_stay_dense_without_an_example() -> None:
    """Whether a packed convolution is faster depends on its images: ResNet-20 became slower untimed."""
    model = nn.Sequential(prune_balanced(nn.Conv2d(32, 32, 3), 32, 3), nn.ReLU())
    assert dense_reasons(compress(model)) == {"0": "not timed without an example"}
    assert isinstance(compress(model, policy="all")[0], PackedConv2d)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_transformer_encoder_layer_calls_its_packed_parts(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path would read dense weights from packed layers."""
    layer = nn.TransformerEncoderLayer(64, 2, 128, activation=activation, batch_first=True).eval()
    for part in (layer.linear1, layer.linear2):
        prune_balanced(part, 32, 3)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        expected = model(x)
        compressed = compress(model, x, policy="all")
        with monkeypatch.context() as patch:
            patch.setattr(PackedLinear, "weight", property(lambda _: pytest.fail("the weight is unpacked")))
            torch.testing.assert_close(compressed(x), expected, rtol=1e-4, atol=1e-5)
        back = decompress(compressed)
        assert [one.activation_relu_or_gelu for one in back.layers] == [
            one.activation_relu_or_gelu for one in model.layers
        ]
        torch.testing.assert_close(back(x), expected, rtol=1e-4, atol=1e-5)


class PaddedEncoder(nn.Module):
    """A transformer encoder with default options, for sequences and the mask of their padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
        for part in (layer.linear1, layer.linear2):
            prune_balanced(part, 32, 3)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("policy", ["all", "faster"])
@pytest.mark.parametrize("example", ["nothing", "sequences", "sequences and mask"])
def test_a_transformer_encoder_takes_padding_masks(policy: str, example: str, tmp_path: Path) -> None:
    """The dense encoder makes nested tensors of padded sequences: rows that are padding are zeros there."""
    model, x = PaddedEncoder().eval(), torch.randn(3, 7, 64)
    padding = torch.arange(7) >= torch.tensor([[7], [5], [2]])
    examples = {"nothing": None, "sequences": x, "sequences and mask": (x, padding)}
    with torch.no_grad():
        expected = model(x, padding)
        assert not expected[padding].any()
        compressed = compress(model, examples[example], policy=policy, patience=0)
        if policy == "all":
            assert sum(isinstance(part, PackedLinear) for part in compressed.modules()) == 4
        loaded = pm.load(pm.save(compressed, tmp_path / "model"), PaddedEncoder())
        for packed in (compressed, copy.deepcopy(compressed), loaded):
            y = packed(x, padding)
            torch.testing.assert_close(y[~padding], expected[~padding], rtol=1e-4, atol=1e-5)
        back = decompress(compressed)
        assert back.encoder.use_nested_tensor
        assert vars(back.encoder).keys() == vars(model.encoder).keys()
        torch.testing.assert_close(back(x, padding), expected, rtol=1e-4, atol=1e-5)
        assert model.encoder.use_nested_tensor


def make_gpt2() -> nn.Module:
    """Return a small GPT-2 from a config, with balanced blocks in its Conv1D layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=50, n_positions=16, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ == "Conv1D":
                weight = module.weight.T  # (out, in), as blocks are
                mask = pm.Balanced(block=32).select_masks([weight.abs()], 0.9)[0]
                module.weight.copy_(torch.where(mask, weight, 0).T)
    return model


def test_the_conv1d_of_hugging_face_is_packed(tmp_path) -> None:
    model = make_gpt2()
    example = {"input_ids": torch.randint(50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    with torch.no_grad():
        expected = model(**example).logits
        compressed = compress(model, example, policy="all")
        packed = [name for name, module in compressed.named_modules() if isinstance(module, PackedConv1D)]
        assert len(packed) == 8
        assert compressed.get_submodule(packed[0]).weight.shape == model.get_submodule(packed[0]).weight.shape
        torch.testing.assert_close(compressed(**example).logits, expected, rtol=1e-4, atol=1e-5)
        back = decompress(compressed)
        assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))
        loaded = pm.load(pm.save(compressed, tmp_path / "gpt2.safetensors"), make_gpt2())
        torch.testing.assert_close(loaded(**example).logits, expected, rtol=1e-4, atol=1e-5)


def test_sparse_layers_without_a_packed_form_are_listed() -> None:
    model = nn.Sequential(nn.GRU(64, 32), nn.Conv1d(32, 32, 3), nn.MultiheadAttention(32, 2), nn.LayerNorm(32))
    pm.prune(model, sparsity=0.5, allocation="uniform") if hasattr(pm, "prune") else halve(model)
    reasons = dense_reasons(compress(model))
    assert reasons["0"] == "GRU has no packed form"
    assert reasons["1"] == "Conv1d has no packed form"
    assert reasons["2"] == "MultiheadAttention has no packed form"
    assert "3" not in reasons


def halve(model: nn.Module) -> None:
    """Set the first half of every row of every matrix to zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter[:, : parameter.shape[1] // 2] = 0


class TestWeightsThatAreComputed:
    """A layer whose weight is computed anew at each call is refused, or left dense where it is parametrized."""

    def test_parametrizations(self) -> None:
        model, x = nn.Sequential(parametrizations.weight_norm(make_linear())), torch.randn(2, 64)
        torch.testing.assert_close(compress(model, policy="all")(x), model(x))
        parametrize.remove_parametrizations(model[0], "weight")
        assert isinstance(compress(model, policy="all")[0], PackedLinear)


class TestTypes:
    def test_a_weight_that_overflows_stays_dense(self) -> None:
        layer = make_linear()
        with torch.no_grad():
            layer.weight[layer.weight != 0] *= 1e6
        compressed = compress(nn.Sequential(layer), policy="all", dtype=torch.float16)
        assert "too large for torch.float16" in dense_reasons(compressed)["0"]

    @pytest.mark.parametrize(
        "layer", [make_linear(), prune_balanced(nn.Conv2d(64, 8, 3), 32, 3)], ids=["linear", "conv"]
    )
    def test_autocast(self, layer: nn.Module) -> None:
        x = torch.randn(2, 64) if isinstance(layer, nn.Linear) else torch.randn(2, 64, 6, 6)
        packed = compress(layer, policy="all")
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            y, expected = packed(x), layer(x)
        assert y.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)

    @pytest.mark.parametrize("formats", ["balanced", "unstructured"])
    @pytest.mark.parametrize("layer", [make_linear(), prune_balanced(nn.LSTM(64, 64), 32, 3)], ids=["linear", "lstm"])
    @torch.no_grad()
    def test_double_is_refused_with_the_way_out(self, layer: nn.Module, formats: str) -> None:
        packed, x = compress(layer, policy="all", formats=[formats]).double(), torch.randn(2, 1, 64).double()
        for use in (lambda: packed(x), lambda: decompress(packed)):
            with pytest.raises(
                pm.PomonaError, match=r"got torch.float64: convert the dense model, pm.decompress\(model\)"
            ):
                use()
        assert next(decompress(packed.float()).double().parameters()).dtype == torch.float64


class TestDenseProducts:
    """Inputs that no kernel takes are multiplied with a dense matrix, which is kept, and there is a warning."""

    CASES: tuple[tuple[str, Any], ...] = (
        ("float64", lambda x: x.double()),
        ("an infinity or NaN", lambda x: torch.cat([x, torch.full_like(x[:1], torch.inf)])),
        ("needs a gradient", lambda x: x.requires_grad_()),
    )

    @pytest.mark.parametrize(("reason", "change"), CASES, ids=["float64", "infinity", "gradient"])
    @pytest.mark.skipif(product.cpu.load_library() is None, reason="needs the compiled kernels")
    def test_a_warning_once_and_one_dense_matrix(self, reason: str, change: Any, monkeypatch) -> None:
        layer = make_linear()
        packed, x = compress(layer, policy="all"), change(torch.randn(3, 64))
        made: list[Tensor] = []
        unpack = BalancedTensor.unpack
        monkeypatch.setattr(
            BalancedTensor, "unpack", staticmethod(lambda *given: made.append(y := unpack(*given)) or y)
        )
        product.warn_about_dense_product.cache_clear()
        with pytest.warns(UserWarning, match=f"multiplied as dense ones for .*{reason}"):
            y = packed(x)
        again = packed(x)  # a second warning would be an error
        assert len(made) == 1
        torch.testing.assert_close(again, y, equal_nan=True)
        torch.testing.assert_close(y.float(), layer(x.float()), equal_nan=True)

    def test_a_matrix_for_each_dtype_is_kept(self, monkeypatch) -> None:
        packed, x = compress(make_linear(), policy="all"), torch.full((2, 64), torch.inf)
        made: list[Tensor] = []
        unpack = BalancedTensor.unpack
        monkeypatch.setattr(
            BalancedTensor, "unpack", staticmethod(lambda *given: made.append(y := unpack(*given)) or y)
        )
        for _ in range(3):
            packed(x)
            packed(x.double())
            with torch.inference_mode():
                packed(x)
        assert len(made) == 2

    def test_the_kept_matrix_follows_the_weights(self) -> None:
        first, second = (compress(nn.Sequential(make_linear()), policy="all") for _ in range(2))
        x = torch.randn(2, 64, dtype=torch.float64)
        before = first(x)
        with torch.no_grad():
            second[0].weight_values.mul_(2)
        first.load_state_dict(second.state_dict())
        torch.testing.assert_close(first(x) - first[0].bias, 2 * (before - first[0].bias))

    def test_a_matrix_from_inference_mode_is_not_used_for_gradients(self) -> None:
        packed = compress(make_linear(), policy="all")
        with torch.inference_mode():
            packed(torch.randn(2, 64, dtype=torch.float64))
            packed(torch.full((2, 64), torch.inf))
        x = torch.randn(2, 64, requires_grad=True)
        packed(x).sum().backward()
        assert x.grad is not None
