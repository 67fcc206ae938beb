"""The report of an export: its figures, and the warnings about what was not gained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import build_network, images
from torch import nn

import pomona as pm
from pomona.export import ExportReport


def make_report(**changes: Any) -> ExportReport:
    """Return a report of a pruned network that became smaller and faster."""
    fields: dict[str, Any] = {
        "format": "csr",
        "file": "x",
        "bytes": 250,
        "state_bytes": 1000,
        "zeros": 0.9,
        "packed": 3,
        "difference": 1e-6,
        "tolerance": 1e-4,
        "runtime": "torch",
        "batch": 1,
        "latency": {"before": 0.002, "after": 0.001},
        "reason": "there are no zeros",
    }
    return ExportReport(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"packed": 0}, ["nothing was packed: there are no zeros."]),
        ({"bytes": 1000}, ["nothing became smaller: 'x' has 1,000 bytes where the dense state has 1,000."]),
        (
            {"latency": {"before": 0.001, "after": 0.001}},
            ["nothing became faster: 1 ms by torch where the network takes 1 ms."],
        ),
        ({"latency": {}}, []),
        ({"packed": None, "zeros": 0.1, "bytes": 2000}, []),  # a dense network in a plain format: nothing to gain
        (
            {"packed": None, "bytes": 2000},
            ["nothing became smaller: 'x' has 2,000 bytes where the dense state has 1,000."],
        ),
    ],
)
def test_warnings_by_hand(changes: dict[str, Any], expected: list[str]) -> None:
    assert list(make_report(**changes).warnings) == expected


def test_facts_are_json_and_the_table_shows_them() -> None:
    report = make_report(details={"seed": 4})
    facts = json.loads(json.dumps(report.facts()))
    assert (facts["ratio"], facts["seed"], facts["latency"]["batch"]) == (4.0, 4, 1)
    text = str(report)
    for shown in ("1,000", "250", "4.00× smaller", "2.00× as fast", "1.0e-06", "90.00%", "3 weights without"):
        assert shown in text
    assert "1.25× larger" in str(make_report(bytes=1250))


def test_a_balanced_file_in_which_nothing_is_packed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 90 % unstructured network whose layers are all faster dense: its file was once called packed."""
    module = sys.modules[pm.compress.__module__]  # the function hides the module of its name
    monkeypatch.setattr(module, "time_layer", lambda *_: {"dense": 1.0, "balanced": 2.0})
    monkeypatch.setattr(module, "plan_copy", lambda *_: None)  # the whole network in one call is no choice either
    model = pm.models.build("digits_cnn")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(torch.rand_like(parameter) < 0.1)
    said: list[str] = []
    example = torch.randn(1, 1, 8, 8)
    report = pm.export(model, tmp_path / "x", "balanced", example, seconds=0, note=said.append)
    assert report.packed == 0
    assert report.bytes > report.state_bytes
    assert said[0].startswith("nothing was packed: every layer is faster with dense weights here")
    assert said[1].startswith(f"nothing became smaller: '{tmp_path / 'x'}' has {report.bytes:,} bytes where the dense")


def test_warnings_are_python_warnings_by_default(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="^nothing") as caught:
        report = pm.export(nn.Linear(8, 8), tmp_path / "x", "2:4")
    assert [str(warning.message) for warning in caught] == list(report.warnings)
    assert report.warnings[0] == (
        "nothing was packed: no weight has at most two nonzeros in every four; prune with pattern=pm.NM(2, 4)."
    )
    assert caught[0].filename == __file__


def test_a_network_without_balanced_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pm.PomonaError, match="has no layer with balanced blocks among its Linear, Conv2d and LSTM"):
        pm.export(build_network(1.0), tmp_path / "x", "balanced", images(), seconds=0)


def test_shared_weights_count_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[1].weight = model[0].weight
    report = pm.export(model, tmp_path / "x", "safetensors", seconds=0)
    assert report.state_bytes == 32 * 32 * 4
