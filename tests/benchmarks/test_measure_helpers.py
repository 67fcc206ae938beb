"""The helpers that measurements share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def test_loops_take_turns_and_the_first_turn_is_not_counted(load_script: Any) -> None:
    calls: list[str] = []
    loops = {name: lambda name=name: calls.append(name) for name in ("dense", "pruned")}
    times = load_script("interleaved_timing").time_in_turns(loops, turns=3, steps=2, device="cpu")
    assert calls == ["pruned", "dense", "dense", "pruned", "pruned", "dense", "dense", "pruned"]
    assert {name: len(seconds) for name, seconds in times.items()} == {"dense": 3, "pruned": 3}
    assert min(map(min, times.values())) >= 0
    calls.clear()
    load_script("interleaved_timing").time_in_turns(loops, turns=1, steps=1, device="cpu", warm_up=8)
    assert calls.count("dense") == calls.count("pruned") == 9


def test_a_record_has_the_facts_about_its_run(load_script: Any, tmp_path: Path) -> None:
    write_record, path = load_script("record_file").write_record, tmp_path / "folder" / "record.json"
    write_record(None, rows=[])
    assert not path.parent.exists()
    write_record(path, rows=[1, 2])
    record = json.loads(path.read_text())
    assert {"command", "commit", "machine", "versions"} <= record.keys()
    assert record["rows"] == [1, 2]
