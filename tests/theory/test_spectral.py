"""Norms of convolutions: against explicit matrices, and proven bounds that are never below them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pomona.errors import PomonaError
from pomona.theory import spectral


def convolution_matrix(
    weight: Tensor, size: int, padding: str = "circular", amount: int | None = None, **options: int
) -> Tensor:
    """Return the matrix of a convolution: its outputs for every unit image."""
    inputs = weight.shape[1] * options.get("groups", 1)
    units = torch.eye(inputs * size**2, dtype=torch.float64).reshape(-1, inputs, size, size)
    reach = options.get("dilation", 1) * (weight.shape[-1] - 1)
    edges = (0, reach, 0, reach) if amount is None else (amount,) * 4
    padded = F.pad(units, edges, mode="circular" if padding == "circular" else "constant")
    return F.conv2d(padded, weight.double(), **options).flatten(1).T


def doubly_block_circulant(kernel: Tensor, p: int) -> Tensor:
    """Return the matrix of equation (9): blocks circ(K_1), circ(K_2), … of one padded kernel, shifted row by row."""
    K = torch.zeros(p, p, dtype=torch.float64)
    K[: len(kernel), : len(kernel)] = kernel

    def circ(a: Tensor) -> Tensor:
        return torch.stack([a.roll(k) for k in range(p)])

    blocks = [circ(K[i]) for i in range(p)]
    return torch.cat([torch.cat([blocks[(j - i) % p] for j in range(p)], 1) for i in range(p)])


def spectral_norm(matrix: Tensor) -> float:
    """Return ‖W‖₂ by a singular value decomposition."""
    return float(torch.linalg.matrix_norm(matrix.double(), 2))


def test_lemma_7_matches_the_matrix_of_equation_9() -> None:
    """Two by three channels of kernels on 5 × 5, block by block as equation (8) has them."""
    torch.manual_seed(0)
    weight = torch.randn(2, 3, 3, 3, dtype=torch.float64)
    rows = [torch.cat([doubly_block_circulant(weight[s, t], 5) for t in range(3)], 1) for s in range(2)]
    assert spectral.conv_norm(weight, 5) == pytest.approx(spectral_norm(torch.cat(rows)), rel=1e-10)


def test_norms_of_small_kernels_match_a_hand_computation() -> None:
    ones = torch.ones(1, 1, 3, 3)
    assert spectral.conv_norm(ones, 8) == pytest.approx(9)  # all at frequency 0
    edge = torch.tensor([[[[1.0, -1.0]]]])
    assert spectral.conv_norm(edge, 8) == pytest.approx(2)  # at frequency 4
    assert spectral.conv_norm(edge, 7) == pytest.approx(
        2 * math.cos(math.pi / 14)
    )  # which an image of 7 pixels does not have
    assert spectral.conv_norm(torch.zeros(3, 3, 3, 3), 8) == 0
    assert spectral.conv_bound(torch.zeros(20, 20, 3, 3), 8) == 0
    assert spectral.norm(torch.diag(torch.tensor([1.0, -5.0, 3.0]))) == pytest.approx(5)
    assert spectral.bound(torch.zeros(3, 4)) == 0


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_conv_bound_holds_and_is_tight_for_circular_padding(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from([1, 2]))
    out, inputs = (groups * data.draw(st.integers(1, 3)) for _ in range(2))
    kernel, dilation = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    stride = data.draw(st.sampled_from([1, 2, 3]))
    size = data.draw(st.integers(dilation * (kernel - 1) + 1, 7))
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    weight = torch.randn(out, inputs // groups, kernel, kernel)
    options = {"stride": stride, "dilation": dilation, "groups": groups}

    true = spectral_norm(convolution_matrix(weight, size, **options))
    if size % stride == 0:
        assert spectral.conv_norm(weight, size, **options) == pytest.approx(true, rel=1e-6)
        assert spectral.conv_bound(weight, size, padding="circular", **options) == pytest.approx(true, rel=1e-5)
    assert spectral.conv_bound(weight, size, padding="circular", **options) >= true * (1 - 1e-13)

    amount = data.draw(st.integers(0, 3))
    if size + 2 * amount > dilation * (kernel - 1):
        padded = convolution_matrix(weight, size, "zeros", amount, **options)
        assert spectral.conv_bound(weight, size, **options) >= spectral_norm(padded) * (1 - 1e-13)


def test_conv_bound_for_zero_padding_is_within_ten_percent() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 5, 3, 3)
    true = spectral_norm(convolution_matrix(weight, 8, "zeros", 1))
    assert true <= spectral.conv_bound(weight, 8) <= 1.1 * true


@pytest.mark.parametrize("channels", [(20, 24), (24, 20), (33, 33)])
def test_lanczos_finds_the_largest_norm_of_all_frequencies(channels: tuple[int, int]) -> None:
    """The blocks are too large to be solved exactly; the reference is an SVD of every block."""
    torch.manual_seed(1)
    weight = torch.randn(*channels, 3, 3)
    freqs = spectral.frequencies(weight[None], (9, 9))
    assert len(freqs) == 41  # of 81, one of each conjugate pair
    true = max(largest_complex_norm(part) for part in spectral.frequency_blocks(weight, freqs))
    assert spectral.conv_norm(weight, 9) == pytest.approx(true, rel=2e-6)
    assert true * (1 - 1e-12) <= spectral.conv_bound(weight, 9, padding="circular") <= true * (1 + 4e-6)


def largest_complex_norm(blocks: Tensor) -> float:
    """Return the largest ‖P‖₂ of a batch of complex matrices."""
    return float(torch.linalg.matrix_norm(blocks, 2).max())


def test_conv_norm_where_all_frequencies_have_equal_norm() -> None:
    """An orthogonal 1×1 kernel in the middle of a 3×3: every block has norm 1."""
    weight = torch.zeros(20, 20, 3, 3)
    weight[:, :, 1, 1] = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(0)))[0]
    assert spectral.conv_norm(weight, 8) == pytest.approx(1, rel=1e-6)
    assert 1 <= spectral.conv_bound(weight, 8) <= 1 + 1e-5


def test_proof_corrects_an_estimate_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    weight = torch.randn(20, 20, 3, 3)
    true = spectral_norm(convolution_matrix(weight, 5))
    monkeypatch.setattr(spectral, "largest_block_norm", lambda *_: 0.9 * true)
    assert spectral.conv_bound(weight, 5, padding="circular") == pytest.approx(true, rel=1e-9)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_matrix_bound_exceeds_the_norm_only_by_rounding(rows: int, columns: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    true = spectral_norm(matrix)
    assert true * (1 - 1e-14) <= spectral.bound(matrix) <= true * (1 + 1e-9)
    assert spectral.norm(matrix) == pytest.approx(true, rel=1e-9)


@pytest.mark.parametrize("shape", [(60, 50), (20, 90)])
def test_wide_matrix_is_estimated_and_proven(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    true = spectral_norm(matrix)
    monkeypatch.setattr(spectral, "EXACT_MATRIX_ROWS", 10)
    assert spectral.norm(matrix) == pytest.approx(true, rel=1e-9)
    assert true < spectral.bound(matrix) <= true * (1 + 1e-9)
    monkeypatch.setattr(spectral, "lanczos_norm", lambda *_: 0.5 * true)  # too small, which the proof corrects
    assert true <= spectral.bound(matrix) * (1 + 1e-14) <= true * (1 + 1e-9)


def test_ritz_values_match_singular_values() -> None:
    draw = torch.Generator().manual_seed(0)
    alphas, betas = torch.rand(2, 7, 5, generator=draw)
    for k, value in enumerate(spectral.largest_ritz_values(alphas, betas)):
        square = torch.diag(alphas[:, k]) + torch.diag(betas[:-1, k], 1)
        assert float(value) == pytest.approx(spectral_norm(square), rel=1e-9)
        # The method that a GPU uses.
        assert float(spectral.eigenvalue_by_squaring((square.mT @ square)[None].double())) == pytest.approx(
            spectral_norm(square) ** 2, rel=1e-6
        )
    assert (spectral.largest_ritz_values(torch.zeros(3, 2), torch.zeros(3, 2)) == 0).all()
    assert (spectral.eigenvalue_by_squaring(torch.zeros(2, 3, 3)) == 0).all()


def test_invalid_convolutions_are_refused() -> None:
    with pytest.raises(PomonaError, match="four axes"):
        spectral.conv_norm(torch.randn(3, 3), 8)
    with pytest.raises(PomonaError, match="multiples, got 7×7"):
        spectral.conv_norm(torch.randn(3, 3, 3, 3), 7, stride=2)
    with pytest.raises(PomonaError, match="zeros or circular, got 'reflect'"):
        spectral.conv_bound(torch.randn(3, 3, 3, 3), 7, padding="reflect")


@pytest.mark.gpu
def test_gpu_and_cpu_norms_agree() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64, 3, 3)
    assert spectral.conv_norm(weight.cuda(), 16) == pytest.approx(spectral.conv_norm(weight, 16), rel=2e-6)
    assert spectral.conv_bound(weight.cuda(), 16) == pytest.approx(spectral.conv_bound(weight, 16), rel=4e-6)
