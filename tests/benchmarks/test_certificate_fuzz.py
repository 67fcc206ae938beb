"""Random networks with an attack on each: no bound is exceeded, and a wrong rule is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from slow_cases import slow_after

from pomona.theory.certificate import norm_bounds
from pomona.theory.certificate.rules import affine, piecewise

GRAPHS = 30


@pytest.fixture(scope="module")
def fuzz(load_script: Callable[[str], Any]) -> Any:
    """Return the script that attacks random networks."""
    return load_script("certificate_fuzz")


@pytest.fixture(scope="module")
def drawn(fuzz: Any) -> list[tuple[Any, Any]]:
    """Return random networks as paired graphs, with None for those that are refused."""
    seeds = range(GRAPHS)
    return [pair for k in range(0, GRAPHS, 15) for pair in fuzz.pair_seeds(seeds[k : k + 15])]


def attack_all(fuzz: Any, drawn: list[tuple[Any, Any]]) -> list[Any]:
    """Return the results of an attack on each network."""
    return [
        fuzz.check_graph(graph, fuzz.random_region(result.seed), fuzz.Result(result.seed, result.operations))
        for result, graph in drawn
        if graph is not None
    ]


def test_no_certificate_of_a_random_network_is_exceeded(fuzz: Any, drawn: list[tuple[Any, Any]]) -> None:
    results = attack_all(fuzz, drawn)
    assert [(result.seed, result.broken) for result in results if result.broken] == []
    certified = [result for result in results if result.domains]
    assert len(certified) > 0.85 * GRAPHS  # few are refused
    assert {name for result in certified for name in result.domains} == {"norms", "intervals", "linear", "linearised"}
    loose = sorted(result.looseness for result in certified if result.looseness is not None)
    assert len(loose) > GRAPHS / 2
    assert loose[len(loose) // 2] < 3  # an attack comes near to the certificate of most networks


# ---- wrong rules


def both_terms_with_the_dense_weight(patch: pytest.MonkeyPatch) -> None:
    original = affine.AffineLayer.bounds

    def bounds(self: Any, x: Any) -> Any:
        right = original(self, x)
        gap = self.image(self.weight[0], x.gap) + self.image(self.weight[0] - self.weight[1], x.dense)
        gap = self.shift(gap, self.bias[0] - self.bias[1])
        return replace(right, gap=right.gap.intersect(gap))

    patch.setattr(affine.AffineLayer, "bounds", bounds)


def substitution_with_the_dense_weight(patch: pytest.MonkeyPatch) -> None:
    original = affine.AffineLayer.substitute

    def substitute(self: Any, form: Any, x: Any) -> Any:
        return original(replace(self, weight=(self.weight[0], self.weight[0])), form, x)

    patch.setattr(affine.AffineLayer, "substitute", substitute)


def no_difference_of_biases(patch: pytest.MonkeyPatch) -> None:
    original = affine.AffineLayer.bounds

    def bounds(self: Any, x: Any) -> Any:
        return original(replace(self, bias=(self.bias[1], self.bias[1])), x)

    patch.setattr(affine.AffineLayer, "bounds", bounds)


def smaller_slopes(patch: pytest.MonkeyPatch) -> None:
    original = piecewise.gap_range

    def gap_range(gap: Any, slopes: Any) -> Any:
        return original(gap, replace(slopes, high=slopes.high * 0.9))

    patch.setattr(piecewise, "gap_range", gap_range)


def no_repeats_in_norms(patch: pytest.MonkeyPatch) -> None:
    original = norm_bounds.sum_constants

    def sum_constants(step: Any, values: Any) -> Any:
        found = original(step, values)
        repeats = step.op in ("index", "expand", "repeat", "cat", "pad")
        return ([1.0] * len(values), 1.0) if found is not None and repeats and len(values) == 1 else found

    patch.setattr(norm_bounds, "sum_constants", sum_constants)


def no_removed_part_in_norms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        norm_bounds.AffineMap, "__sub__", lambda self, other: replace(self, weight=self.weight * 0, bias=self.bias * 0)
    )


WRONG_RULES = [
    both_terms_with_the_dense_weight,
    no_repeats_in_norms,
    substitution_with_the_dense_weight,
    no_difference_of_biases,
    smaller_slopes,
    no_removed_part_in_norms,
]


@pytest.mark.parametrize("break_rule", slow_after(1, WRONG_RULES))
def test_a_wrong_rule_is_found(
    break_rule: Callable[[pytest.MonkeyPatch], None],
    fuzz: Any,
    drawn: list[tuple[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_rule(monkeypatch)
    assert any(result.broken for result in attack_all(fuzz, drawn[:40]))
