"""ChaCha20 on a GPU: one launch of a Triton kernel, in which every lane computes one block of 16 words."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 128  # of 16 words that one program computes


def fill_chacha20(state: Tensor, out: Tensor) -> None:
    """Write the ChaCha20 blocks from a state of 16 words on into `out`, of shape (blocks, 16)."""
    if len(out):
        with torch.cuda.device_of(out):
            chacha20_kernel[(triton.cdiv(len(out), BLOCKS),)](state, out, len(out), BLOCKS=BLOCKS)


@triton.jit
def rotate(words, COUNT: tl.constexpr):
    """Return the words rotated left by COUNT bits."""
    return (words << COUNT) | (words >> (32 - COUNT))


@triton.jit
def quarter_round(a, b, c, d):
    """Return four words after a quarter round."""
    a += b
    d = rotate(d ^ a, 16)
    c += d
    b = rotate(b ^ c, 12)
    a += b
    d = rotate(d ^ a, 8)
    c += d
    b = rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def chacha20_kernel(state, out, blocks, BLOCKS: tl.constexpr):
    """Compute the blocks of one program from the state and its counter, and write them to `out`."""
    index = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = index < blocks
    zero = (index * 0).to(tl.uint32)
    s0 = zero + tl.load(state + 0).to(tl.uint32, bitcast=True)
    s1 = zero + tl.load(state + 1).to(tl.uint32, bitcast=True)
    s2 = zero + tl.load(state + 2).to(tl.uint32, bitcast=True)
    s3 = zero + tl.load(state + 3).to(tl.uint32, bitcast=True)
    s4 = zero + tl.load(state + 4).to(tl.uint32, bitcast=True)
    s5 = zero + tl.load(state + 5).to(tl.uint32, bitcast=True)
    s6 = zero + tl.load(state + 6).to(tl.uint32, bitcast=True)
    s7 = zero + tl.load(state + 7).to(tl.uint32, bitcast=True)
    s8 = zero + tl.load(state + 8).to(tl.uint32, bitcast=True)
    s9 = zero + tl.load(state + 9).to(tl.uint32, bitcast=True)
    s10 = zero + tl.load(state + 10).to(tl.uint32, bitcast=True)
    s11 = zero + tl.load(state + 11).to(tl.uint32, bitcast=True)
    s12 = index.to(tl.uint32) + tl.load(state + 12).to(tl.uint32, bitcast=True)
    s13 = zero + tl.load(state + 13).to(tl.uint32, bitcast=True)
    s14 = zero + tl.load(state + 14).to(tl.uint32, bitcast=True)
    s15 = zero + tl.load(state + 15).to(tl.uint32, bitcast=True)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in range(10):
        x0, x4, x8, x12 = quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = quarter_round(x3, x4, x9, x14)
    place = out + index * 16
    tl.store(place + 0, (x0 + s0).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 1, (x1 + s1).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 2, (x2 + s2).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 3, (x3 + s3).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 4, (x4 + s4).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 5, (x5 + s5).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 6, (x6 + s6).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 7, (x7 + s7).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 8, (x8 + s8).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 9, (x9 + s9).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 10, (x10 + s10).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 11, (x11 + s11).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 12, (x12 + s12).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 13, (x13 + s13).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 14, (x14 + s14).to(tl.int32, bitcast=True), mask=inside)
    tl.store(place + 15, (x15 + s15).to(tl.int32, bitcast=True), mask=inside)
