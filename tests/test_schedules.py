"""Sparsity schedules."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pomona as pm
from pomona.schedules import SCHEDULES, Schedule


@pytest.mark.parametrize(
    ("schedule", "fractions"),
    [
        (pm.Linear(until=1.0), [0, 0.25, 0.5, 0.75, 1]),
        (pm.Linear(start=0.25, until=0.75), [0, 0, 0.5, 1, 1]),
        (pm.Cubic(until=1.0), [0, 37 / 64, 7 / 8, 63 / 64, 1]),
        (pm.Cubic(until=0.5), [0, 7 / 8, 1, 1, 1]),
        (pm.Cosine(until=1.0), [0, (1 - math.sqrt(0.5)) / 2, 0.5, (1 + math.sqrt(0.5)) / 2, 1]),
        (pm.Constant(), [1, 1, 1, 1, 1]),
    ],
)
def test_fractions_worked_out_by_hand(schedule: Schedule, fractions: list[float]) -> None:
    assert [schedule(step, 8) for step in (0, 2, 4, 6, 8)] == pytest.approx(fractions)


def test_default_is_zhu_and_gupta_until_three_quarters() -> None:
    assert pm.DPF().method.schedule == pm.Cubic(start=0.0, until=0.75)
    assert pm.Cubic()(75, 100) == 1.0
    assert pm.Cubic()(74, 100) < 1.0


def test_with_epochs_the_sparsity_changes_only_at_their_start() -> None:
    linear = pm.Linear(until=1.0)
    assert [linear(step, 12, 4) for step in range(12)] == pytest.approx([0] * 4 + [1 / 3] * 4 + [2 / 3] * 4)
    assert linear(12, 12, 4) == 1.0


@given(
    st.sampled_from([pm.Linear, pm.Cubic, pm.Cosine]),
    st.floats(0, 0.9),
    st.floats(0.01, 1),
    st.integers(1, 500),
    st.none() | st.integers(1, 50),
)
def test_schedules_rise_from_zero_to_one(
    cls: type[Schedule], start: float, length: float, total: int, steps_per_epoch: int | None
) -> None:
    schedule = cls(start=start, until=min(start + length, 1.0))  # type: ignore[call-arg]
    fractions = [schedule(step, total, steps_per_epoch) for step in range(total + 1)]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0
    assert all(0 <= fraction <= 1 for fraction in fractions)
    if steps_per_epoch is None:
        assert fractions[-1] == 1
        assert all(s == 1 for step, s in enumerate(fractions) if step >= schedule.until * total + 1e-9)


@pytest.mark.parametrize("options", [{"start": 0.5, "until": 0.5}, {"until": 1.5}, {"start": -0.1}, {"until": 0}])
def test_invalid_ranges_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(pm.PomonaError, match="0 ≤ start < until ≤ 1"):
        pm.Cubic(**options)


def test_a_schedule_can_be_written_in_three_ways() -> None:
    assert (
        SCHEDULES.resolve("cubic(until=0.5)")
        == SCHEDULES.resolve({"name": "cubic", "until": 0.5})
        == pm.Cubic(until=0.5)
    )
    with pytest.raises(pm.PomonaError, match="unknown schedule 'qubic': did you mean 'cubic'"):
        SCHEDULES.resolve("qubic")
    with pytest.raises(pm.PomonaError, match="until takes float, got 'late'"):
        SCHEDULES.resolve("cubic(until='late')")
