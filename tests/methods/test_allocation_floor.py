"""Global allocation with a floor: the least share that each layer keeps."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import attach_to_network, obeys_masks, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pomona as pm
from pomona.allocation import floor_counts, largest_sparsity, least_count, parse_allocation, select
from pomona.patterns import Pattern

PATTERNS: list[Pattern] = [
    pm.Unstructured(),
    pm.Block((2, 4)),
    pm.Kernel(),
    pm.Filter(),
    pm.Filter(of="filters"),
    pm.Balanced(block=4),
    pm.NM(2, 4),
]
SHAPES = st.lists(st.sampled_from([(2, 4), (4, 8), (6, 4, 3, 3), (8, 2, 2, 2), (32, 16)]), min_size=1, max_size=5)


def as_ints(masks: dict[str, Tensor]) -> dict[str, list[int]]:
    """Return masks as lists of 0 and 1."""
    return {name: mask.flatten().int().tolist() for name, mask in masks.items()}


def test_floors_by_hand() -> None:
    # Half of eight are kept: all of b without a floor. A floor of a quarter keeps the best of a, not the least of b.
    scores = {"a": torch.tensor([1.0, 2, 3, 4]), "b": torch.tensor([8.0, 7, 6, 5])}
    assert as_ints(select(scores, 0.5, pm.Unstructured(), "global(floor=0)")) == {"a": [0, 0, 0, 0], "b": [1, 1, 1, 1]}
    assert as_ints(select(scores, 0.5, pm.Unstructured(), "global(floor=0.25)")) == {
        "a": [0, 0, 0, 1],
        "b": [1, 1, 1, 0],
    }
    assert as_ints(select(scores, 0.5, pm.Unstructured(), "global(floor=0.5)")) == {
        "a": [0, 0, 1, 1],
        "b": [1, 1, 0, 0],
    }
    # Where a layer keeps as much without a floor, the floor changes nothing.
    assert as_ints(select(scores, 0.25, pm.Unstructured(), "global(floor=0.5)")) == {
        "a": [0, 0, 1, 1],
        "b": [1, 1, 1, 1],
    }


def test_floors_are_rounded_up_where_that_fits() -> None:
    shapes = [torch.Size([10]), torch.Size([30])]
    assert floor_counts(shapes, 0.8, pm.Unstructured(), 0.11) == [2, 4]
    assert floor_counts(shapes, 0.87, pm.Unstructured(), 0.11) == [1, 3]  # 5 of 40 are kept, and 2 + 4 are more
    assert floor_counts(shapes, 0.8, pm.Unstructured(), 0.1) == [1, 3]
    assert floor_counts([torch.Size([8, 4]), torch.Size([2, 4])], 0.5, pm.Filter(), 0.2) == [8, 4]  # whole filters
    # 29 and not 30, though 0.29 · 100 is below 29 in floating point
    assert floor_counts([torch.Size([100])], 0.5, pm.Unstructured(), 0.29) == [29]


def test_filters_are_counted_where_the_sparsity_is_a_share_of_them() -> None:
    # Two of ten filters are kept: one of each layer would be four, though they hold few weights.
    shapes = [torch.Size([1, 1])] * 3 + [torch.Size([7, 1000])]
    with pytest.raises(pm.PomonaError, match=r"of 0\.8 keeps 2 units.* each of the 4 layers is 4: .* at most 0\.6"):
        floor_counts(shapes, 0.8, pm.Filter(of="filters"), 0.1)
    assert floor_counts(shapes, 0.6, pm.Filter(of="filters"), 0.1) == [1, 1, 1, 1000]
    scores = {str(k): torch.full(shape, 1.0 + k) for k, shape in enumerate(shapes)}
    masks = select(scores, 0.6, pm.Filter(of="filters"), "global(floor=0.1)")
    assert [int(mask.flatten(1).any(1).sum()) for mask in masks.values()] == [1, 1, 1, 1]


def test_layers_without_room_have_no_floor() -> None:
    # 96 of 480 are kept. One a block everywhere would be 100, so the small layers have no floor, and the last has all.
    scores = {str(k): torch.rand(4, 4) for k in range(5)} | {"last": torch.rand(4, 100) / 100}
    pattern = pm.Balanced(blocks=1)
    assert floor_counts([s.shape for s in scores.values()], 0.8, pattern, 0.2) == [0, 0, 0, 0, 0, 80]
    assert int(select(scores, 0.8, pattern, "global(floor=0.2)")["last"].sum()) == 80


def test_a_layer_of_one_weight_keeps_it() -> None:
    scores = {"one": torch.tensor([[0.0]]), "many": torch.rand(10, 10) + 1}
    masks = select(scores, 0.9, pm.Unstructured(), "global(floor=0.01)")
    assert (int(masks["one"].sum()), int(masks["many"].sum())) == (1, 9)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@settings(deadline=None, max_examples=30)
@given(SHAPES, st.integers(1, 99), st.integers(0, 100), st.integers(0, 10**6))
def test_every_layer_keeps_its_floor_and_the_total_is_unchanged(pattern, shapes, sparse, share, seed) -> None:
    sparsity = 0.5 if pattern.sparsity else sparse / 100
    floor = round((1 - sparsity) * share / 100, 4)
    generator = torch.Generator().manual_seed(seed)
    # Layers a hundred times apart: without a floor some of them would be empty.
    scores = {str(k): torch.rand(shape, generator=generator) * 100 ** (k % 3) + 0.01 for k, shape in enumerate(shapes)}
    sparsity = min(sparsity, largest_sparsity([s.shape for s in scores.values()], pattern) - 1e-9)
    floor = min(floor, 1 - sparsity)
    masks = select(scores, sparsity, pattern, f"global(floor={floor})")
    counts = floor_counts([s.shape for s in scores.values()], sparsity, pattern, floor)
    one_unit = [least_count(s.shape, pattern) for s in scores.values()]  # all that is left where no more has room
    for mask, count in zip(masks.values(), counts, strict=True):
        assert count >= Fraction(floor) * mask.numel() - pattern.unit_size(mask.shape) or counts == one_unit
        assert int(mask.sum()) >= count
    assert not floor or all(bool(mask.any()) for mask in masks.values())
    if pattern == pm.Filter(of="filters"):
        filters = torch.cat([mask.flatten(1).any(1) for mask in masks.values()])
        assert int(filters.sum()) == len(filters) - round(sparsity * len(filters))
    if pattern in (pm.Unstructured(), pm.NM(2, 4)):
        total = sum(mask.numel() for mask in masks.values())
        assert sum(int(mask.sum()) for mask in masks.values()) == total - round(sparsity * total)
    free = select(scores, sparsity, pattern, "global(floor=0)")
    if pattern == pm.Unstructured() and all(int(free[k].sum()) >= c for k, c in zip(free, counts, strict=True)):
        assert all(torch.equal(free[k], masks[k]) for k in free)


@pytest.mark.parametrize("pattern", [pm.Unstructured(), pm.Kernel()], ids=str)
def test_dpf_trains_with_a_floor(pattern: Pattern) -> None:
    options = {"sparsity": 0.9, "pattern": pattern, "every": 4}
    model, optimizer, pruner = attach_to_network(pm.DPF(**options, allocation="global(floor=0.08)"), total=40)
    with torch.no_grad():
        model.conv2.weight.mul_(1e-3)  # would be pruned completely
    pruner.refresh()
    for step in range(40):
        train(model, optimizer, [step])
        assert obeys_masks(model, pruner)
    for mask in pruner.masks().values():
        assert int(mask.sum()) >= 0.08 * mask.numel()
    assert pruner.sparsity() == pytest.approx(0.9, abs=2e-3)


def test_a_default_floor_that_does_not_bind_gives_the_bits_of_no_floor() -> None:
    runs = []
    for allocation in ("global", "global(floor=0)"):
        model, optimizer, pruner = attach_to_network(pm.DPF(sparsity=0.8, every=4, allocation=allocation), total=20)
        train(model, optimizer, range(20))
        runs.append((model.state_dict(), pruner.history))
    (one, first), (other, second) = runs
    assert first == second
    assert all(torch.equal(one[name], other[name]) for name in one)


class SortedTopK:
    """The kernels' segmented top-k selection, implemented by sorting."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.sizes = sizes

    def set_counts(self, keep: list[int]) -> None:
        self.keep = keep

    def select(self, scores: Tensor, mask: Tensor) -> None:
        parts = scores.split(self.sizes), mask[: len(scores)].split(self.sizes), self.keep
        for score, out, keep in zip(*parts, strict=True):
            out.fill_(False)
            out[score.argsort(descending=True, stable=True)[:keep]] = True


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_kernels_select_with_the_same_floor(sparsity: float) -> None:
    model, _, pruner = attach_to_network(pm.DPF(sparsity=0.9, every=4, allocation="global(floor=0.09)"), total=40)
    with torch.no_grad():
        model.conv2.weight.mul_(1e-3)
    pruner.refresh()
    (buffers,) = pruner.attached_engine().buffers
    buffers.kernels, buffers.latent, buffers.magnitude = (
        SimpleNamespace(SegmentedTopK=SortedTopK),
        buffers.latent.float(),
        None,
    )
    assert buffers.set_sparsity(sparsity)
    buffers._run_kernels("select_by_magnitude")
    scores = {name: latent.abs() for name, latent in pruner.state_dict()["latents"].items()}
    expected = select(scores, sparsity, pm.Unstructured(), "global(floor=0.09)")
    assert all(torch.equal(mask, expected[name]) for name, mask in pruner.masks().items())


