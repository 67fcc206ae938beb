"""The measurement of the reader of image folders, on a small folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")


@pytest.mark.slow
def test_a_small_folder_is_measured(load_script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("image_reader")
    monkeypatch.setattr(script, "BATCH", 8)
    monkeypatch.setattr(script, "SIZE", 32)
    options = [
        "--images",
        "50",
        "--folder",
        str(tmp_path / "images"),
        "--workers",
        "2",
        "--turns",
        "1",
        "--epochs",
        "2",
    ]
    script.main([*options, "--interval", "0.01", "--json", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["images"] == 50
    assert 60_000 < record["bytes_per_image"] < 160_000  # ImageNet's are about 108 kB
    assert all(
        min(speed["median"], speed["processor_ms_per_image"]) > 0 for speed in record["images_per_second"].values()
    )
    assert {"loader", "loader_bytes", "stream_pillow"} <= set(record["images_per_second"])
    assert len(record["memory"]["most_in_each_epoch"]) == 2
    assert min(record["memory"]["most_in_each_epoch"]) > 0
    assert record["resume"]["same_with_workers"] == {"1": 4, "3": 4, "5": 4}
    assert (record["resume"]["batches"], record["resume"]["start"]) == (7, 3)
