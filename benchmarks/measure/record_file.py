"""Write benchmark results to a record: a JSON file with the command, the machine, the versions and the commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pomona.lab.runs import environment as env

RESULTS = Path(__file__).parents[2] / "results"


def write_record(path: Path | None, **results: Any) -> None:
    """Write `results` and the facts about this run to `path`. Do nothing if `path` is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**env.describe_environment(), **results}, indent=1) + "\n")
