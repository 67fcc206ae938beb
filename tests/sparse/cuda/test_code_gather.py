"""The kernel for int4 and int8 codes: emulated products, their dispatch, and how the work is divided."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from emulation import needs_compiler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing import balanced_weight, is_close
from slow_cases import slow_after
from torch import Tensor

import pomona as pm
from pomona.sparse import QuantizedBalancedTensor
from pomona.sparse.cuda import code_gather, code_units, quantized
from pomona.sparse.cuda.code_gather import GatherConfig, Tiles
from pomona.sparse.cuda.code_units import UnitLayout
from pomona.sparse.ops import quantized_product
from pomona.sparse.quantized import VALUE_TYPES


def pack(rows: int, columns: int, block: int, kept: int, values: str, group: int | None = None,
         seed: int = 0) -> QuantizedBalancedTensor:  # fmt: skip
    """Return a random matrix of codes."""
    weight = balanced_weight(rows, columns, block=block, kept=min(kept, block), seed=seed)
    return QuantizedBalancedTensor.from_dense(weight, block, values, group)


def arrange(packed: QuantizedBalancedTensor, unit_blocks: int | None = None) -> tuple[Tensor, UnitLayout]:
    """Return the units of a matrix and their layout, with so many blocks if given."""
    sizes = packed.kept, packed.block, packed.bits
    blocks, span = packed.values.shape[1], packed.span
    layout = (
        code_units.make_layout(*sizes, unit_blocks, blocks, span)
        if unit_blocks
        else code_units.choose_layout(*sizes, blocks, span)
    )
    return code_units.arrange_units(*packed.parts, packed.block, span, layout), layout


def multiply(packed: QuantizedBalancedTensor, x: Tensor, bias: Tensor | None = None, relu: bool = False,
             unit_blocks: int | None = None) -> Tensor:  # fmt: skip
    """Return x Wᵀ + bias by the kernel."""
    units, layout = arrange(packed, unit_blocks)
    y = x.new_full((len(x), packed.matrix[0]), torch.nan)
    assert code_gather.multiply(layout, x, units, bias, y, x.shape[1], relu)
    return y


def exact_product(packed: QuantizedBalancedTensor, x: Tensor) -> Tensor:
    """Return the product in float64 with the values that the codes stand for."""
    return x.double() @ packed.dense().double().T


class TestUnits:
    @settings(deadline=None)
    @given(
        rows=st.integers(1, 70),
        columns=st.integers(1, 300),
        block=st.sampled_from([3, 16, 25, 32, 64, 100, 300]),
        kept=st.integers(1, 20),
        values=st.sampled_from(list(VALUE_TYPES)),
        group=st.sampled_from([None, 1, 40, 200]),
    )
    def test_every_word_is_where_the_kernel_reads_it(
        self, rows: int, columns: int, block: int, kept: int, values: str, group: int | None
    ) -> None:
        """The dense matrix is read from the units, one row after another, as code_gather.cu describes them."""
        packed = pack(rows, columns, block, kept, values, group)
        units, layout = arrange(packed)
        survivors, bits = layout.unit_blocks * layout.kept, (layout.index_bits, layout.code_bits)
        words = units.transpose(2, 3).flatten(3).long() & 0xFFFFFFFF  # groups, slices, lanes, words
        index_words, code_words = (-(-survivors // (32 // width)) for width in bits)
        parts = words.split(
            [index_words, code_words, words.shape[3] - index_words - code_words], 3
        )  # of indices, of codes, and of scales

        def numbers(found: Tensor, width: int) -> Tensor:
            shifts = torch.arange(0, 32 // width * width, width)
            return (found.unsqueeze(4) >> shifts & (1 << width) - 1).flatten(3)[..., :survivors]

        index, codes = (numbers(part, width) for part, width in zip(parts[:2], bits, strict=True))
        scales = parts[2].to(torch.int32).view(torch.float32)[..., : layout.unit_blocks // layout.scale_blocks]
        scales = scales.repeat_interleave(layout.scale_blocks * layout.kept, 3)
        found = (codes - (1 << layout.code_bits - 1)) * scales
        dense = torch.zeros(*words.shape[:3], layout.unit_blocks * block)
        first = torch.arange(layout.unit_blocks).repeat_interleave(layout.kept) * block
        dense.scatter_add_(3, index + first, found)
        joined = dense.transpose(1, 2).flatten(2).flatten(0, 1)
        assert torch.equal(joined[:rows, :columns], packed.dense())
        assert not joined[rows:].any()
        assert not joined[:, columns:].any()

    def test_the_bytes_of_the_example(self) -> None:
        """3 of 32 at int4, 256 columns a scale: 3.5 bytes a block and row, and a scale for every 8 blocks."""
        layout = code_units.choose_layout(3, 32, 4, 512, 8)
        assert layout == UnitLayout(3, 32, 4, 32, 8)
        assert layout.loads * 16 / 32 == 3.5 + 4 / 8

    def test_a_scale_of_the_whole_row_is_repeated_in_every_unit(self) -> None:
        assert code_units.make_layout(3, 32, 8, 16, 51, 51).scale_blocks == 16
        assert code_units.make_layout(3, 32, 8, 16, 51, 50).scale_blocks == 2


@needs_compiler
@pytest.mark.usefixtures("emulated_gpu")
class TestProducts:
    @pytest.mark.parametrize(
        ("dtype", "rows", "columns", "block", "kept", "values", "group", "n"),
        slow_after(
            4,
            [
                (torch.float16, 70, 1100, 32, 3, "int4", None, 1),
                (torch.bfloat16, 33, 301, 16, 2, "int8", 48, 3),
                (torch.float16, 300, 2048, 32, 3, "int8", None, 1),  # several groups of rows, and units of a warp
                (torch.float32, 40, 700, 25, 20, "int4", 70, 2),
                (torch.bfloat16, 100, 1000, 64, 5, "int4", None, 8),
                (torch.float16, 40, 700, 128, 12, "int8", 100, 1),
                (torch.float16, 40, 700, 300, 12, "int4", None, 4),
                (torch.float16, 40, 700, 32, 32, "int4", None, 16),  # two launches
                (torch.bfloat16, 1, 1, 32, 1, "int8", None, 1),
                (torch.float16, 33, 9000, 32, 2, "int4", None, 5),
            ],
        ),
    )
    def test_a_few_vectors(
        self, dtype: torch.dtype, rows: int, columns: int, block: int, kept: int, values: str, group: int | None, n: int
    ) -> None:
        packed = pack(rows, columns, block, kept, values, group)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows)
        assert is_close(multiply(packed, x, bias, relu=True), (exact_product(packed, x) + bias).relu())

    @pytest.mark.parametrize(
        ("config", "tiles"),
        slow_after(
            2,
            [
                (GatherConfig(1, 4, 3, 1, 0), Tiles(2, 3)),
                (GatherConfig(1, 4, 1, 1, 1), Tiles(5, 2)),
                (GatherConfig(1, 16, 1, 2, 0), Tiles(1, 1)),
                (GatherConfig(2, 4, 1, 1, 1), Tiles(2, 3)),
                (GatherConfig(4, 2, 2, 1, 1), Tiles(5, 2)),
            ],
        ),
    )
    def test_any_division_of_the_work(
        self, monkeypatch: pytest.MonkeyPatch, config: GatherConfig, tiles: Tiles
    ) -> None:
        monkeypatch.setattr(code_gather, "choose_config", lambda *_: config)
        monkeypatch.setattr(code_gather, "choose_tiles", lambda *_: tiles)
        packed, n = pack(150, 1300, 32, 3, "int4"), config.vectors
        x = torch.randn(n, 1300).half()
        assert is_close(multiply(packed, x, unit_blocks=8), exact_product(packed, x))

    @pytest.mark.parametrize(("n", "block"), [(1, 32), (1, 20), (2, 32), (1, 64)])
    @pytest.mark.parametrize("value", [torch.inf, torch.nan])
    def test_an_infinity_meets_pruned_weights(self, n: int, block: int, value: float) -> None:
        packed = pack(40, 1100, block, 10, "int4")
        for column in (5, 1030, 1099):
            x = torch.randn(n, 1100).half()
            x[n - 1, column] = value
            exact = exact_product(packed, x)
            assert is_close(multiply(packed, x), exact)
            assert exact[n - 1].isnan().any()

    def test_wrong_indices_stay_inside_the_memory(self) -> None:
        for block, n in ((25, 1), (100, 1), (32, 3)):
            packed = pack(40, 450, block, 3, "int4")
            packed.indices.fill_(-1)  # every bit set
            assert multiply(packed, torch.randn(n, 450).half()).isfinite().all()

    def test_the_largest_inputs_do_not_overflow(self) -> None:
        packed = QuantizedBalancedTensor.from_dense(torch.full((2, 64), 2.0**-10), 32, "int4")
        x = torch.full((1, 64), 65504.0).half()
        assert is_close(multiply(packed, x), exact_product(packed, x))

    def test_too_many_vectors_are_declined(self) -> None:
        packed, x = pack(40, 64, 32, 3, "int4"), torch.randn(17, 64).half()
        units, layout = arrange(packed)
        assert not code_gather.multiply(layout, x, units, None, x.new_empty(17, 40), 64, False)


@pytest.fixture
def gpu_operator(emulated_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operator use the kernels of a GPU for tensors on a CPU."""
    monkeypatch.setitem(quantized_product.BACKENDS, "cpu", quantized.multiply_quantized)


