"""The LSTM kernel: emulated, and on a device."""

from __future__ import annotations

import pytest
import torch
from emulation import needs_compiler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing import balanced_weight
from slow_cases import slow_after
from torch import Tensor, nn

from pomona.sparse.cuda.lstm import run_lstm
from pomona.sparse.ops import balanced_lstm
from pomona.sparse.ops.lstm import pack_joint_weights

Network = tuple[nn.LSTM, tuple[list[Tensor], ...], list[int]]


def balanced_lstm_network(
    dtype: torch.dtype, width: int, units: int, layers: int, both: bool, block: int, kept: int
) -> Network:
    """Return an LSTM in float64 with balanced weights representable in `dtype`, and the arguments of the operator."""
    net = nn.LSTM(width, units, layers, bidirectional=both, dtype=torch.float64)
    for seed, parameter in enumerate(net.parameters()):
        rows, *columns = parameter.shape
        exact = balanced_weight(rows, *columns, block=block, kept=kept, seed=seed) if columns else parameter
        parameter.data = exact.detach().to(dtype).double()
    weights = {name: p.detach() for name, p in net.named_parameters()}
    packs = []
    for layer in range(layers):
        names = [f"l{layer}", f"l{layer}_reverse"][: 1 + both]
        pairs = [(weights[f"weight_ih_{n}"].to(dtype), weights[f"weight_hh_{n}"].to(dtype)) for n in names]
        packs.append(
            pack_joint_weights(pairs, [weights[f"bias_ih_{n}"] + weights[f"bias_hh_{n}"] for n in names], block)
        )
    return net, tuple(map(list, zip(*packs, strict=True))), [block] * layers


def matches_float64(given: tuple[Tensor, ...], exact: tuple[Tensor, tuple[Tensor, Tensor]]) -> bool:
    """Return whether outputs and states are those of float64 up to rounding."""
    eps = max(8 * torch.finfo(given[0].dtype).eps, 1e-5)
    pairs = zip(given, (exact[0], *exact[1]), strict=True)
    return all(torch.allclose(a.double(), b, rtol=eps, atol=eps, equal_nan=True) for a, b in pairs)


@needs_compiler
@pytest.mark.usefixtures("emulated_gpu")
class TestLSTM:
    @pytest.mark.parametrize(
        ("dtype", "width", "units", "layers", "both", "block", "kept", "steps", "n"),
        slow_after(
            2,
            [
                (torch.float32, 32, 32, 1, False, 32, 3, 1, 1),
                (torch.float16, 40, 30, 2, False, 25, 5, 3, 1),  # incomplete last blocks and last group of rows
                (torch.float16, 64, 24, 2, True, 32, 4, 2, 2),
                (torch.bfloat16, 20, 50, 1, True, 10, 2, 3, 8),
                (torch.float32, 7, 33, 1, True, 16, 16, 4, 3),
                (torch.float16, 600, 70, 1, False, 16, 1, 1, 5),  # more blocks than warps
            ],
        ),
    )
    def test_a_network_from_zeros_and_from_a_state(
        self, dtype: torch.dtype, width: int, units: int, layers: int, both: bool, block: int, kept: int, steps: int,
        n: int,
    ) -> None:  # fmt: skip
        net, packs, blocks = balanced_lstm_network(dtype, width, units, layers, both, block, kept)
        x = torch.randn(steps, n, width).to(dtype)
        with torch.no_grad():
            exact = net(x.double())
            given = run_lstm(x, None, None, *packs, blocks)
            assert given is not None
            assert matches_float64(given, exact)
            state = [torch.randn_like(t).to(dtype) for t in given[1:]]
            again = run_lstm(x.transpose(0, 1).contiguous().transpose(0, 1), *state, *packs, blocks)
            assert again is not None
            assert matches_float64(again, net(x.double(), tuple(t.double() for t in state)))

    @pytest.mark.slow
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(width=st.integers(1, 90), units=st.integers(1, 70), steps=st.integers(1, 3), both=st.booleans())
    def test_any_width_and_any_number_of_units(self, width: int, units: int, steps: int, both: bool) -> None:
        net, packs, blocks = balanced_lstm_network(torch.float32, width, units, 1, both, 32, 2)
        x = torch.randn(steps, 2, width)
        given = run_lstm(x, None, None, *packs, blocks)
        assert given is not None
        with torch.no_grad():
            assert matches_float64(given, net(x.double()))

    @pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
    def test_infinities_and_nans_are_those_of_the_dense_network(self, value: float) -> None:
        net, packs, blocks = balanced_lstm_network(torch.float32, 40, 20, 1, True, 32, 3)
        x, h, c = torch.randn(2, 3, 40), torch.randn(2, 3, 20), torch.randn(2, 3, 20)
        x[0, 0, 5] = h[1, 1, 3] = c[0, 2, 4] = value
        given = run_lstm(x, h, c, *packs, blocks)
        assert given is not None
        with torch.no_grad():
            exact = net(x.double(), (h.double(), c.double()))
        assert exact[0].isnan().any()
        assert not exact[0].isnan().all()
        assert matches_float64(given, exact)

    def test_unsupported_arguments_are_declined(self) -> None:
        _, packs, blocks = balanced_lstm_network(torch.float16, 64, 16, 1, False, 32, 3)
        x = torch.randn(1, 9, 64).half()
        assert run_lstm(x, None, None, *packs, blocks) is None
        assert run_lstm(x[:, :8].float(), None, None, *packs, blocks) is None
        assert run_lstm(x[:, :8], None, None, *packs, [64]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_a_network_on_a_device(both: bool, n: int) -> None:
    net, packs, blocks = balanced_lstm_network(torch.float16, 100, 70, 2, both, 25, 5)
    x = torch.randn(4, n, 100).half()
    given = balanced_lstm(x.cuda(), None, None, *([t.cuda() for t in part] for part in packs), blocks)
    with torch.no_grad():
        assert matches_float64(tuple(t.cpu() for t in given), net(x.double()))


@pytest.mark.gpu
def test_a_network_in_a_cuda_graph() -> None:
    """Steps start before the previous step has ended, and before the kernel ahead of the first step has ended."""
    _, packs, blocks = balanced_lstm_network(torch.float16, 100, 70, 2, True, 25, 5)
    packed = [[t.cuda() for t in part] for part in packs]
    x = torch.zeros(20, 1, 100, device="cuda").half()
    balanced_lstm(x, None, None, *packed, blocks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = balanced_lstm(x * 2, None, None, *packed, blocks)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        called = balanced_lstm(x * 2, None, None, *packed, blocks)
        assert all(torch.equal(one, other) for one, other in zip(captured, called, strict=True))
        assert called[0].abs().max() > 0.01
