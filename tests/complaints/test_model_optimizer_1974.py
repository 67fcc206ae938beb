"""https://github.com/NVIDIA/Model-Optimizer/issues/1974: 2:4 weight sparsity shows no speed improvement."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from complaint_models import prune_at_once
from torch import nn

import pomona as pm
from pomona.sparse.layers import PackedLayer


@pytest.mark.parametrize("packed_seconds", [2.0, 0.5])
def test_a_slower_layer_is_never_used_and_the_report_says_so(
    packed_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verified 2:4 model ran as fast as the dense one, because its products went to dense kernels without a word."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    prune_at_once(model, pm.OneShot(pattern=pm.NM(2, 4), include=["0.weight"]))
    module = sys.modules["pomona.sparse.compress"]
    monkeypatch.setattr(module, "time_layer", lambda *_: {"dense": 1.0, "balanced": packed_seconds})
    monkeypatch.setattr(module, "time_models", lambda models, *_: (dict.fromkeys(models, 1.0), {}))
    result = pm.compress(model, torch.randn(1, 64))
    layer = result.compression.layers[0]
    assert isinstance(result[0], PackedLayer) == (packed_seconds < 1)
    assert layer.reason == ("2.0× faster" if packed_seconds < 1 else "dense is faster here")
    assert layer.seconds == (1.0, packed_seconds)


def test_a_layer_that_is_packed_against_the_measurement_is_called_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever packs every layer reads from the report that it costs time."""
    model = nn.Sequential(nn.Linear(64, 64))
    prune_at_once(model, pm.OneShot(pattern=pm.NM(2, 4), include=["0.weight"]))
    monkeypatch.setattr(sys.modules["pomona.sparse.compress"], "time_layer", lambda *_: {"dense": 1.0, "balanced": 2.5})
    assert pm.compress(model, policy="all").compression.layers[0].reason == "2.5× slower"


def test_an_export_says_what_was_not_gained(tmp_path: Path) -> None:
    """The cost of pruning, fine-tuning and building was paid, and the user found out by measuring that it was lost."""
    exporting = pytest.importorskip("pomona.export")
    model, x = nn.Sequential(nn.Linear(64, 64, bias=False)), torch.randn(1, 64)
    notes: list[str] = []
    options = {"format": "2:4", "example": x, "seconds": 0.0, "note": notes.append}
    dense = exporting.export(model, tmp_path / "dense.safetensors", **options)
    assert dense.packed == 0
    assert any(note.startswith("nothing was packed: ") for note in notes)
    prune_at_once(model, pm.OneShot(pattern=pm.NM(2, 4), include=["0.weight"]))
    sparse = exporting.export(model, tmp_path / "sparse.safetensors", **options)
    assert sparse.packed == 1
    as_fast = replace(sparse, latency={"before": 1.0, "after": 1.0})
    assert any(note.startswith("nothing became faster: ") for note in as_fast.warnings)
    twice_as_fast = replace(sparse, latency={"before": 1.0, "after": 0.5})
    assert not any(note.startswith("nothing became faster: ") for note in twice_as_fast.warnings)
