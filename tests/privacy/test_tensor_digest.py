"""Digests of tensors: sums by hand, the kernels against PyTorch and Python's integers, and changes of single bits."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pomona.native import private as native
from pomona.native.library import supported_instruction_sets
from pomona.privacy import tensor_digest
from pomona.privacy.tensor_digest import BLOCK_WORDS, digest_tensors, make_multipliers, split_blocks, sum_blocks

KEY = bytes(range(32))


@pytest.fixture(params=["torch", *supported_instruction_sets()])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sum blocks with PyTorch, or with the C kernel of an instruction set."""
    kernel = native.sum_blocks
    if request.param == "torch":
        monkeypatch.setattr(native, "sum_blocks", lambda *_: False)
        monkeypatch.setattr(tensor_digest, "CHUNK_BLOCKS", 2)
    else:
        if native.load_kernel("sum_blocks") is None:
            pytest.skip("needs the kernels")
        monkeypatch.setattr(native, "sum_blocks", lambda *tensors: kernel(*tensors, request.param))
    return request.param


def test_sums_by_hand(engine):
    words = torch.zeros(2, BLOCK_WORDS, dtype=torch.int32)
    words[0, 0], words[0, 1], words[1, BLOCK_WORDS - 1] = 3, -1, 7  # -1 has the bits of 2³² − 1
    multipliers = torch.zeros(4, BLOCK_WORDS, dtype=torch.int32)
    multipliers[0, 0], multipliers[1, 1], multipliers[2, -1], multipliers[3, 0] = 5, -1, 2, -2
    largest = ((2**32 - 1) ** 2 + 2**63) % 2**64 - 2**63  # as int64
    assert sum_blocks(words, multipliers).tolist() == [[15, largest, 0, 3 * (2**32 - 2)], [0, 0, 14, 0]]


@pytest.mark.parametrize("blocks", [1, 5])
def test_sums_are_those_of_python_integers(engine, blocks):
    generator = torch.Generator().manual_seed(blocks)
    words = torch.randint(-(2**31), 2**31, (blocks, BLOCK_WORDS), generator=generator).int()
    multipliers = make_multipliers(KEY, torch.device("cpu"))
    for row, found in zip(words.tolist(), sum_blocks(words, multipliers).tolist(), strict=True):
        for factors, value in zip(multipliers.tolist(), found, strict=True):
            expected = sum((w % 2**32) * (r % 2**32) for w, r in zip(row, factors, strict=True))
            assert value % 2**64 == expected % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 5000), data=st.data())
def test_any_bit_changes_the_digest(dtype, size, data):
    values = torch.randint(0, 200, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
    other = values.clone()
    place = data.draw(st.integers(0, other.nbytes - 1), "byte")
    other.view(torch.uint8)[place] ^= 1 << data.draw(st.integers(0, 7), "bit")
    assert digest_tensors([values], KEY) == digest_tensors([values.clone()], KEY)
    assert digest_tensors([values], KEY) != digest_tensors([other], KEY)


def test_shapes_dtypes_order_and_key_change_the_digest():
    zeros = torch.zeros(6)
    others = [
        [zeros.view(2, 3)],
        [zeros.int()],
        [torch.zeros(7)],
        [zeros[:3], zeros[3:]],
        [zeros, torch.zeros(0)],
        [],
    ]
    digests = [digest_tensors(tensors, KEY) for tensors in ([zeros], *others)]
    digests += [digest_tensors([zeros], os.urandom(32)), digest_tensors([torch.arange(6.0)], KEY)]
    digests += [digest_tensors([torch.arange(6.0).flip(0)], KEY)]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == tensor_digest.DIGEST_LENGTH for digest in digests)


def test_places_in_a_buffer_do_not_matter():
    values = torch.randn(5000).bfloat16()
    assert digest_tensors([values[1:]], KEY) == digest_tensors([values[1:].clone()], KEY)


def test_strides_do_not_matter():
    values = torch.randn(40, 70)
    assert digest_tensors([values], KEY) == digest_tensors([values.T.contiguous().T], KEY)
    assert [part.shape for part in split_blocks(values.T)] == [(2, BLOCK_WORDS), (1, BLOCK_WORDS)]
    assert [part.shape for part in split_blocks(values[:32, :64])] == [(2, BLOCK_WORDS)]
    assert list(split_blocks(values[:0])) == []


@pytest.mark.gpu
def test_digests_on_a_gpu_are_those_of_the_cpu():
    tensors = [torch.randn(100_000), torch.randint(-(2**62), 2**62, (5001,)), torch.randn(77).bfloat16()]
    assert digest_tensors([tensor.cuda() for tensor in tensors], KEY) == digest_tensors(tensors, KEY)
