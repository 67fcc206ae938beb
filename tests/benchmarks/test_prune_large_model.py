"""The benchmark of pruning a large model, with a tiny one."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("transformers")


def test_a_tiny_model_is_pruned_and_recorded(load_script, monkeypatch, tmp_path, capsys):
    script, record = load_script("prune_large_model"), tmp_path / "record.json"
    words = "--quick --device cpu --blocks 3 --windows 4 --tokens 8"
    monkeypatch.setattr(sys, "argv", ["prune_large_model.py", *words.split(), "--json", str(record)])
    script.main()
    rows = json.loads(record.read_text())["rows"]
    width, neurons, vocabulary = 64, 172, 100
    count = 3 * (4 * width * width + 3 * width * neurons + 2 * width) + 2 * vocabulary * width + width
    assert [row["method"] for row in rows] == ["wanda", "sparsegpt"]
    for row in rows:
        assert (row["parameters"], row["model_bytes"]) == (count, 2 * count)
        assert row["sparsity"] == pytest.approx(0.5)
        assert row["seconds"] == pytest.approx(3 * row["seconds_per_block"])
    assert "3 blocks" in capsys.readouterr().out