@needs_compiler
@pytest.mark.usefixtures("gpu_operator")
class TestOperator:
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        rows=st.integers(0, 60),
        columns=st.sampled_from([1, 31, 64, 99]),
        n=st.sampled_from([0, 1, 2, 5]),
        layout=st.sampled_from(["rows", "transposed", "strided", "sliced"]),
        values=st.sampled_from(list(VALUE_TYPES)),
        dtype=st.sampled_from([torch.float16, torch.bfloat16]),
        biased=st.booleans(),
    )
    @pytest.mark.slow
    def test_any_input(
        self, rows: int, columns: int, n: int, layout: str, values: str, dtype: torch.dtype, biased: bool
    ) -> None:
        packed = pack(rows, columns, 32, 3, values)
        x, bias = torch.randn(n, columns).to(dtype), torch.randn(rows) if biased else None
        given = {
            "rows": x,
            "transposed": x.T.contiguous(),
            "strided": x.T.contiguous().T,
            "sliced": torch.stack([x, x + 1], -1)[..., 0],
        }[layout]
        transposed = layout == "transposed"
        y = packed.product(given, *packed.parts, bias, *packed.sizes, False, transposed)
        y = y.T if transposed else y
        exact = exact_product(packed, x)
        assert y.dtype == dtype
        assert is_close(y, exact if bias is None else exact + bias)

    def test_many_vectors_use_the_kernels_for_values(self) -> None:
        packed, x = pack(40, 64, 32, 3, "int4"), torch.randn(20, 64).half()
        assert is_close(packed.linear(x), exact_product(packed, x))

    def test_the_gradient_of_x_and_none_of_codes(self) -> None:
        packed, x = pack(40, 64, 32, 3, "int8"), torch.randn(2, 64, requires_grad=True)
        bias = torch.randn(40, requires_grad=True)
        packed.linear(x, bias).sum().backward()
        assert torch.allclose(x.grad, packed.dense().sum(0).expand(2, 64), atol=1e-5)
        assert torch.equal(bias.grad, torch.full((40,), 2.0))

    def test_codes_that_change_are_arranged_again(self) -> None:
        packed, x = pack(40, 64, 32, 3, "int8"), torch.randn(1, 64).half()
        packed.linear(x)
        packed.values.neg_()
        assert is_close(packed.linear(x), exact_product(packed, x))
        packed.scales.mul_(2)
        assert is_close(packed.linear(x), exact_product(packed, x))

    def test_units_are_arranged_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        packed, x = pack(40, 64, 32, 3, "int4"), torch.randn(1, 64).half()
        first = packed.linear(x)
        monkeypatch.setattr(quantized, "arrange_units", None)
        assert torch.equal(packed.linear(x), first)

    def test_a_matrix_made_in_inference_mode(self) -> None:
        with torch.inference_mode():
            packed, x = pack(40, 64, 32, 3, "int4"), torch.randn(1, 64).half()
            for _ in range(2):
                assert is_close(packed.linear(x), exact_product(packed, x))
                packed.values.bitwise_xor_(0x11)

    def test_other_dtypes_are_multiplied_as_dense(self) -> None:
        packed, x = pack(40, 64, 32, 3, "int4"), torch.randn(3, 64, dtype=torch.float64)
        quantized_product.warn_about_dense_product.cache_clear()
        with pytest.warns(UserWarning, match="multiplied as dense"):
            y = packed.linear(x)
        assert is_close(y, exact_product(packed, x))

    def test_inputs_that_do_not_fit_are_refused(self) -> None:
        packed = pack(40, 64, 32, 3, "int4")
        with pytest.raises(pm.PomonaError, match=r"\(65,\) features"):
            packed.linear(torch.randn(1, 65).half())


