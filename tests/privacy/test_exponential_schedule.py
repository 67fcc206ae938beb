"""The exponential schedule."""

from __future__ import annotations

import pytest

from pomona.errors import PomonaError
from pomona.privacy import Exponential


def test_base_of_1_is_refused():
    with pytest.raises(PomonaError, match="base must be above 1"):
        Exponential(base=1.0)
