"""Packed layers that read the same input run as one product, and one by one wherever that would be wrong."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import balanced_weight
from torch import Tensor, nn

import pomona as pm
from pomona.sparse import BalancedTensor, compress, decompress
from pomona.sparse.formats import FORMATS
from pomona.sparse.layers import PackedLinear
from pomona.sparse.layers.shared_input import SharedInput

pytestmark = pytest.mark.filterwarnings("ignore:packed weights are multiplied as dense ones")


class Attention(nn.Module):
    """Three layers that read one input, and one that reads another."""

    def __init__(self, rows: tuple[int, ...] = (64, 32, 40), bias: bool = True, columns: int = 64) -> None:
        super().__init__()
        self.readers = nn.ModuleList(nn.Linear(columns, count, bias) for count in rows)
        self.out = nn.Linear(sum(rows), columns, bias)
        for seed, layer in enumerate((*self.readers, self.out)):
            layer.weight.data = balanced_weight(*layer.weight.shape, block=32, kept=3, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([reader(x) for reader in self.readers], -1))


def pack(model: nn.Module, bits: int | None = None, columns: int = 64) -> nn.Module:
    packed = compress(model, torch.randn(1, columns), policy="all", bits=bits, block=32, patience=0)
    return packed.eval()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every product adds its number of rows."""
    rows: list[int] = []
    for kind in {FORMATS["balanced"], FORMATS["balanced_quantized"]}:
        product, place = kind.product, 2 + len(kind.part_names)

        def count(*given: Any, product: Any = product, place: int = place) -> Tensor:
            rows.append(given[place])
            return product(*given)

        monkeypatch.setattr(kind, "product", staticmethod(count))
    return rows


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_one_product_for_one_vector(bits: int | None, bias: bool, products: list[int]) -> None:
    model = Attention(bias=bias)
    packed = pack(model, bits)
    for shape in ((1, 64), (64,), (1, 1, 64)):
        x = torch.randn(shape)
        products.clear()
        with torch.no_grad():
            y = packed(x)
        assert products == [64 + 32 + 40, 64]
        torch.testing.assert_close(y, decompress(packed)(x), rtol=1e-2, atol=1e-2)
        assert y.shape == shape
    with torch.no_grad():
        products.clear()
        packed(torch.randn(3, 64))
    assert products == [64, 32, 40, 64]  # their parts of a matrix of outputs would not be contiguous


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_any_sizes(groups: list[int], last: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = Attention((*[32 * count for count in groups], last), bias)
    packed, x = pack(model), torch.randn(1, 64)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), model(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(packed(x), model(x), rtol=1e-4, atol=1e-5)


def test_layers_are_called_in_any_order_again_and_with_other_inputs(products: list[int]) -> None:
    packed = pack(Attention())
    first, second, third = packed.readers
    plain = decompress(packed).readers
    x, y = torch.randn(1, 64), torch.randn(1, 64)
    with torch.no_grad():
        calls = [(third, 2, x), (first, 0, x), (first, 0, y), (second, 1, x), (second, 1, x), (first, 0, x)]
        products.clear()
        for layer, place, vector in calls:
            torch.testing.assert_close(layer(vector), plain[place](vector), rtol=1e-4, atol=1e-5)
        assert products == [136] * 4  # x, y, x again, and x once more for the layer that has had its output


def test_an_input_that_was_changed_is_multiplied_again() -> None:
    packed = pack(Attention())
    plain, x = decompress(packed).readers, torch.randn(1, 64)
    with torch.no_grad():
        packed.readers[0](x)
        x += 1
        torch.testing.assert_close(packed.readers[1](x), plain[1](x), rtol=1e-4, atol=1e-5)
    with torch.inference_mode():  # where changes are not counted
        z = torch.randn(1, 64)
        packed.readers[0](z)
        z += 1
        torch.testing.assert_close(packed.readers[1](z), plain[1](z), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_threads_take_the_outputs_of_their_own_inputs(monkeypatch: pytest.MonkeyPatch, products: list[int]) -> None:
    """Another thread calls the first layer while this one multiplies, and the other layers after that."""
    packed = pack(Attention())
    plain, multiply, (x, z) = decompress(packed).readers, SharedInput.multiply, torch.randn(2, 1, 64).unbind()
    called, resume, outputs = threading.Event(), threading.Event(), []

    @torch.no_grad()
    def run() -> None:
        outputs.append(packed.readers[0](z))
        called.set()
        assert resume.wait(10)
        outputs.extend(reader(z) for reader in packed.readers[1:])

    def multiply_after_the_other(shared: SharedInput, vector: Tensor) -> Tensor:
        if vector is x and not called.is_set():
            other.start()
            assert called.wait(10)
        return multiply(shared, vector)

    monkeypatch.setattr(SharedInput, "multiply", multiply_after_the_other)
    other = threading.Thread(target=run)
    products.clear()
    own = [packed.readers[0](x)]
    resume.set()
    other.join()
    own += [reader(x) for reader in packed.readers[1:]]
    for found, vector in ((outputs, z), (own, x)):
        torch.testing.assert_close(found, [reader(vector) for reader in plain], rtol=1e-4, atol=1e-5)
    assert products == [136, 136]


def test_copies_share_their_own_weights(products: list[int]) -> None:
    packed, x = pack(Attention()), torch.randn(1, 64)
    stream = io.BytesIO()
    torch.save(packed, stream)
    stream.seek(0)
    with torch.no_grad():
        y = packed(x)
        for other in (copy.deepcopy(packed), torch.load(stream, weights_only=False)):
            products.clear()
            assert torch.equal(other(x), y)
            assert products == [136, 64]
            other.readers[1].weight_values.zero_()
            assert torch.equal(packed(x), y)
            assert not torch.equal(other(x), y)


@pytest.mark.parametrize("change", ["half", "assigned", "double buffered"])
def test_layers_that_lost_their_part_multiply_one_by_one(change: str, products: list[int]) -> None:
    packed, x = pack(Attention()), torch.randn(1, 64)
    if change == "half":
        packed.half()
        x = x.half()
    elif change == "assigned":
        packed.load_state_dict(copy.deepcopy(pack(Attention()).state_dict()), assign=True)
    else:
        packed.readers[2].weight_values = packed.readers[2].weight_values.clone()
    products.clear()
    with torch.no_grad():
        y = packed(x)
    assert products == [64, 32, 40, 64]
    torch.testing.assert_close(y, decompress(packed)(x), rtol=2e-2, atol=2e-2)


def test_a_state_that_is_loaded_in_place_is_used() -> None:
    packed, other = pack(Attention()), Attention()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter *= 2
    packed.load_state_dict(pack(other).state_dict())
    x = torch.randn(1, 64)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), other(x), rtol=1e-4, atol=1e-4)  # the weights are twice as large


