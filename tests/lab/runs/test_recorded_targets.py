"""Every recorded run prunes the layers that its recipe prunes today, so that records keep their meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pomona as pm
from pomona.core.method import METHODS

RECORDS = Path(__file__).parents[3] / "results" / "runs"


def list_pruned_runs() -> dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]]:
    """Return model, method and pruned layers of one recorded run for each kind that prunes a set of layers."""
    found = {}
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text())
        if "recipe" not in record:  # an older one, of a network that others also record
            continue
        model, method = record["recipe"]["model"], record["recipe"]["method"]
        if method["name"] != "dense":
            layers = list(record["stages"][0]["layers"])
            kind = f"{model['name']}-{method['name']}-{json.dumps(method.get('pattern'))}-{len(layers)}"
            found.setdefault(kind, (model, method, layers))
    return found


RUNS = list_pruned_runs()


@pytest.mark.parametrize("kind", RUNS)
def test_recorded_runs_prune_what_their_recipe_prunes_now(kind: str) -> None:
    options, method, layers = RUNS[kind]
    with torch.device("meta"):
        model = pm.models.build(**options)
    assert sorted(target.name for target in METHODS.resolve(method).targets(model)) == sorted(layers)
