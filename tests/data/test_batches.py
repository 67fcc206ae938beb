"""Batches: each row once per epoch, the same order after a resume, the same global batch over ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pomona.data import Batches, Split, cut_windows
from pomona.data.keyed_random import permutation, stratified_split
from pomona.errors import PomonaError

SIZES = st.integers(1, 40), st.integers(1, 12)


def numbered_rows(rows: int) -> Split:
    return Split(torch.arange(rows, dtype=torch.float32)[:, None], torch.arange(rows))


def random_images(rows: int, channels: int = 3, size: int = 6) -> Split:
    x = np.random.default_rng(0).integers(0, 256, (rows, channels, size, size), dtype=np.uint8)
    return Split(torch.from_numpy(x), torch.arange(rows))


def equal_batches(a: list, b: list) -> bool:
    return len(a) == len(b) and all(
        torch.equal(u, v) for p, q in zip(a, b, strict=True) for u, v in zip(p, q, strict=True)
    )


@settings(deadline=None)
@given(*SIZES, st.integers(0, 2**40), st.integers(0, 500))
def test_every_row_appears_once_with_its_target(rows: int, size: int, seed: int, epoch: int):
    batches = Batches(numbered_rows(rows), size, seed=seed)
    got = list(batches.epoch(epoch))
    assert len(got) == len(batches)
    assert all(len(y) == size for _, y in got[:-1])
    y = torch.cat([y for _, y in got])
    assert sorted(y.tolist()) == list(range(rows))
    assert torch.equal(torch.cat([x for x, _ in got])[:, 0], y.float())


@pytest.mark.parametrize("augment", [None, "standard(pad=2)", "resized_crop(pad=1)"])
@settings(deadline=None, max_examples=20)
@given(data=st.data(), rows=SIZES[0], size=SIZES[1], epoch=st.integers(0, 9))
def test_a_resumed_epoch_is_the_tail_of_the_whole(augment: str | None, data, rows: int, size: int, epoch: int):
    split = random_images(rows)
    whole = list(Batches(split, size, seed=3, augment=augment).epoch(epoch))
    start = data.draw(st.integers(0, len(whole)))
    fresh = Batches(split, size, seed=3, augment=augment)
    list(fresh.epoch(epoch + 1))  # what was drawn before must not matter
    assert equal_batches(list(fresh.epoch(epoch, start=start)), whole[start:])


def test_seeds_and_epochs_give_different_batches():
    split = random_images(64)

    def first(seed: int, epoch: int) -> tuple[list[int], torch.Tensor]:
        x, y = next(Batches(split, 64, seed=seed, augment="standard(pad=2)").epoch(epoch))
        return y.tolist(), x

    drawn = [first(s, e) for s, e in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len({tuple(y) for y, _ in drawn}) == 4
    # The crops change too, not only the order: undo the order and compare.
    unshuffled = [x[np.argsort(y)] for y, x in drawn]
    assert all(not torch.equal(unshuffled[0], other) for other in unshuffled[1:])


def test_the_order_is_the_same_on_every_machine():
    assert permutation(8, 1, 2, 0).tolist() == [5, 6, 3, 2, 1, 0, 4, 7]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30), st.booleans())
def test_ranks_partition_the_global_batch(world: int, share: int, rows: int, shuffle: bool):
    split, size = random_images(rows), world * share
    options = {"seed": 5, "augment": "standard(pad=1)", "shuffle": shuffle}
    alone = Batches(split, size, **options)
    ranks = [Batches(split, size, rank=r, world=world, **options) for r in range(world)]
    together = [concatenate_ranks(parts) for parts in zip(*(r.evaluate() for r in ranks), strict=True)]
    assert equal_batches(together, list(alone.evaluate()))
    if rows % size % world:
        with pytest.raises(PomonaError, match=r"last batch .* does not divide among .* set drop_last=True"):
            ranks[0].epoch(0)
        return
    together = [concatenate_ranks(parts) for parts in zip(*(r.epoch(2) for r in ranks), strict=True)]
    assert equal_batches(together, list(alone.epoch(2)))


def concatenate_ranks(parts: tuple) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(p) for p in zip(*parts, strict=True))


def test_evaluate_yields_every_row_in_order_without_augmentation():
    split = random_images(10)
    batches = Batches(split, 4, seed=1, augment="standard", mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.1), drop_last=True)
    x, y = concatenate_ranks(tuple(batches.evaluate()))
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.1])
    want = (split.x.double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    assert y.tolist() == list(range(10))
    torch.testing.assert_close(x.double(), want, rtol=1e-5, atol=1e-5)
    assert len(batches) == 2
    assert len(list(batches.epoch(0))) == 2


def test_padding_is_black_before_normalization():
    split = Split(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    batches = Batches(split, 1, augment="standard(pad=2)", mean=[0.5], std=[0.25])
    seen = {round(v, 5) for e in range(30) for v in next(batches.epoch(e))[0].flatten().tolist()}
    assert seen == {-2.0, 2.0}


def test_dtype_and_memory_format():
    split = random_images(4)
    x, _ = next(Batches(split, 4, dtype=torch.bfloat16, channels_last=True).epoch(0))
    assert x.dtype == torch.bfloat16
    assert x.is_contiguous(memory_format=torch.channels_last)
    plain, _ = next(Batches(split, 4, channels_last=True).epoch(0))
    assert plain.dtype == torch.float32
    assert plain.is_contiguous(memory_format=torch.channels_last)
    tokens = Split(torch.arange(6).view(3, 2), torch.zeros(3, dtype=torch.long))
    x, _ = next(Batches(tokens, 3, dtype=torch.bfloat16, shuffle=False).epoch(0))
    assert torch.equal(x, tokens.x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"batch_size": 9, "drop_last": True}, "batch_size 9 is more than the 8 rows"),
        ({"batch_size": 4, "rank": 2, "world": 2}, "rank must lie in 0 … 1, got 2"),
        ({"batch_size": 3, "world": 2}, "batch_size 3 does not divide among 2 ranks"),
        ({"batch_size": 4, "mean": (0.5, 0.5)}, "one number for each of the image's channels"),
        ({"batch_size": 4, "std": (0.0,)}, "std must be above 0"),
        ({"batch_size": 4, "augment": "crop"}, "unknown augmentation 'crop'"),
    ],
)
def test_invalid_options_are_refused(options: dict, message: str):
    with pytest.raises(PomonaError, match=message):
        Batches(random_images(8), **options)


def test_only_images_can_be_augmented():
    with pytest.raises(PomonaError, match="for images"):
        Batches(numbered_rows(8), 4, augment="standard")
    with pytest.raises(PomonaError, match="seed must be 0 or more, got -1"):
        next(Batches(numbered_rows(8), 4, seed=-1).epoch(0))
    with pytest.raises(PomonaError, match="start must lie in 0 … 2 batches, got 3"):
        Batches(numbered_rows(8), 4).epoch(0, start=3)


def test_windows_are_shifted_by_one_and_continue_with_carry():
    stream = Split(torch.arange(23), torch.arange(1, 24))
    cut = cut_windows(stream, 3)
    assert cut.x.tolist() == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(7)]
    assert torch.equal(cut.y, cut.x + 1)
    carried = list(Batches(cut_windows(stream, 3, carry=2), 2, shuffle=False).epoch(0))
    assert [x.tolist() for x, _ in carried] == [
        [[0, 1, 2], [9, 10, 11]],
        [[3, 4, 5], [12, 13, 14]],
        [[6, 7, 8], [15, 16, 17]],
    ]
    with pytest.raises(PomonaError, match="23 tokens give 1 windows of 12, 2 are needed"):
        cut_windows(stream, 12, carry=2)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.integers(0, 9), st.data())
def test_stratified_keeps_the_proportions(labels: list[int], seed: int, data):
    count = data.draw(st.integers(0, len(labels)))
    y = np.array(labels)
    train, test = stratified_split(y, count, seed)
    assert len(test) == count
    assert sorted([*train, *test]) == list(range(len(labels)))
    for label in set(labels):
        share = (y == label).sum() * count / len(y)
        assert abs((y[test] == label).sum() - share) <= 0.5 + len(set(labels)) / 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("augment", [None, "standard", "resized_crop"])
def test_batches_do_not_depend_on_the_device(augment: str | None):
    split = random_images(20, size=32)
    here = Batches(split, 8, seed=2, augment=augment)
    there = Batches(split.to("cuda"), 8, seed=2, augment=augment)
    for (x, y), (u, v) in zip(here.epoch(1), there.epoch(1), strict=True):
        assert u.is_cuda
        assert torch.equal(y, v.cpu())
        torch.testing.assert_close(x, u.cpu(), rtol=0, atol=1e-4)
