"""Operator norms of linear layers and convolutions: the singular values of Lemma 7 of Qian & Klabjan, ICML 2021.

A convolution with wrap-around padding is block-diagonal in the Fourier basis. Its norm is the largest norm of the
blocks P(u, v) = Σ_ij F_ij ω^(ui + vj), one out × in matrix a frequency, and P(−u, −v) is the conjugate of P(u, v).
A convolution with stride s has no stride when the input's s² phases are taken as channels. A zero-padded convolution is
part of the circular one on a larger image.

    norm, conv_norm      an estimate, for measurements
    bound, conv_bound    a proven upper bound, for certificates: float64, with a margin for rounding

Lanczos steps run on all frequencies at once, and a frequency is dropped as soon as its norm falls behind the largest.
The result is the norm to seven digits. A Cholesky factor of λ − P Pᴴ for every frequency then proves that no norm is
larger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import require

SMALL_BLOCK_ROWS = 16  # blocks with at most this many rows are solved exactly, in one batch
EXACT_MATRIX_ROWS = 512  # a single matrix with more rows is estimated and proven, not solved
CHUNK_ENTRIES = 2**24  # entries of the blocks held in memory at a time
MAX_LANCZOS_STEPS = 400
ESTIMATE_TOLERANCE = 1e-6  # relative error of an estimate over many frequencies, and the slack of its proof
MATRIX_TOLERANCE = 1e-10  # relative error of an estimate for a single matrix, and the slack of its proof
SQUARINGS = 24  # of a small matrix for its largest eigenvalue, whose relative error is then below 2^−25
Pair = int | Sequence[int]


def norm(matrix: Tensor) -> float:
    """Return ‖W‖₂ of a matrix; a tensor with more axes is taken as out × the rest."""
    w = as_matrix(matrix)
    if min(w.shape) <= EXACT_MATRIX_ROWS:
        return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(smaller_gram(w))[-1])))
    return lanczos_norm(w[:, :, None, None], torch.zeros(1, 2, dtype=torch.float64), MATRIX_TOLERANCE)


def bound(matrix: Tensor) -> float:
    """Return a proven upper bound of ‖W‖₂ with a margin for rounding, tight to about ten digits."""
    w = as_matrix(matrix)
    level = norm(w)
    if min(w.shape) > EXACT_MATRIX_ROWS:
        level = prove_upper_bound(w[None], level * (1 + MATRIX_TOLERANCE))
    return level * rounding_margin(w.shape[0], w.shape[1])


def conv_norm(weight: Tensor, size: Pair, *, stride: Pair = 1, dilation: Pair = 1, groups: int = 1) -> float:
    """Return ‖W‖₂ of a convolution with circular padding on images of this size, to at least six digits.

    It is an estimate: a frequency may be dropped too early, which is very rare from a random start.
    """
    kernels, grid = unstrided_kernels(weight, size, stride, dilation, groups)
    return largest_block_norm(kernels, frequencies(kernels, grid))


def conv_bound(
    weight: Tensor, size: Pair, *, stride: Pair = 1, dilation: Pair = 1, groups: int = 1, padding: str = "zeros"
) -> float:
    """Return a proven upper bound of a convolution's norm on images of this size, for any amount of padding.

    With zero padding the convolution is part of the circular one on size + kernel − 1. With circular padding the bound
    is the norm itself, as long as the padding repeats no pixel twice.
    """
    require(padding in ("zeros", "circular"), f"padding is zeros or circular, got '{padding}'.")
    reach = [d * (k - 1) for d, k in zip(as_pair(dilation), weight.shape[-2:], strict=True)]
    if padding == "zeros":
        # Rounded up to whole strides: a larger circular image contains the same convolution.
        size = [-(-(n + r) // s) * s for n, r, s in zip(as_pair(size), reach, as_pair(stride), strict=True)]
    elif any(n % s for n, s in zip(as_pair(size), as_pair(stride), strict=True)):
        stride = 1  # the outputs without stride include those with it
    kernels, grid = unstrided_kernels(weight, size, stride, dilation, groups)
    freqs = frequencies(kernels, grid)
    level = largest_block_norm(kernels, freqs) * (1 + ESTIMATE_TOLERANCE)
    for group in kernels:
        for part in frequency_blocks(group, freqs):
            level = prove_upper_bound(part, level)
    return level * rounding_margin(kernels.shape[1], kernels.shape[2], kernels[0, 0, 0].numel())


# ---- blocks of the Fourier basis


def unstrided_kernels(
    weight: Tensor, size: Pair, stride: Pair, dilation: Pair, groups: int
) -> tuple[Tensor, tuple[int, int]]:
    """Return (group, out, in, kh, kw) kernels of the same operator without stride or dilation, and the image size."""
    require(weight.ndim == 4, f"a convolution's weight has four axes (out, in, height, width), got {weight.ndim}.")
    (height, width), (down, right), (far, wide) = as_pair(size), as_pair(stride), as_pair(dilation)
    require(
        height % down == 0 and width % right == 0,
        f"a circular convolution with stride {down}×{right} needs an image whose sides are multiples, got "
        f"{height}×{width}.",
    )
    kh, kw = (weight.shape[2] - 1) * far + 1, (weight.shape[3] - 1) * wide + 1
    rows, columns = -(-kh // down), -(-kw // right)
    spaced = weight.new_zeros(*weight.shape[:2], rows * down, columns * right)
    spaced[:, :, :kh:far, :kw:wide] = weight.detach()
    phases = spaced.unflatten(3, (columns, right)).unflatten(2, (rows, down))  # out, in, row, down, column, right
    kernels = phases.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    return kernels.unflatten(0, (groups, -1)), (height // down, width // right)


def frequencies(kernels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return one angle (θ, φ) of each conjugate pair; only 0 along an axis on which the kernel has one tap."""
    rows, columns = (n if k > 1 else 1 for n, k in zip(grid, kernels.shape[3:], strict=True))
    pairs = itertools.product(range(rows), range(columns))
    half = [(u, v) for u, v in pairs if (u, v) <= (-u % rows, -v % columns)]
    return torch.tensor(half, dtype=torch.float64) * 2 * math.pi / torch.tensor([rows, columns], dtype=torch.float64)


