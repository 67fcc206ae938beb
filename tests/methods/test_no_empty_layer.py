"""No method, pattern, allocation, sparsity or score leaves a layer empty."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_unless
from torch import Tensor, nn
from torch.nn import functional as F

import pomona as pm
from pomona.allocation import FLOOR_SHARE, floor_counts, largest_sparsity, layer_sparsities, select
from pomona.methods import METHODS
from pomona.patterns import Pattern

PATTERNS: list[Pattern] = [
    pm.Unstructured(),
    pm.Block((4, 3)),
    pm.Kernel(),
    pm.Filter(),
    pm.Filter(of="filters"),
    pm.Balanced(block=6),
    pm.NM(1, 6),
]
ALLOCATIONS = ["global", "global(floor=0.001)", "uniform", "erk"]
SPARSITIES = [0.5, 0.9, 0.97, 0.98, 0.995]
NOT_ATTACHED = {"lottery", "finetune"}  # lottery prunes between trainings, and finetune keeps the zeros that it finds
STEPS = 8


def make_network(tiny: str, seed: int = 0) -> nn.Module:
    """Return a network with one layer whose weights are a million times smaller than those of the others."""
    torch.manual_seed(seed)
    layers = {"first": nn.Conv2d(4, 24, 3), "second": nn.Conv2d(24, 36, 3), "third": nn.Linear(36 * 2 * 2, 96)}
    first, second, third = layers.values()
    norm = nn.BatchNorm2d(24, affine=False)
    model = nn.Sequential(first, norm, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), third, nn.ReLU(), nn.Linear(96, 12))
    with torch.no_grad():
        layers[tiny].weight.mul_(1e-6)
    return model


def train(model: nn.Module, pruner: pm.Pruner) -> None:
    """Train for a few steps, and assert after each of them that no layer is empty."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers near their floor are named
        pruner.attach(model, optimizer, total_steps=STEPS, steps_per_epoch=2)
        assert_no_layer_is_empty(pruner)
        for step in range(STEPS):
            x = torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.arange(8) % 3).backward()
            optimizer.step()
            assert_no_layer_is_empty(pruner)
        pruner.finish()
    assert_no_layer_is_empty(pruner)


def assert_no_layer_is_empty(pruner: pm.Pruner) -> None:
    """Assert that every weight with two dimensions or more keeps some of its entries."""
    assert all(bool(mask.any()) for mask in pruner.masks().values() if mask.ndim > 1)