@pytest.mark.parametrize(
    ("allocation", "message"),
    [
        ("global(floor=0.2)", r"at least 20\.00% .* sparsity of 0\.9 keeps only 10\.00% .* lower floor or sparsity"),
        ("global(floor=1)", r"in \[0, 1\), got 1"),
        ("global(floor='x')", r"got 'x'"),
        ("global(flor=0.1)", "unknown option of allocation 'global' 'flor': did you mean 'floor'"),
        ("uniform(floor=0.01)", "only global takes a floor"),
        ("erk(floor=0)", "only global takes a floor"),
        ("globl(floor=0.01)", "did you mean 'global'"),
        ("global(0.1)", r"^'global\(0\.1\)' is not of the form global\(option=value, …\)"),
        ("global(floor=0.1", "not of the form"),
        ("global(floor=True)", "got True"),
        (3, "got 3"),
    ],
)
@pytest.mark.parametrize("method", [pm.DPF, pm.Incremental, pm.EdgePopup])
def test_invalid_floors_are_refused(method: Callable[..., pm.Pruner], allocation: object, message: str) -> None:
    with pytest.raises(pm.PomonaError, match=message):
        method(sparsity=0.9, allocation=allocation)


def test_allocations_have_one_canonical_form() -> None:
    assert parse_allocation("global(floor=0.02)") == ("global", 0.02)
    assert parse_allocation("erk") == ("erk", None)
    for one, written in [
        ("global", ["global()", " global "]),
        ("global(floor=0)", ["global(floor=0.0)"]),
        ("global(floor=0.1)", ["global(floor=.10)", "global ( floor = 0.1 )"]),
        ("erk", ["erk()"]),
    ]:
        assert {pm.DPF(sparsity=0.9, allocation=text).method.allocation for text in [one, *written]} == {one}
    with pytest.raises(pm.PomonaError, match="not erk"):
        pm.DPF(pattern="nm(n=2, m=4)", allocation="erk()")