def test_gradients_and_autocast() -> None:
    packed, model = pack(Attention()), Attention()
    x = torch.randn(1, 64, requires_grad=True)
    packed(x).sum().backward()
    expected = torch.autograd.grad(model(y := x.detach().clone().requires_grad_()).sum(), y)[0]
    torch.testing.assert_close(x.grad, expected)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = packed(x), model(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert (y - expected).norm() < 0.05 * expected.norm()


def test_a_wrong_number_of_features_is_refused() -> None:
    packed = pack(Attention())
    with torch.no_grad(), pytest.raises(pm.PomonaError, match="1 features where the layer has 64"):
        packed.readers[0](torch.randn(64, 1))


def test_layers_of_other_inputs_sizes_and_formats_are_not_stacked() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = Attention(), Attention((64, 64)), Attention((40, 64))

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x + 1) + self.two(x) + self.three(x - 1)

    packed = pack(Two())
    assert [reader.shared is not None for reader in packed.one.readers] == [True] * 3
    assert packed.one.readers[0].shared is not packed.two.readers[0].shared
    assert packed.one.out.shared is None
    assert [reader.shared for reader in packed.three.readers] == [None, None]  # 40 rows are no whole groups of 32
    mixed = Attention((64, 64, 64))
    mixed.readers[1].weight.data = balanced_weight(64, 64, block=32, kept=5)
    readers = pack(mixed).readers
    assert [reader.shared is not None for reader in readers] == [True, False, True]


def test_compiled_and_exported_models_multiply_layer_by_layer() -> None:
    packed, x = pack(Attention()), torch.randn(1, 64)
    with torch.no_grad():
        y = packed(x)
        torch.testing.assert_close(torch.compile(packed, backend="aot_eager", fullgraph=True)(x), y)
        program = torch.export.export(packed, (x,))
        torch.testing.assert_close(program.module()(x), y)


def test_a_decoder_generates_the_same_tokens(products: list[int], tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, bos_token_id=0, eos_token_id=None, pad_token_id=0, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    pm.Wanda(0.9, pattern="balanced(32)").prune(model, [{"input_ids": torch.randint(50, (4, 16))}])
    packed = compress(model, {"input_ids": torch.randint(50, (1, 1))}, policy="all", patience=0)
    ids = torch.randint(50, (1, 4))
    products.clear()
    tokens = packed.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens, model.generate(ids, max_new_tokens=6, do_sample=False))
    assert products[-8:] == [3 * 64, 64, 2 * 96, 64] * 2  # two blocks of four products for a token
    loaded = pm.load(pm.save(packed, tmp_path / "model"), copy.deepcopy(model))
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def test_the_stacked_weight_is_the_weights_one_below_the_other() -> None:
    packed = pack(model := Attention((64, 32, 8)))
    layers: list[PackedLinear] = list(packed.readers)
    shared = layers[0].shared
    assert shared is not None
    assert shared.rows == [64, 32, 8]
    stacked = BalancedTensor(*shared.stacked[:2], torch.Size((104, 64)), 32)
    assert torch.equal(stacked.dense(), torch.cat([reader.weight for reader in model.readers]))
    assert torch.equal(shared.stacked[2], torch.cat([reader.bias for reader in model.readers]))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [None, 4])
def test_one_product_in_a_cuda_graph(bits: int | None, products: list[int]) -> None:
    """The graph holds one product for three layers, and reads its input anew at each replay."""
    model = Attention((512, 256, 256), bias=False, columns=512).cuda().half()
    packed = compress(model, torch.randn(1, 512).cuda().half(), policy="all", bits=bits, block=32, patience=0)
    x = torch.randn(1, 512).cuda().half()
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        packed(x)
        stream.synchronize()
        products.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = packed(x)
    assert products == [1024, 512]
    plain = decompress(packed)
    for _ in range(2):
        x.copy_(torch.randn(1, 512))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(y, plain(x), rtol=2e-2, atol=2e-2 * float(y.abs().max()))