def make_pruner(name: str, **options: Any) -> pm.Pruner | None:
    """Return a pruner that updates its masks often; None where the method does not take the options."""
    fields = METHODS[name].__dataclass_fields__
    frequent = {"every": 1} if "every" in fields and name not in ("edge_popup", "iterand") else {}
    given = {key: value for key, value in options.items() if fields[key].init}
    try:
        return pm.Pruner(METHODS[name](**given, **frequent))
    except pm.PomonaError:
        return None


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(
    "name",
    slow_unless(["dpf", "oneshot", "rigl", "sparse_momentum"], [name for name in METHODS if name not in NOT_ATTACHED]),
)
def test_no_layer_is_ever_empty(name: str, pattern: Pattern) -> None:
    for index, sparsity in enumerate(SPARSITIES):
        allocation = ALLOCATIONS[(index + len(name)) % len(ALLOCATIONS)]
        options = {"sparsity": None if pattern.sparsity else sparsity, "pattern": pattern, "allocation": allocation}
        pruner = make_pruner(name, **options)
        if pruner is None:
            continue
        model = make_network(("first", "second", "third")[index % 3])
        shapes = [target.outputs_first for target in pruner.method.targets(model)]
        try:
            train(model, pruner)
        except pm.PomonaError as error:
            assert "so that no layer is empty" in str(error)  # noqa: PT017 - most sparsities are not refused
            assert pruner.method.final_sparsity > largest_sparsity(shapes, pruner.method.pattern)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([(4, 8), (8, 6, 3, 3), (2, 12), (32, 16), (96, 12)]), min_size=1, max_size=6),
    st.sampled_from(PATTERNS[:1] + PATTERNS[2:5]),
    st.sampled_from(ALLOCATIONS),
    st.floats(0.01, 0.999),
    st.integers(0, 10**6),
)
def test_no_selection_empties_a_layer(shapes, pattern, allocation, sparsity, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = {str(k): torch.rand(shape, generator=generator) * 1e-3**k for k, shape in enumerate(shapes)}
    sizes = [score.shape for score in scores.values()]
    sparsity = min(sparsity, largest_sparsity(sizes, pattern) - 1e-9)
    if "floor" in allocation and 1 - sparsity < 0.001:
        allocation = "global"
    masks = select(scores, sparsity, pattern, allocation)
    assert all(bool(mask.any()) for mask in masks.values())
    if allocation == "global" and pattern == pm.Unstructured():
        total = sum(mask.numel() for mask in masks.values())
        assert sum(int(mask.sum()) for mask in masks.values()) == total - round(sparsity * total)


def test_default_floors_by_hand() -> None:
    # A twentieth of the density of 10 %: 5 of 1,000 weights, and 0.5 of 100, rounded up.
    assert FLOOR_SHARE == 1 / 20
    shapes = [torch.Size([20, 50]), torch.Size([10, 10])]
    assert floor_counts(shapes, 0.9, pm.Unstructured(), None) == [5, 1]
    # No more than one weight for each output: 4 and not 50.
    assert floor_counts([torch.Size([4, 2500]), torch.Size([10, 10])], 0.9, pm.Unstructured(), None) == [4, 1]
    # Whole filters: a twentieth of half of 64 is 1.6, of 8 it is 0.2.
    assert floor_counts([torch.Size([64, 9]), torch.Size([8, 9])], 0.5, pm.Filter(), None) == [18, 9]
    # Where the rounded counts have no room, one unit stays: 2 of 200 are kept.
    assert floor_counts([torch.Size([10, 10])] * 2, 0.99, pm.Unstructured(), None) == [1, 1]
    # A bias may be pruned completely, and balanced rows keep a weight in every block anyway.
    assert floor_counts([torch.Size([10]), torch.Size([10, 10])], 0.9, pm.Unstructured(), None) == [0, 1]
    assert floor_counts([torch.Size([10, 10])], 0.9, pm.Balanced(block=5), None) == [0]
    assert floor_counts(shapes, 0.9, pm.Unstructured(), 0) == [0, 0]


def test_layerwise_allocations_keep_one_unit_by_hand() -> None:
    shapes = [torch.Size([2, 2]), torch.Size([10, 10]), torch.Size([5])]
    assert layer_sparsities("uniform", shapes, 0.95, pm.Unstructured()) == [0.75, 0.95, 0.95]
    assert layer_sparsities("uniform", shapes[:2], 0.95, pm.Filter()) == [0.5, 0.9]


def test_a_default_floor_changes_only_layers_below_it() -> None:
    scores = {"low": torch.arange(1.0, 101).reshape(10, 10), "high": torch.arange(1000.0, 1400).reshape(10, 40)}
    free, floored = (select(scores, 0.8, pm.Unstructured(), allocation) for allocation in ("global(floor=0)", "global"))
    assert (int(free["low"].sum()), int(free["high"].sum())) == (0, 100)
    assert floored["low"].nonzero().tolist() == [[9, 9]]  # the best weight of the low layer in place of the lowest
    assert torch.equal(floored["high"].flatten(), free["high"].flatten() & (torch.arange(400) != 300))


# ---- reports of users


class DigitsCNN(nn.Sequential):
    """A network for 8 × 8 images with a hidden layer of 131,072 weights."""

    def __init__(self, seed: int = 0, norm: bool = True) -> None:
        torch.manual_seed(seed)
        blocks: list[nn.Module] = []
        for inputs, outputs in ((1, 32), (32, 64)):
            blocks += [nn.Conv2d(inputs, outputs, 3, padding=1), *[nn.BatchNorm2d(outputs)] * norm]
            blocks += [nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*blocks, nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))


@pytest.mark.filterwarnings("ignore:.* keeps")
def test_one_shot_at_initialisation_empties_no_layer() -> None:
    for tiny in (None, 4, 9):
        model = DigitsCNN()
        if tiny is not None:
            with torch.no_grad():
                model[tiny].weight.mul_(1e-3)
        pruner = pm.OneShot(sparsity=0.97).attach(model, torch.optim.SGD(model.parameters(), 0.1))
        kept = {name: int(mask.sum()) for name, mask in pruner.masks().items()}
        assert kept["0.weight"] >= 1
        assert kept["4.weight"] >= 28
        assert kept["9.weight"] >= 197
        assert sum(kept.values()) == 149_792 - round(0.97 * 149_792)


def test_filters_are_ranked_within_their_layer_by_default() -> None:
    """With Adam, filters of the first layers lose their norm: one threshold for all removes every one of them."""
    model = DigitsCNN()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    pruner = pm.DPF(sparsity=0.5, pattern=pm.Filter(), every=4)
    pruner.attach(model, optimizer, total_steps=24)
    for step in range(24):
        generator = torch.Generator().manual_seed(step)
        labels = torch.randint(10, (32,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(label_images(labels, generator)), labels).backward()
        optimizer.step()
    pruner.finish()
    filters = {name: int(mask.flatten(1).any(1).sum()) for name, mask in pruner.masks().items()}
    assert filters == {"0.weight": 16, "4.weight": 32, "9.weight": 256}
    pytest.importorskip("torch_pruning")
    assert pm.shrink(model, (1, 8, 8)).params.ratio > 1.5


def label_images(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Return noisy images in which one bright row or column tells the label."""
    images = torch.randn(len(labels), 1, 8, 8, generator=generator) / 4
    for image, label in zip(images, labels.tolist(), strict=True):
        (image[0] if label < 5 else image[0].T)[label % 5 + 1] += 2
    return images


@pytest.mark.parametrize(
    ("pattern", "allocation"), [("filter", "uniform"), ("kernel", "global"), ("unstructured", "global")]
)
def test_methods_without_an_allocation_take_that_of_their_pattern(pattern: str, allocation: str) -> None:
    assert pm.DPF(pattern=pattern).method.allocation == allocation
    assert pm.DPF(pattern=pattern, allocation="erk").method.allocation == "erk"
    assert pm.SET(pattern="kernel").method.allocation == "erk"  # a method with a default of its own
