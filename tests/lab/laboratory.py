"""What the tests of runs share."""

from __future__ import annotations

import json
from pathlib import Path


def rows(folder: Path, kind: str | None = None) -> list[dict]:
    """The rows of a run's metrics, or those of one kind."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def lasting(row: dict) -> dict:
    """What of a row does not depend on the clock."""
    return {k: v for k, v in row.items() if k not in ("seconds", "images_per_second")}


class After:
    """A `stop` that says yes once that many steps were taken."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0
