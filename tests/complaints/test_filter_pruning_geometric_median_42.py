"""https://github.com/he-y/filter-pruning-geometric-median/issues/42: more filters are zero than were asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_helpers import attach_to_network, train

import pomona as pm


@pytest.mark.parametrize(
    ("method", "options"),
    [(pm.OneShot, {}), (pm.Incremental, {"every": 4}), (pm.DPF, {"every": 4}), (pm.SFP, {"every": 4})],
)
def test_exactly_the_asked_number_of_filters_is_zero(method: Callable[..., pm.Pruner], options: dict[str, int]) -> None:
    """Of 64 filters at a rate of 0.3 the user found 50 left instead of 45, and the small model could not be made."""
    pruner = method(sparsity=0.3, pattern=pm.Filter(), allocation="uniform", **options)
    model, optimizer, pruner = attach_to_network(pruner, total=40)
    train(model, optimizer, range(40))
    pruner.finish()
    for name in pruner.masks():
        filters = model.get_parameter(name).flatten(1)
        assert int((filters == 0).all(1).sum()) == round(0.3 * len(filters))