class TestConfig:
    @settings(deadline=None)
    @given(
        n=st.integers(1, code_gather.MAX_VECTORS),
        kept=st.integers(1, 128),
        block=st.sampled_from([16, 25, 32, 64, 128, 256]),
        bits=st.sampled_from([4, 8]),
        groups=st.integers(1, 1000),
        blocks=st.integers(1, 1000),
        span=st.integers(1, 1000),
        dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    )
    def test_every_config_fits_the_device(
        self, n: int, kept: int, block: int, bits: int, groups: int, blocks: int, span: int, dtype: torch.dtype
    ) -> None:
        layout = code_units.choose_layout(min(kept, block), block, bits, blocks, min(span, blocks))
        assert layout.unit_blocks % layout.scale_blocks == 0
        config = code_gather.choose_config(dtype, n, layout)
        assert config.vectors * dtype.itemsize <= 16
        assert config.gather or (config.vectors == 1 and block <= 32)
        slices = layout.slices(blocks)
        tiles = code_gather.choose_tiles(config, layout, dtype, groups, slices, 132)
        if tiles is None:
            own_slices = -(-slices // min(slices, code_gather.MAX_PARTS))
            assert own_slices * layout.unit_blocks * block * config.vectors * dtype.itemsize > 90 << 10
            return
        used = code_gather.shared_bytes(config, layout, dtype, slices, tiles)
        assert used * config.min_blocks <= 227 << 10
        assert tiles.parts <= slices


@pytest.mark.gpu
class TestOnGPU:
    @pytest.mark.parametrize(
        ("dtype", "rows", "columns", "block", "kept", "values", "n"),
        [
            (torch.float16, 4096, 4096, 32, 3, "int4", 1),
            (torch.bfloat16, 4096, 4096, 32, 3, "int8", 1),
            (torch.float16, 5120, 13824, 32, 3, "int4", 1),
            (torch.float16, 777, 4031, 32, 7, "int4", 3),
            (torch.bfloat16, 1030, 5000, 16, 2, "int8", 8),
            (torch.float16, 3000, 1536, 64, 6, "int4", 1),
            (torch.float16, 3000, 1536, 128, 12, "int4", 16),
            (torch.float32, 300, 1500, 25, 5, "int8", 2),
            (torch.float16, 16384, 16384, 32, 3, "int4", 8),
            (torch.float16, 1000, 4096, 32, 3, "int4", 40),
        ],
    )
    def test_products(
        self, dtype: torch.dtype, rows: int, columns: int, block: int, kept: int, values: str, n: int
    ) -> None:
        packed = pack(rows, columns, block, kept, values).to("cuda")
        x, bias = torch.randn(n, columns, device="cuda").to(dtype), torch.randn(rows, device="cuda")
        y = packed.linear(x, bias, True)
        assert is_close(y.cpu(), (exact_product(packed, x) + bias).relu().cpu())
        for _ in range(10):  # the order of sums does not depend on which thread block is the last
            assert torch.equal(packed.linear(x, bias, True), y)

    def test_an_infinity(self) -> None:
        packed = pack(500, 900, 32, 3, "int4").to("cuda")
        for n in (1, 3):
            x = torch.randn(n, 900, device="cuda").half()
            x[n - 1, 7] = torch.inf
            assert is_close(packed.linear(x).cpu(), exact_product(packed, x).cpu())

    def test_a_captured_product(self) -> None:
        packed, x = pack(500, 2000, 32, 3, "int4").to("cuda"), torch.randn(1, 2000, device="cuda").half()
        packed.linear(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = packed.linear(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert is_close(y.cpu(), exact_product(packed, x).cpu())
