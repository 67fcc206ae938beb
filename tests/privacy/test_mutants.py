"""Deliberate mutants of private steps, each a mistake that was made somewhere, and the check that catches each one.

All checks pass on the code as it is; a mutant must fail its check.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from itertools import chain

import pytest
import torch
from guard_checks import (
    GUARD_CHECKS,
    check_augmentation,
    check_copies,
    check_delta,
    check_limits,
    check_parameters,
    check_processes,
)
from mutant_checks import (
    CHECKS,
    check_charges,
    check_counts,
    check_forward,
    check_guards,
    check_indices,
    check_layers,
    check_ledger,
    check_model_randomness,
    check_noise,
    check_ramps,
    check_replay,
    check_rows,
    check_sampling,
    check_secrets,
    check_sensitivity,
    check_sum,
)

from pomona.errors import PomonaError
from pomona.privacy import (
    Budget,
    IndexMechanism,
    Ledger,
    PrivateStep,
    Source,
    accounting,
    clipping_norms,
    example_gradients,
    private_step,
    row_independence,
    seeded_rows,
    step_journal,
)
from pomona.privacy import budget as budget_module
from pomona.privacy.clipping import UNITS, GradientGrid
from pomona.privacy.clipping_norms import ClippingNorms
from pomona.privacy.example_gradients import ExampleGradients
from pomona.privacy.journal import Journal
from pomona.privacy.model_state import ModelState
from pomona.privacy.optimizer_guard import OptimizerGuard
from pomona.privacy.processes import Processes
from pomona.privacy.step_journal import StepJournal


@pytest.mark.parametrize("check", [*CHECKS, *GUARD_CHECKS])
def test_checks_pass_on_the_code_as_it_is(check):
    check()


# ---- mutants


def of_result(change: Callable) -> Callable:
    """Return a maker of a mutant that changes what a function returns."""
    return lambda original: lambda *given, **named: change(original(*given, **named))


def do_nothing(original):
    return lambda *given, **named: None


def divide_by_the_sample_size(original):
    def to_gradient(self, total, divisor):
        return original(self, total, divisor * 1.07)

    return to_gradient


def clip_the_sum(original):
    def add_clipped(self, gradients, total, sums=()):
        summed = [torch.nan_to_num(part).sum(0, keepdim=True) for part in gradients]
        original(self, summed, total)

    return add_clipped


def clip_each_part_alone(original):
    def add_clipped(self, gradients, total, sums=()):
        start = 0
        for part in gradients:
            original(self, [part], total[start : start + part.shape[1]])
            start += part.shape[1]

    return add_clipped


def scale_without_norm(original):
    return lambda self, squares: torch.where(squares.isfinite(), UNITS / self.clip, 0.0).float()


def keep_lost_rows(original):
    return lambda self, squares: original(self, torch.nan_to_num(squares, nan=1.0))


def add_noise_to_each_part(original):
    def add_clipped(self, gradients, total, sums=()):
        original(self, gradients, total)
        total += Source().discrete_gaussian(len(total), self.noise_variance(3.0))

    return add_clipped


def one_number_for_all(original):
    return lambda self, count, variance: original(self, 1, variance).expand(count).clone()


def same_noise_each_step(original):
    def draw(self, count, variance):
        self.step, step = 1, self.step
        self.calls.clear()
        try:
            return original(self, count, variance)
        finally:
            self.step = step

    return draw


def shuffle_in_place_of_poisson(original):
    def poisson(self, rows, rate):
        self.step += 1
        return torch.randperm(rows)[: int(rate * rows)].sort().values

    return poisson


def draw_the_same_rows(original):
    def poisson(self, rows, rate):
        self.step = 0
        return original(self, rows, rate)

    return poisson


def draw_pairs(original):
    def poisson(self, rows, rate):
        pairs = original(self, rows // 2, rate)
        return torch.cat([2 * pairs, 2 * pairs + 1]).sort().values

    return poisson


def accept_any_rows(original):
    return lambda self, inputs, targets, rows: (inputs, targets)


def charge_after_the_release(original):
    def call(self, *given, **named):
        entered = []
        self.journal.enter_release = lambda *arguments: entered.append(arguments)
        result = original(self, *given, **named)
        del self.journal.enter_release
        self.journal.enter_release(*entered[0])
        return result

    return call


def charge_taken_steps_only(original):
    def draw(self):
        self.drawn = self.steps_taken
        return original(self)

    return draw


def skip_empty_samples(original):
    def draw(self):
        rows = original(self)
        while not len(rows):
            self.drawn -= 1
            rows = original(self)
        return rows

    return draw


def allow_the_same_rows_twice(original):
    def call(self, *given, **named):
        pending = self.pending
        result = original(self, *given, **named)
        self.pending = pending
        return result

    return call


def resume_with_a_new_key(original):
    def load(self, state):
        original(self, state)
        self.key = Source().key

    return load


def draw_keys_from_torch(original):
    def init(self, device="cpu", *, seed=None):
        original(self, device, seed=seed)
        if seed is None:
            self.key = bytes(torch.randint(256, (32,)).tolist())

    return init


def publish_the_key(original):
    return lambda self: original(self) | {"source": self.source.state_dict()}


def clip_each_layer_to_the_whole_norm(original):
    def grid(self, step):
        made = original(self, step)
        return dataclasses.replace(made, grids=tuple(dataclasses.replace(one, units=UNITS) for one in made.grids))

    return grid


def clip_each_layer_to_twice_its_norm(original):
    return lambda self: min(2.0 * original.fget(self), UNITS)


def resume_without_norms(original):
    return lambda self, state: original(self, {key: value for key, value in state.items() if key != "norms"})


def seed_torch(original):
    @contextmanager
    def seeded_torch(self, rank=0):
        with torch.random.fork_rng([]):
            torch.manual_seed(self.integer(64) >> 1)
            yield

    return seeded_torch


def noise_on_the_gradient_alone(original):
    def draw_noise(self, source, grid, size, sigma):
        noise = original(self, source, grid, size, sigma)
        noise[size:] = 0
        return noise

    return draw_noise


def noise_of_the_counts_is_small(original):
    def draw_noise(self, source, grid, size, sigma):
        self.count_noise, kept = self.count_noise / 2, self.count_noise
        try:
            return original(self, source, grid, size, 0.5 * sigma)
        finally:
            self.count_noise = kept

    return draw_noise


def forget_the_ramps(original):
    return lambda epsilon, delta, rate, steps, index, *ramps: original(epsilon, delta, rate, steps, index)


def add_in_16_bits(original):
    def add_clipped(self, gradients, total, sums=()):
        added = torch.zeros_like(total)
        squares = original(self, gradients, added)
        total += added.bfloat16().long()
        return squares

    return add_clipped


MUTANTS = [
    # object, name, mutant, the check that catches it
    (GradientGrid, "to_gradient", divide_by_the_sample_size, check_sum),
    (GradientGrid, "to_gradient", of_result(lambda gradient: gradient * 2), check_sum),
    (GradientGrid, "add_clipped", clip_the_sum, check_sum),
    (GradientGrid, "add_clipped", clip_each_part_alone, check_sensitivity),
    (GradientGrid, "scale_rows", scale_without_norm, check_sensitivity),
    (GradientGrid, "scale_rows", of_result(lambda scales: scales * 2), check_sensitivity),
    (GradientGrid, "scale_rows", keep_lost_rows, check_sum),
    (GradientGrid, "norm_limit", lambda original: property(lambda self: UNITS), check_sensitivity),
    (GradientGrid, "norm_limit", lambda original: property(lambda self: 2.0 * UNITS), check_sensitivity),
    (
        GradientGrid,
        "noise_variance",
        lambda original: lambda self, sigma: original(self, sigma / self.clip),
        check_noise,
    ),
    (GradientGrid, "noise_variance", lambda original: lambda self, sigma: int(sigma * UNITS**2), check_noise),
    (GradientGrid, "noise_variance", lambda original: lambda self, sigma: original(self, sigma / 20), check_noise),
    (GradientGrid, "add_clipped", add_noise_to_each_part, check_noise),
    (Source, "discrete_gaussian", of_result(lambda noise: noise * 0), check_noise),
    (Source, "discrete_gaussian", of_result(lambda noise: noise.abs()), check_noise),
    (Source, "discrete_gaussian", one_number_for_all, check_noise),
    (Source, "discrete_gaussian", same_noise_each_step, check_noise),
    (Source, "poisson", shuffle_in_place_of_poisson, check_sampling),
    (Source, "poisson", draw_the_same_rows, check_sampling),
    (Source, "poisson", draw_pairs, check_sampling),
    (Source, "poisson", lambda original: lambda self, rows, rate: original(self, rows, 2 * rate), check_sampling),
    (example_gradients, "pad_rows", lambda original: lambda batch, count: batch_of_two(batch), check_sum),
    (PrivateStep, "check_examples", accept_any_rows, check_charges),
    (PrivateStep, "__call__", allow_the_same_rows_twice, check_charges),
    (PrivateStep, "draw", charge_taken_steps_only, check_charges),
    (PrivateStep, "draw", skip_empty_samples, check_charges),
    (PrivateStep, "__call__", charge_after_the_release, check_ledger),
    (StepJournal, "enter_release", lambda original: lambda *given: None, check_ledger),
    (Source, "load_state_dict", resume_with_a_new_key, check_ledger),
    (OptimizerGuard, "refuse_foreign_step", lambda original: lambda *given: None, check_guards),
    (Budget, "verify", lambda original: lambda self: None, check_guards),
    (Source, "__init__", draw_keys_from_torch, check_secrets),
    (PrivateStep, "facts", publish_the_key, check_secrets),
    (
        PrivateStep,
        "mechanism",
        lambda original: lambda self, step=None: IndexMechanism(0.3, theta=math.inf, group=50),
        check_indices,
    ),
    (PrivateStep, "mechanism", lambda original: lambda self, step=None: doubled(original(self, step)), check_indices),
    (ClippingNorms, "grid", clip_each_layer_to_the_whole_norm, check_layers),
    (GradientGrid, "norm_limit", lambda original: property(clip_each_layer_to_twice_its_norm(original)), check_layers),
    (clipping_norms, "group_by_layer", of_result(lambda layers: {"": list(chain(*layers.values()))}), check_layers),
    (clipping_norms, "gradient_noise", lambda original: lambda sigma, *given: sigma, check_counts),
    (clipping_norms, "gradient_noise", of_result(lambda sigma: sigma * 0.9), check_counts),
    (clipping_norms, "count_whole", of_result(lambda count: 2 * count), check_counts),
    (clipping_norms, "COUNT_UNITS", lambda original: 2 * original, check_counts),
    (ClippingNorms, "draw_noise", noise_on_the_gradient_alone, check_counts),
    (ClippingNorms, "draw_noise", noise_of_the_counts_is_small, check_counts),
    (Budget, "sigma_at", lambda original: lambda self, step: self.sigma, check_ramps),
    (Budget, "sigma_at", lambda original: lambda self, step: original(self, self.steps - 1), check_ramps),
    (Budget, "pairs", lambda original: lambda self, steps: Counter({self.pair: len(list(steps))}), check_ramps),
    (budget_module, "solve_noise_multiplier", forget_the_ramps, check_ramps),
    (PrivateStep, "load_state_dict", resume_without_norms, check_replay),
    (ClippingNorms, "adapt", lambda original: lambda self, counts: None, check_replay),
    (Source, "seeded_torch", seed_torch, check_model_randomness),
    (private_step, "refuse_other_parameters", do_nothing, check_parameters),
    (Processes, "require_agreement", do_nothing, check_processes),
    (StepJournal, "digest_weights", lambda original: lambda self, weights: "", check_processes),
    (accounting, "MIN_DELTA", lambda original: 0.0, check_delta),
    (step_journal, "require_same_release", do_nothing, check_copies),
    (PrivateStep, "__reduce_ex__", lambda original: object.__reduce_ex__, check_copies),
    (Source, "__reduce_ex__", lambda original: object.__reduce_ex__, check_copies),
    (Ledger, "require_going_on", do_nothing, check_limits),
    (Ledger, "total", lambda original: lambda self, delta, *_, **__: original(self, delta), check_limits),
    (Journal, "read_head", lambda original: lambda self: 0, check_limits),
    (seeded_rows, "seed_row", do_nothing, check_augmentation),
    (seeded_rows, "seed_row", lambda original: lambda key, place: original(key, (0, place[1])), check_augmentation),
    (Source, "row_key", lambda original: lambda self: b"public", check_augmentation),
    (GradientGrid, "add_clipped", add_in_16_bits, check_sum),
    (ExampleGradients, "is_exact", of_result(lambda is_exact: False), check_rows),
    (example_gradients, "copy_model", of_result(lambda trial: trial.eval()), check_rows),
    (example_gradients, "is_test_due", lambda original: lambda count: count == 1, check_rows),
    (row_independence, "is_within_margin", of_result(lambda is_within: True), check_rows),
    (ModelState, "changed", of_result(lambda names: []), check_forward),
    (ModelState, "changed", of_result(lambda names: [name for name in names if name == "kept"]), check_forward),
    (ModelState, "restore", lambda original: lambda self: None, check_forward),
]


def batch_of_two(batch):
    """Return a batch whose rows are all the first one."""
    return tuple(part[:1].expand_as(part) for part in batch)


def doubled(mechanism: IndexMechanism) -> IndexMechanism:
    """Return a mechanism with twice the ε."""
    return IndexMechanism(mechanism.keep, epsilon=2 * mechanism.epsilon, group=mechanism.group)


@pytest.mark.parametrize(
    ("place", "name", "mutate", "check"),
    MUTANTS,
    ids=[f"{k}-{mutant[0].__name__.split('.')[-1]}.{mutant[1]}" for k, mutant in enumerate(MUTANTS)],
)
def test_mutants_are_caught(place, name, mutate, check, monkeypatch):
    pytest.importorskip("dp_accounting")
    monkeypatch.setattr(place, name, mutate(getattr(place, name)))
    with pytest.raises((AssertionError, PomonaError, pytest.fail.Exception)):
        check()
