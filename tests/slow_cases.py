"""Mark the later cases of a long parametrization as slow, so that `make test` runs a few and `make test-all` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(count: int, cases: Iterable[Any], one_argument: bool = False) -> list[Any]:
    """Return the cases of `pytest.mark.parametrize`, with all but the first `count` marked slow.

    `one_argument` says that a case which is a tuple is the value of a single argument.
    """
    return [case if index < count else mark_slow(case, one_argument) for index, case in enumerate(cases)]


def slow_unless(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases of `pytest.mark.parametrize`, with those that are not among `fast` marked slow."""
    kept = list(fast)
    return [case if case in kept else mark_slow(case) for case in cases]


def mark_slow(case: Any, one_argument: bool = False) -> Any:
    """Return a case with the mark `slow` beside its own."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    values = case if isinstance(case, tuple) and not one_argument else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