def tap_phases(kernel: Tensor, freqs: Tensor) -> Tensor:
    """Return e^(i (θ a + φ b)) for each frequency and each tap (a, b) of the kernel."""
    taps = torch.cartesian_prod(*(torch.arange(k, dtype=torch.float64) for k in kernel.shape[-2:]))
    angles = freqs @ taps.T
    return torch.polar(torch.ones_like(angles), angles).to(kernel.device)


def frequency_blocks(kernel: Tensor, freqs: Tensor) -> Iterator[Tensor]:
    """Yield the matrices P of one group in float64, in batches of frequencies that fit into memory."""
    taps = kernel.double().flatten(2).permute(2, 0, 1)
    phases = tap_phases(kernel, freqs)
    phases = phases if phases.imag.any() else phases.real
    for part in phases.split(max(1, CHUNK_ENTRIES // taps[0].numel())):
        yield torch.tensordot(part, taps.to(part.dtype), 1)


def smaller_gram(matrix: Tensor) -> Tensor:
    """Return P Pᴴ or Pᴴ P, whichever is smaller."""
    rows, columns = matrix.shape[-2:]
    return matrix @ matrix.mH if rows <= columns else matrix.mH @ matrix


def as_matrix(matrix: Tensor) -> Tensor:
    """Return a tensor as a float64 matrix, out × the rest."""
    return matrix.detach().double().reshape(len(matrix), -1)


# ---- proofs


def prove_upper_bound(matrices: Tensor, level: float) -> float:
    """Return `level` if a Cholesky factor proves that no matrix has a larger norm, else the largest of the norms."""
    square = smaller_gram(matrices)
    identity = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
    _, failed = torch.linalg.cholesky_ex(level**2 * identity - square)
    if not failed.any():
        return level
    return max(level, math.sqrt(float(torch.linalg.eigvalsh(square[failed > 0]).max())))


def rounding_margin(rows: int, columns: int, taps: int = 1) -> float:
    """Return a factor above 1 that covers the rounding errors of a proven norm.

    Products of length n err by nε ‖P‖_F², which is at most n ‖P‖². The same holds for squarings (the root divides their
    error), sums over taps, Cholesky factors and eigenvalue solvers.
    """
    return 1 + 4 * (min(rows, columns) + taps) * (rows + columns + taps) * torch.finfo(torch.float64).eps


# ---- estimates


def largest_block_norm(kernels: Tensor, freqs: Tensor) -> float:
    """Return the largest norm over all groups and frequencies."""
    if min(kernels.shape[1:3]) > SMALL_BLOCK_ROWS:
        return max(lanczos_norm(kernel, freqs) for kernel in kernels)
    parts = (part for kernel in kernels for part in frequency_blocks(kernel, freqs))
    return max(float(torch.linalg.matrix_norm(part, 2).max()) for part in parts)


def lanczos_norm(kernel: Tensor, freqs: Tensor, tolerance: float = ESTIMATE_TOLERANCE) -> float:
    """Return the largest norm over the frequencies, by Golub–Kahan steps on all of them at once.

    Ritz values rise at a falling rate. A frequency is dropped when its value plus twice its last gain is below the
    largest value.
    """
    out, inputs = kernel.shape[:2]
    single = tolerance >= ESTIMATE_TOLERANCE  # float32 is precise enough
    real, kind = (torch.float32, torch.complex64) if single else (torch.float64, torch.complex128)
    taps = kernel.to(real).flatten(2)
    forward = taps.permute(0, 2, 1).flatten(1)  # out × taps·in
    backward = taps.permute(1, 2, 0).flatten(1)  # in × taps·out
    phases = tap_phases(kernel, freqs).T.to(kind)
    generator = torch.Generator(kernel.device).manual_seed(0)
    v, _ = normalize_columns(torch.randn(inputs, len(freqs), dtype=kind, device=kernel.device, generator=generator))
    u, beta = v.new_zeros(out, len(freqs)), taps.new_zeros(len(freqs))
    alphas, betas = taps.new_zeros(0, len(freqs)), taps.new_zeros(0, len(freqs))
    before, best = beta.double(), 0.0
    interval = 4 if kernel.device.type == "cpu" else 8  # steps between two checks, each of which makes a GPU wait
    for step in range(1, MAX_LANCZOS_STEPS + 1):
        u, alpha = normalize_columns(apply_taps(forward, phases, v) - beta * u)
        v, beta = normalize_columns(apply_taps(backward, phases.conj(), u) - alpha * v)
        alphas, betas = torch.cat((alphas, alpha[None])), torch.cat((betas, beta[None]))
        if step % interval:
            continue
        values = largest_ritz_values(alphas, betas)
        gain, best = values - before, float(values.max())
        kept = values + 2 * gain.clamp(min=0) >= best  # rounding may lower a value that has converged
        if step > interval and float(gain[kept].max()) <= tolerance / 4 * best:
            break
        if step > 2 * interval:  # the first gains are not reliable
            phases, u, v, beta, values = phases[:, kept], u[:, kept], v[:, kept], beta[kept], values[kept]
            alphas, betas = alphas[:, kept], betas[:, kept]
        before = values
    return best


def apply_taps(matrix: Tensor, phases: Tensor, x: Tensor) -> Tensor:
    """Return Σ over taps of the tap's matrix times its phase times x, for all frequencies in one real product."""
    rotated = torch.view_as_real((phases[:, None] * x).flatten(0, 1))
    return torch.view_as_complex((matrix @ rotated.flatten(1)).unflatten(1, (-1, 2)))


def normalize_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns divided by their lengths, and the lengths; a column of zeros stays zero."""
    length = torch.linalg.vector_norm(x, dim=0)
    return x / length.clamp(min=torch.finfo(length.dtype).tiny), length


def largest_ritz_values(alphas: Tensor, betas: Tensor) -> Tensor:
    """Return the largest singular value of each upper bidiagonal matrix with these diagonals."""
    a, b = alphas.double().T, betas.double().T[:, :-1]
    side = torch.diag_embed(a[:, :-1] * b, -1)
    square = torch.diag_embed(a**2) + side + side.mT
    square[:, 1:, 1:] += torch.diag_embed(b**2)
    if square.device.type != "cpu":
        return eigenvalue_by_squaring(square).sqrt()
    return torch.linalg.eigvalsh(square)[:, -1].clamp(min=0).sqrt()


def eigenvalue_by_squaring(square: Tensor) -> Tensor:
    """Return the largest eigenvalue of each of many small positive matrices.

    A matrix is squared until one direction is left, whose Rayleigh quotient is the eigenvalue. On a GPU this is faster
    than a solver.
    """
    power, tiny = square, torch.finfo(square.dtype).tiny
    for _ in range(SQUARINGS):
        power = power / power.abs().amax((1, 2), keepdim=True).clamp(min=tiny)
        power = power @ power
    x = power.gather(2, power.square().sum(1).argmax(1)[:, None, None].expand(-1, power.shape[1], 1))
    return (x * (square @ x)).sum((1, 2)) / x.square().sum((1, 2)).clamp(min=tiny)


def as_pair(value: Pair) -> tuple[int, int]:
    """Return a number as two equal ones, and a pair as a tuple."""
    if isinstance(value, int):
        return value, value
    first, second = value
    return first, second
