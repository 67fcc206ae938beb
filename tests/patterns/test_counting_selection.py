"""Selection by counts against selection by sorting, on one rank and on several."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from score_cases import INF, NAN
from test_selection import DTYPES, floats
from torch import Tensor
from triton_interpreter import DEVICE

from pomona.errors import PomonaError
from pomona.native import library, step
from pomona.patterns import score_reader
from pomona.patterns.counting_selection import Ranks, select_by_counting
from pomona.patterns.score_reader import keys_of
from pomona.patterns.selection import select_largest

quick = settings(deadline=None, max_examples=150)
parts_of_floats = st.lists(st.lists(floats, min_size=1, max_size=12), min_size=1, max_size=4)


@pytest.fixture(params=["kernels", "torch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select with the C kernels, or without them in chunks of three scores."""
    if request.param == "torch":
        for name, answer in (("count_digits", False), ("mark_keys", None), ("mark_ties", False), ("is_float", False)):
            monkeypatch.setattr(step, name, lambda *_, answer=answer: answer)
        monkeypatch.setitem(score_reader.CHUNK, "cpu", 3)
    elif step.load_kernel("count_digits") is None:
        pytest.skip("needs the kernels")
    return request.param


def as_lists(masks: list[Tensor]) -> list[list[bool]]:
    """Return the entries of all masks."""
    return [mask.flatten().tolist() for mask in masks]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_are_those_of_select_largest(dtype: torch.dtype) -> None:
    @quick
    @given(parts_of_floats, st.data())
    def check(parts: list[list[float]], data: st.DataObject) -> None:
        scores = [torch.tensor(part, dtype=torch.float64).to(dtype) for part in parts]
        keep = data.draw(st.integers(0, sum(map(len, parts))))
        floors = [data.draw(st.integers(0, len(part))) for part in parts] if data.draw(st.booleans()) else None
        assert as_lists(select_by_counting(scores, keep, floors)) == as_lists(select_largest(scores, keep, floors))
        magnitudes = [score.abs() for score in scores]
        found = select_by_counting(scores, keep, floors, magnitudes=True)
        assert as_lists(found) == as_lists(select_largest(magnitudes, keep, floors))

    check()


@pytest.mark.usefixtures("engine")
def test_a_number_for_each_tensor() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randint(-4, 5, (n,), generator=generator) / 2 for n in (7, 1, 40, 300)]
    keep = [3, 0, 40, 123]
    expected = [select_largest([score], k)[0] for score, k in zip(scores, keep, strict=True)]
    assert as_lists(select_by_counting(scores, keep)) == as_lists(expected)


@pytest.mark.usefixtures("engine")
def test_scores_are_read_row_by_row_whatever_their_layout() -> None:
    scores = torch.randint(-3, 4, (5, 4, 3, 2), generator=torch.Generator().manual_seed(1)).float()
    turned = scores.to(memory_format=torch.channels_last)
    assert as_lists(select_by_counting([turned], 61)) == as_lists(select_largest([scores], 61))
    view = scores.movedim(1, 0)
    assert as_lists(select_by_counting([view], 17)) == as_lists(select_largest([view.contiguous()], 17))


@pytest.mark.parametrize("instruction_set", library.supported_instruction_sets())
@pytest.mark.parametrize("count", [1, 15, 17, 70_001])
def test_kernels_count_and_mark_as_torch_does(instruction_set: str, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator).mul_(8).round_().div_(8)
    values[::5] = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-45])[torch.arange(len(values[::5])) % 7]
    for magnitudes in (False, True):
        keys = keys_of(values.abs() if magnitudes else values)
        counts = torch.zeros(2048, dtype=torch.int64)
        if not step.count_digits(values, magnitudes, 21, -1024, counts, instruction_set):
            pytest.skip("needs the kernels")
        assert torch.equal(counts, torch.bincount((keys >> 21) + 1024, minlength=2048))
        threshold = int(keys[count // 2])
        mask = torch.empty(count, dtype=torch.bool)
        ties = int((keys == threshold).sum())
        assert step.mark_keys(values, magnitudes, threshold, mask, instruction_set) == ties
        assert torch.equal(mask, keys > threshold)
        assert step.mark_ties(values, magnitudes, threshold, ties - 1, mask, instruction_set)
        last = int((keys == threshold).nonzero()[-1])
        assert not mask[last]
        mask[last] = True
        assert torch.equal(mask, keys >= threshold)


class ThreadedRanks:
    """Ranks that are threads, and add their counts at a barrier."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.places: list[Tensor] = [torch.empty(0)] * count

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        """Return the values of all ranks."""
        self.places[rank] = value
        self.barrier.wait(10)
        values = list(self.places)
        self.barrier.wait(10)
        return values

    def of(self, rank: int) -> Ranks:
        """Return how this rank adds counts."""
        return Ranks(
            sum_all=lambda count: sum(self.exchange(rank, count), torch.zeros_like(count)),
            sum_lower=lambda count: sum(self.exchange(rank, count)[:rank], torch.zeros_like(count)),
        )


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 4), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=3), st.data())
def test_ranks_with_parts_of_the_tensors_choose_the_same_entries(
    world: int, shapes: list[tuple[int, int]], data: st.DataObject
) -> None:
    tensors = [
        torch.tensor(data.draw(st.lists(floats, min_size=r * c, max_size=r * c))).view(r, c).float() for r, c in shapes
    ]
    total = sum(t.numel() for t in tensors)
    keep = data.draw(st.integers(0, total))
    floors = [data.draw(st.integers(0, t.numel())) for t in tensors] if data.draw(st.booleans()) else None
    expected = select_largest(tensors, keep, floors)
    parts = [torch.tensor_split(t, world) for t in tensors]
    ranks, masks = ThreadedRanks(world), [[] for _ in range(world)]

    def run(rank: int) -> None:
        masks[rank] = select_by_counting([part[rank] for part in parts], keep, floors, ranks=ranks.of(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    joined = [torch.cat([masks[rank][i] for rank in range(world)]) for i in range(len(tensors))]
    assert as_lists(joined) == as_lists(expected)


def test_masks_are_written_in_place_without_a_copy_of_the_scores() -> None:
    scores = [torch.randn(1 << 20, generator=torch.Generator().manual_seed(2)) for _ in range(4)]
    out = [torch.empty(score.shape, dtype=torch.bool) for score in scores]
    with torch.profiler.profile(profile_memory=True) as profile:
        masks = select_by_counting(scores, 400_000, magnitudes=True, out=out)
    assert all(mask is given_mask for mask, given_mask in zip(masks, out, strict=True))
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert allocated < 4 << 20  # the scores have 16 MB
    assert sum(int(mask.sum()) for mask in masks) == 400_000


def test_scores_of_two_dtypes_are_refused() -> None:
    with pytest.raises(PomonaError, match="several dtypes"):
        select_by_counting([torch.ones(2), torch.ones(2).double()], 1)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_on_a_gpu_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = [torch.randint(-50, 50, (n,), generator=generator).to(dtype) / 8 for n in (1000, 70_000, 3)]
    scores[0][::7] = NAN
    for floors in (None, [500, 10, 2]):
        expected = select_by_counting(scores, 20_000, floors)
        found = select_by_counting([score.cuda() for score in scores], 20_000, floors)
        assert as_lists(found) == as_lists(expected)
