"""Several ranks in a test: `RankWorld` of benchmarks/measure, which tests import from here."""

from __future__ import annotations

import sys
from pathlib import Path

MEASURE = Path(__file__).parents[1] / "benchmarks" / "measure"
sys.path.append(str(MEASURE))

from rank_world import RankWorld  # noqa: E402

__all__ = ["MEASURE", "RankWorld"]
