"""ChaCha20 against the test vectors of RFC 8439 and against another library, by every implementation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_interpreter, run_in_interpreter

from pomona.native import private as native
from pomona.native.library import supported_instruction_sets
from pomona.privacy import chacha
from pomona.privacy.chacha import chacha20_words

# Section 2.3.2 of RFC 8439, and the vectors 1 to 5 of appendix A.1: key, block counter, nonce, key stream.
VECTORS = [
    (
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        "00" * 32,
        0,
        "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32,
        1,
        "00" * 12,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01",
        1,
        "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30,
        2,
        "00" * 12,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        "00" * 32,
        0,
        "00" * 11 + "02",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]


@pytest.fixture(params=["torch", *supported_instruction_sets()])
def implementation(request, monkeypatch):
    """Use PyTorch, or the C kernel for one instruction set, in place of the default."""
    fill = native.fill_chacha20
    if request.param == "torch":
        monkeypatch.setattr(chacha.native, "fill_chacha20", lambda state, out: False)
    else:
        if native.load_kernel("chacha20") is None:
            pytest.skip("needs a C compiler")
        monkeypatch.setattr(chacha.native, "fill_chacha20", lambda state, out: fill(state, out, request.param))


@pytest.mark.parametrize(("key", "counter", "nonce", "stream"), VECTORS)
def test_key_stream_is_that_of_rfc_8439(implementation, key, counter, nonce, stream):
    words = chacha20_words(bytes.fromhex(key), bytes.fromhex(nonce), 8, first=counter)
    assert words.numpy().tobytes().hex() == stream


@pytest.mark.parametrize("count", [1, 7, 8, 65, 64 * 1024 + 3])
def test_long_key_stream_is_that_of_another_library(implementation, count):
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    key, nonce = bytes(range(32)), bytes(range(100, 112))
    words = chacha20_words(key, nonce, count, first=5)
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, (5).to_bytes(4, "little") + nonce), mode=None)
    assert words.numpy().tobytes() == cipher.encryptor().update(bytes(8 * count))


@settings(max_examples=20, deadline=None)
@given(count=st.integers(0, 200), skipped=st.integers(0, 10))
def test_stream_is_addressed_by_its_position(count, skipped):
    key, nonce = bytes(range(32)), bytes(12)
    whole = chacha20_words(key, nonce, 8 * skipped + count)
    assert torch.equal(chacha20_words(key, nonce, count, first=skipped), whole[8 * skipped :])


@pytest.mark.skipif(not HAS_TRITON or not (DEVICE == "cuda" or INTERPRETED), reason="needs Triton and a GPU")
@pytest.mark.parametrize("blocks", [1, 127, 300])
def test_triton_kernel_computes_the_stream(blocks):
    from pomona.privacy.chacha_triton import BLOCKS, chacha20_kernel

    key, nonce = bytes(range(32)), bytes(range(12))
    contents = bytearray(chacha.CONSTANTS + key + (7).to_bytes(4, "little") + nonce)
    state = torch.frombuffer(contents, dtype=torch.int32).to(DEVICE)
    out = torch.zeros(blocks + 1, 16, dtype=torch.int32, device=DEVICE)
    chacha20_kernel[(-(-blocks // BLOCKS),)](state, out, blocks, BLOCKS=BLOCKS)
    expected = chacha20_words(key, nonce, 8 * blocks, first=7)
    assert torch.equal(out[:blocks].cpu().view(torch.int64).flatten(), expected)
    assert not out[blocks].any()  # nothing is written behind the end


@needs_interpreter
def test_triton_kernel_in_the_interpreter():
    run_in_interpreter(__file__, "test_triton_kernel_computes_the_stream")
