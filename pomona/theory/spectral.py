"""Operator norms of linear layers and convolutions: the singular values of Lemma 7 of Qian & Klabjan, ICML 2021.

A convolution with wrap-around padding is block-diagonal in the Fourier basis. Its norm is the largest norm of the
blocks P(u, v) = Σ_ij F_ij ω^(ui + vj), one out × in matrix a frequency, and P(−u, −v) is the conjugate of P(u, v).
A stride s is none for the input's s² phases taken as channels; a zero-padded convolution is part of the circular
one on a larger image.

    norm, conv_norm      the number itself, for measuring
    bound, conv_bound    never below it, for certificates: float64, and a margin that rounding cannot use up

The frequencies are bounded together by Lanczos steps, and given up as soon as they fall behind. What is left is the
norm to seven digits, and a Cholesky factor of λ − P Pᴴ for every frequency proves that none is larger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import require

SMALL = 16  # blocks of so few rows are solved all together
WIDE = 512  # a single matrix of more rows is not solved, but proven
CHUNK = 2**24  # entries of the blocks that are held at a time
STEPS = 400  # Lanczos steps at most
SLACK = 1e-6  # relative error of an estimate over many frequencies, and what a proof allows above it
FINE = 1e-10  # the same for a single matrix
SQUARINGS = 24  # of a small matrix for its largest eigenvalue, which then errs by less than 2^−25
Pair = int | Sequence[int]


def norm(matrix: Tensor) -> float:
    """‖W‖₂ of a matrix; a tensor of more axes is taken as out × the rest."""
    w = flat(matrix)
    if min(w.shape) <= WIDE:
        return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram(w))[-1])))
    return lanczos(w[:, :, None, None], torch.zeros(1, 2, dtype=torch.float64), FINE)


def bound(matrix: Tensor) -> float:
    """An upper bound of ‖W‖₂ that rounding cannot break, tight to some ten digits."""
    w = flat(matrix)
    level = norm(w)
    if min(w.shape) > WIDE:
        level = prove(w[None], level * (1 + FINE))
    return level * margin(w.shape[0], w.shape[1])


def conv_norm(weight: Tensor, size: Pair, *, stride: Pair = 1, dilation: Pair = 1, groups: int = 1) -> float:
    """‖W‖₂ of a convolution with wrap-around padding on images of this size, to six digits and more.

    An estimate, no proof: a frequency may be given up too early, but for random starts it hardly ever is.
    """
    kernels, grid = circulant(weight, size, stride, dilation, groups)
    return largest(kernels, frequencies(kernels, grid))


def conv_bound(
    weight: Tensor, size: Pair, *, stride: Pair = 1, dilation: Pair = 1, groups: int = 1, padding: str = "zeros"
) -> float:
    """An upper bound of a convolution's norm on images of this size, whatever the amount of padding.

    Zeros: a part of the circular convolution on size + kernel − 1. Circular: the norm itself, as long as no pixel is
    padded in twice.
    """
    require(padding in ("zeros", "circular"), f"padding is zeros or circular, got '{padding}'.")
    reach = [d * (k - 1) for d, k in zip(pair(dilation), weight.shape[-2:], strict=True)]
    if padding == "zeros":
        # Rounded up to whole strides: a larger circle holds the same convolution.
        size = [-(-(n + r) // s) * s for n, r, s in zip(pair(size), reach, pair(stride), strict=True)]
    elif any(n % s for n, s in zip(pair(size), pair(stride), strict=True)):
        stride = 1  # whose outputs include those asked for
    kernels, grid = circulant(weight, size, stride, dilation, groups)
    freqs = frequencies(kernels, grid)
    level = largest(kernels, freqs) * (1 + SLACK)
    for group in kernels:
        for part in blocks(group, freqs):
            level = prove(part, level)
    return level * margin(kernels.shape[1], kernels.shape[2], kernels[0, 0, 0].numel())


# ---- the blocks


def circulant(weight: Tensor, size: Pair, stride: Pair, dilation: Pair, groups: int) -> tuple[Tensor, tuple[int, int]]:
    """The same operator without stride, dilation and groups: (group, out, in, kh, kw) kernels, and their image size."""
    require(weight.ndim == 4, f"a convolution's weight has four axes (out, in, height, width), got {weight.ndim}.")
    (height, width), (down, right), (far, wide) = pair(size), pair(stride), pair(dilation)
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
    """One of each conjugate pair of angles (θ, φ); a single one along an axis on which the kernel has one tap."""
    rows, columns = (n if k > 1 else 1 for n, k in zip(grid, kernels.shape[3:], strict=True))
    pairs = itertools.product(range(rows), range(columns))
    half = [(u, v) for u, v in pairs if (u, v) <= (-u % rows, -v % columns)]
    return torch.tensor(half, dtype=torch.float64) * 2 * math.pi / torch.tensor([rows, columns], dtype=torch.float64)


def phases(kernel: Tensor, freqs: Tensor) -> Tensor:
    """e^(i (θ a + φ b)) for each frequency and each tap (a, b) of the kernel."""
    taps = torch.cartesian_prod(*(torch.arange(k, dtype=torch.float64) for k in kernel.shape[-2:]))
    angles = freqs @ taps.T
    return torch.polar(torch.ones_like(angles), angles).to(kernel.device)


def blocks(kernel: Tensor, freqs: Tensor) -> Iterator[Tensor]:
    """The matrices P of one group in float64, some frequencies at a time."""
    taps = kernel.double().flatten(2).permute(2, 0, 1)
    turns = phases(kernel, freqs)
    turns = turns if turns.imag.any() else turns.real
    for part in turns.split(max(1, CHUNK // taps[0].numel())):
        yield torch.tensordot(part, taps.to(part.dtype), 1)


def gram(matrix: Tensor) -> Tensor:
    """P Pᴴ or Pᴴ P, whichever is smaller."""
    rows, columns = matrix.shape[-2:]
    return matrix @ matrix.mH if rows <= columns else matrix.mH @ matrix


def flat(matrix: Tensor) -> Tensor:
    return matrix.detach().double().reshape(len(matrix), -1)


# ---- proofs


def prove(some: Tensor, level: float) -> float:
    """`level`, if it exceeds the norms of all these matrices, else the largest of them."""
    square = gram(some)
    identity = torch.eye(square.shape[-1], dtype=square.dtype, device=square.device)
    _, failed = torch.linalg.cholesky_ex(level**2 * identity - square)
    if not failed.any():
        return level
    return max(level, math.sqrt(float(torch.linalg.eigvalsh(square[failed > 0]).max())))


def margin(rows: int, columns: int, taps: int = 1) -> float:
    """More than rounding can take away.

    Products of length n err by nε ‖P‖_F², which is at most n ‖P‖²; so do squarings (and the root divides what they
    err by), sums over taps, Cholesky factors and eigenvalue solvers.
    """
    return 1 + 4 * (min(rows, columns) + taps) * (rows + columns + taps) * torch.finfo(torch.float64).eps


# ---- estimates


def largest(kernels: Tensor, freqs: Tensor) -> float:
    """The largest norm over all groups and frequencies."""
    if min(kernels.shape[1:3]) > SMALL:
        return max(lanczos(kernel, freqs) for kernel in kernels)
    parts = (part for kernel in kernels for part in blocks(kernel, freqs))
    return max(float(torch.linalg.matrix_norm(part, 2).max()) for part in parts)


def lanczos(kernel: Tensor, freqs: Tensor, tolerance: float = SLACK) -> float:
    """The largest norm over the frequencies, by Golub–Kahan steps on all of them at once.

    Ritz values rise at a falling rate: one that stays behind with twice its last gain added is given up.
    """
    out, inputs = kernel.shape[:2]
    real, kind = (torch.float32, torch.complex64) if tolerance >= SLACK else (torch.float64, torch.complex128)
    taps = kernel.to(real).flatten(2)
    forward = taps.permute(0, 2, 1).flatten(1)  # out × taps·in
    backward = taps.permute(1, 2, 0).flatten(1)  # in × taps·out
    turns = phases(kernel, freqs).T.to(kind)
    generator = torch.Generator(kernel.device).manual_seed(0)
    v, _ = unit(torch.randn(inputs, len(freqs), dtype=kind, device=kernel.device, generator=generator))
    u, beta = v.new_zeros(out, len(freqs)), taps.new_zeros(len(freqs))
    alphas, betas = taps.new_zeros(0, len(freqs)), taps.new_zeros(0, len(freqs))
    before, best = beta.double(), 0.0
    look = 4 if kernel.device.type == "cpu" else 8  # steps from one look to the next, at which a GPU must wait
    for step in range(1, STEPS + 1):
        u, alpha = unit(apply(forward, turns, v) - beta * u)
        v, beta = unit(apply(backward, turns.conj(), u) - alpha * v)
        alphas, betas = torch.cat((alphas, alpha[None])), torch.cat((betas, beta[None]))
        if step % look:
            continue
        values = ritz(alphas, betas)
        gain, best = values - before, float(values.max())
        keep = values + 2 * gain >= best
        if step > look and float(gain[keep].max()) <= tolerance / 4 * best:
            break
        if step > 2 * look:  # the first gains say little
            turns, u, v, beta, values = turns[:, keep], u[:, keep], v[:, keep], beta[keep], values[keep]
            alphas, betas = alphas[:, keep], betas[:, keep]
        before = values
    return best


def apply(matrix: Tensor, turns: Tensor, x: Tensor) -> Tensor:
    """Σ over taps of its matrix times its turn of x, for all frequencies in one real product."""
    turned = torch.view_as_real((turns[:, None] * x).flatten(0, 1))
    return torch.view_as_complex((matrix @ turned.flatten(1)).unflatten(1, (-1, 2)))


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Columns divided by their lengths, and these; a column of zeros stays one."""
    length = torch.linalg.vector_norm(x, dim=0)
    return x / length.clamp(min=torch.finfo(length.dtype).tiny), length


def ritz(alphas: Tensor, betas: Tensor) -> Tensor:
    """The largest singular value of each upper bidiagonal matrix."""
    a, b = alphas.double().T, betas.double().T[:, :-1]
    side = torch.diag_embed(a[:, :-1] * b, -1)
    square = torch.diag_embed(a**2) + side + side.mT
    square[:, 1:, 1:] += torch.diag_embed(b**2)
    if square.device.type != "cpu":
        return leading(square).sqrt()
    return torch.linalg.eigvalsh(square)[:, -1].clamp(min=0).sqrt()


def leading(square: Tensor) -> Tensor:
    """The largest eigenvalue of each of many small matrices: squared until one direction is left, by its quotient.

    On a GPU quicker than any solver.
    """
    power, tiny = square, torch.finfo(square.dtype).tiny
    for _ in range(SQUARINGS):
        power = power / power.abs().amax((1, 2), keepdim=True).clamp(min=tiny)
        power = power @ power
    x = power.gather(2, power.square().sum(1).argmax(1)[:, None, None].expand(-1, power.shape[1], 1))
    return (x * (square @ x)).sum((1, 2)) / x.square().sum((1, 2)).clamp(min=tiny)


def pair(value: Pair) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, second = value
    return first, second
