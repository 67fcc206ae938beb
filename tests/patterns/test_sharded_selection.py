"""Scores whose rows lie on several ranks give the masks of one process, for every pattern, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import RankWorld
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import pomona as pm
from pomona import allocation
from pomona.patterns import PATTERNS, Pattern, Unstructured
from pomona.patterns.sharded_selection import RowShards, select_masks
from pomona.sharding import local_part, whole, whole_reads

SPECS = ["unstructured", "filter", "filter(of='filters')", "kernel", "balanced(4)", "balanced(blocks=2)", "2:4"]
SPECS += ["block((2, 2))", "block((3, 4))", "block((None, 4))"]


def make_scores(seed: int) -> list[Tensor]:
    """Return scores of some layers with ties, −inf and, where units differ in size, several shapes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 4, 2, 2), (12, 8), (6, 8, 2, 2)] if seed % 2 else [(6, 8), (12, 8)]
    scores = [torch.randint(0, 9, shape, generator=generator).to(torch.float64) / 7 for shape in shapes]
    scores[0][torch.rand(scores[0].shape, generator=generator) < 0.3] = -torch.inf
    return scores


def select_as_rank(seed: int, spec: str, sparsity: float, name: str, placement: str) -> list[Tensor]:
    """Return the masks that the ranks select together."""
    world = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2) if placement == "hybrid" else (world,))
    places: Any = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "copies": [Replicate()],
        "hybrid": [Replicate(), Shard(0)],
    }[placement]
    scores = {str(i): distribute_tensor(s, mesh, places, src_data_rank=None) for i, s in enumerate(make_scores(seed))}
    with whole_reads():
        masks = allocation.select(scores, sparsity, PATTERNS.resolve(spec), name)
    for mask, score in zip(masks.values(), scores.values(), strict=True):
        assert mask.placements == score.placements
        assert local_part(mask).shape == local_part(score).shape
    return [whole(mask) for mask in masks.values()]


def count_gathered(spec: str) -> int:
    """Return how many entries this rank receives in all-gathers while it selects in one large layer."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    score = distribute_tensor(torch.rand(64, 128), mesh, [Shard(0)], src_data_rank=None)
    received, gather = [0], distributed.all_gather

    def counted(tensors: list[Tensor], *arguments: Any, **options: Any) -> Any:
        received[0] += sum(tensor.numel() for tensor in tensors)
        return gather(tensors, *arguments, **options)

    distributed.all_gather = counted
    try:
        select_masks(PATTERNS.resolve(spec), [score, score], 0.5)
    finally:
        distributed.all_gather = gather
    return received[0]


class Rotated(Pattern):
    """A pattern of a user, of which nothing is known."""

    def select_masks(self, scores: Any, sparsity: float) -> list[Tensor]:
        return [mask.roll(1, 0) for mask in Unstructured().select_masks(scores, sparsity)]


def select_unknown(count: int) -> str | Tensor:
    """Return the mask of a user's pattern, or why it is refused."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    scores = [distribute_tensor(s, mesh, [Shard(0)], src_data_rank=None) for s in make_scores(0)[:count]]
    try:
        return whole(select_masks(Rotated(), scores, 0.5)[0])
    except pm.PomonaError as error:
        return str(error)


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    """Return four ranks."""
    with RankWorld(4) as ranks:
        yield ranks


def require_same_masks(world: RankWorld, seed: int, spec: str, sparsity: float, name: str, placement: str) -> None:
    """Compare the masks of ranks with those of this process."""
    scores = {str(i): score for i, score in enumerate(make_scores(seed))}
    expected = list(allocation.select(scores, sparsity, PATTERNS.resolve(spec), name).values())
    for masks in world.run(select_as_rank, seed, spec, sparsity, name, placement):
        assert all(map(torch.equal, masks, expected)), (seed, spec, sparsity, name, placement)


@pytest.mark.parametrize("spec", SPECS)
def test_masks_are_those_of_one_process(world: RankWorld, spec: str) -> None:
    draw = random.Random(spec)
    for seed in range(4):
        name = draw.choice(["global", "uniform", "global(floor=0)", "global(floor=0.2)"])
        sparsity = 0.5 if ":" in spec else draw.choice([0.0, 0.25, 0.5, 0.6])
        require_same_masks(world, seed, spec, sparsity, name, "rows")


@pytest.mark.parametrize("placement", ["columns", "copies", "hybrid"])
def test_other_placements_are_selected_alike(world: RankWorld, placement: str) -> None:
    for spec in ("unstructured", "filter", "balanced(4)", "block((3, 4))"):
        require_same_masks(world, 1, spec, 0.5, "global", placement)


def test_no_scores_are_gathered_where_no_unit_is_cut(world: RankWorld) -> None:
    for spec in ("unstructured", "filter", "kernel", "balanced(4)", "block((4, 4))"):
        assert max(world.run(count_gathered, spec)) <= 4 * 2 * 8, spec  # ties of two layers, on four ranks


def test_a_pattern_of_a_user_is_selected_layer_by_layer_or_refused(world: RankWorld) -> None:
    expected = Rotated().select_masks(make_scores(0)[:1], 0.5)[0]
    assert all(torch.equal(mask, expected) for mask in world.run(select_unknown, 1))
    for message in world.run(select_unknown, 2):
        assert message.endswith("which would gather them all: use allocation='uniform'.")


def test_a_unit_is_cut_where_a_rank_ends_within_it() -> None:
    shards = RowShards(type("Mesh", (), {"size": lambda self, dim: 4})(), 0)
    assert [shards.cuts(rows, 3) for rows in (12, 24, 6, 8)] == [False, False, True, True]
