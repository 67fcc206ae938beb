"""How a benchmark's figures are kept: with the command, the machine, the versions and the commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pomona.lab.runs import environment as env


def write(path: Path | None, **results: Any) -> None:
    """Write a record, where one is asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**env.describe_environment(), **results}, indent=1) + "\n")
